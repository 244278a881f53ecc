"""The Triton backend, for Hopper and Blackwell: the reference's bytes."""

from dsv4.kernels.triton.acceptance import apply_accepted
from dsv4.kernels.triton.attention import attend
from dsv4.kernels.triton.checkpoint import checkpoint_tails, checkpoint_window
from dsv4.kernels.triton.flush_write import write_layer
from dsv4.kernels.triton.gather import gather_all_compressed_kv, gather_compressed_kv, gather_swa_kv
from dsv4.kernels.triton.indexer import select_entries
from dsv4.kernels.triton.rope import make_rope

__all__ = [
    "apply_accepted",
    "attend",
    "checkpoint_tails",
    "checkpoint_window",
    "gather_all_compressed_kv",
    "gather_compressed_kv",
    "gather_swa_kv",
    "make_rope",
    "select_entries",
    "write_layer",
]
