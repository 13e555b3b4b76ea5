"""Conv attention in Triton: the expanded form, fused, O(N) memory, on any CUDA GPU of sm_80 or later."""

from mta_kernels.conv_attention.triton.function import (
    conv_attention_decode_op,
    conv_attention_triton,
    triton_unsupported,
)

__all__ = ["conv_attention_decode_op", "conv_attention_triton", "triton_unsupported"]
