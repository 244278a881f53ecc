"""The reference backend: plain PyTorch, vectorised, any device. It defines the meaning."""

from dsv4.kernels.reference.append import append_swa
from dsv4.kernels.reference.attention import attend
from dsv4.kernels.reference.flush_write import flush_csa, flush_hca, write_layer
from dsv4.kernels.reference.gather import (
    gather_all_compressed_kv,
    gather_compressed_kv,
    gather_swa_kv,
)
from dsv4.kernels.reference.indexer import select_entries

__all__ = [
    "append_swa",
    "attend",
    "flush_csa",
    "flush_hca",
    "gather_all_compressed_kv",
    "gather_compressed_kv",
    "gather_swa_kv",
    "select_entries",
    "write_layer",
]
