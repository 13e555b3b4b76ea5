"""CUDA kernels that mix heads, for sm_80 and later: see mixing.cuh."""

from mta_kernels.multi_token_attention.heads_cuda.heads import HeadMixings, rebuild_probabilities

__all__ = ["HeadMixings", "rebuild_probabilities"]
