"""The whole multi-token attention: convolutions and mixings of heads before and after the softmax."""

from mta_kernels.multi_token_attention.backends import BACKENDS
from mta_kernels.multi_token_attention.reference import multi_token_attention_reference

__all__ = ["BACKENDS", "multi_token_attention_reference"]
