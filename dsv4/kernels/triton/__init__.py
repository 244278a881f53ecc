"""The Triton backend, for Hopper and Blackwell: the reference's bytes."""

from dsv4.kernels.triton.flush_write import write_layer

__all__ = ["write_layer"]
