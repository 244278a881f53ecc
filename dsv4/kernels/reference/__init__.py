"""The reference backend: plain PyTorch, vectorised, on any device. It defines every result."""

from dsv4.kernels.reference.acceptance import apply_accepted
from dsv4.kernels.reference.append import append_swa
from dsv4.kernels.reference.attention import attend
from dsv4.kernels.reference.checkpoint import checkpoint_tails, checkpoint_window
from dsv4.kernels.reference.compressor import csa_compress_tail, hca_compress_tail
from dsv4.kernels.reference.flush_write import flush_write_csa, flush_write_hca, write_layer
from dsv4.kernels.reference.gather import (
    gather_all_compressed_kv,
    gather_compressed_kv,
    gather_swa_kv,
)
from dsv4.kernels.reference.indexer import select_entries
from dsv4.kernels.reference.rope import make_rope

__all__ = [
    "append_swa",
    "apply_accepted",
    "attend",
    "checkpoint_tails",
    "checkpoint_window",
    "csa_compress_tail",
    "flush_write_csa",
    "flush_write_hca",
    "gather_all_compressed_kv",
    "gather_compressed_kv",
    "gather_swa_kv",
    "hca_compress_tail",
    "make_rope",
    "select_entries",
    "write_layer",
]
