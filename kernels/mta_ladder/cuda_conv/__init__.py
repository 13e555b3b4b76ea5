"""The published approach to conv attention in CUDA C++: overlapping tiles, with the convolution on CUDA cores."""

from mta_ladder.cuda_conv.attention import conv_attention
from mta_ladder.cuda_conv.decode import conv_attention_decode
from mta_ladder.cuda_conv.shape import unsupported

__all__ = ["conv_attention", "conv_attention_decode", "unsupported"]
