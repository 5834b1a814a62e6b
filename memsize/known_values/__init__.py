"""Constant propagation: the values of small tensors, known although nothing is computed."""
