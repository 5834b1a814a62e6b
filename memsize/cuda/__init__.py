"""What CUDA would do, on any build of torch."""
