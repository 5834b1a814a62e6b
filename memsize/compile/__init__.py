"""What code that `torch.compile` compiles would allocate, reuse and free, by PyTorch's own compiler without a GPU."""
