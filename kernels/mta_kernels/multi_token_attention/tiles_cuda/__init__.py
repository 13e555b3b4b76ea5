"""CUDA kernels that convolve and mix tiles of stored scores of all heads, for sm_80 and later: see pre.cu, post.cu."""

from mta_kernels.multi_token_attention.tiles_cuda.tiles import post_tiles, pre_tiles

__all__ = ["post_tiles", "pre_tiles"]
