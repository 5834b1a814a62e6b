"""What PyTorch would do on CUDA, reproduced on any build of torch and without a GPU."""
