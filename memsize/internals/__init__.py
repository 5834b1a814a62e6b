"""The places of PyTorch that memsize reaches into: pytrees, a dispatch key, patched functions, global state."""
