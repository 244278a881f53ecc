"""The steps of the cache: contracts, the reference that defines them, and the GPU kernels."""
