"""The driver of a simulated GPU: what PyTorch and monitors ask of it, and the statistics of its allocator."""
