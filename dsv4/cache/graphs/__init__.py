"""CUDA graphs over the cache: captured forwards, and kernels compiled before them."""
