"""The parts of PyTorch and Python that memsize reaches into: pytrees, a dispatch key, patches, global state."""
