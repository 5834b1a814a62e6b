"""PyTorch's decisions on CUDA, on any build of torch and without a GPU: which kernel runs, and in which dtype."""
