"""Kernels for Hopper alone, in Gluon: twins of Triton kernels where their compiler stands in the
way. The Triton kernel of the same contract stays the portable path.
"""
