"""Code that `torch.compile` compiles, by PyTorch's own compiler on a machine without a GPU: what the compiled code would
allocate, reuse and free."""
