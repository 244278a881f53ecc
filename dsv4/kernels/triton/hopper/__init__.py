"""Attention kernels for Hopper alone, in Gluon: they assign warps, registers and barriers.

`kernels.triton.attention` chooses them, and has the kernel for every other GPU.
"""
