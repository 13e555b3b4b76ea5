"""Conv attention (Multi-Token Attention, arXiv 2504.00927): the definition and the fused kernels."""

from mta_kernels.backend import Choice
from mta_kernels.conv_attention.api import ConvAttention, conv_attention, conv_attention_decode, identity_weight
from mta_kernels.conv_attention.backends import BACKENDS
from mta_kernels.conv_attention.choice import explain, unsupported
from mta_kernels.conv_attention.reference import conv_attention_decode_reference, conv_attention_reference

__all__ = [
    "BACKENDS",
    "Choice",
    "ConvAttention",
    "conv_attention",
    "conv_attention_decode",
    "conv_attention_decode_reference",
    "conv_attention_reference",
    "explain",
    "identity_weight",
    "unsupported",
]
