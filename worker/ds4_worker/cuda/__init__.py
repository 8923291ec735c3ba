"""The CUDA kernels, what they are called with, and their compiler."""
