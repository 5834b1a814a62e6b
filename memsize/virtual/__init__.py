"""A machine with a GPU that isn't there: PyTorch answers as on a machine that has it, and allocates nothing.

Tensors "on the GPU" are `meta` tensors that say ``cuda:0``; tensors on the CPU stay what they are, with their values.
"""
