"""One rank of a distributed job, alone in its process: PyTorch's own `torch.distributed` without the other ranks."""
