"""Kernels for Hopper alone, in Gluon: they assign warps, registers and barriers.

`kernels.triton.attention` and `kernels.triton.chunk_scores` choose them. Every other GPU has the
kernels of `kernels.triton`.
"""
