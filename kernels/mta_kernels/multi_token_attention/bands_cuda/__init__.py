"""CUDA kernels that convolve each head's stored scores, and compute the gradients, for sm_80 and later."""

from mta_kernels.multi_token_attention.bands_cuda.bands import BandsGradient, convolve

__all__ = ["BandsGradient", "convolve"]
