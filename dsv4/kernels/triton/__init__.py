"""The Triton backend, for Hopper and Blackwell: the reference's bytes."""

from dsv4.kernels.triton.flush_write import append_swa, flush_csa, flush_hca, write_layer

__all__ = ["append_swa", "flush_csa", "flush_hca", "write_layer"]
