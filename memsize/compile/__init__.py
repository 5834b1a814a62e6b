"""The memory of code that `torch.compile` compiles, by PyTorch's own compiler without a GPU."""
