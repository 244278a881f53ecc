"""The Triton backend, for Hopper and Blackwell: the reference's bytes."""

from dsv4.kernels.triton.flush_write import write_layer
from dsv4.kernels.triton.gather import (
    gather_all_compressed_kv,
    gather_compressed_kv,
    gather_swa_kv,
)

__all__ = ["gather_all_compressed_kv", "gather_compressed_kv", "gather_swa_kv", "write_layer"]
