"""CUDA kernels that convolve stored scores of each head, and give the gradients of that, for sm_80 and later."""

from mta_kernels.multi_token_attention.bands_cuda.bands import BandsGradient, convolve

__all__ = ["BandsGradient", "convolve"]
