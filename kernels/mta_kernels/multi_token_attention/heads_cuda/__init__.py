"""CUDA kernels of the backward in which heads meet, for sm_80 and later: see mixing.cuh."""

from mta_kernels.multi_token_attention.heads_cuda.heads import HeadMixings

__all__ = ["HeadMixings"]
