"""Packages of CUDA kernels that are not installed: simulated by what their functions allocate, save and return."""
