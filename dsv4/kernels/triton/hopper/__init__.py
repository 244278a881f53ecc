"""Attention kernels for Hopper alone, in Gluon, where Triton's compiler stands in the way.

The Triton kernel of the same contract stays the portable path.
"""
