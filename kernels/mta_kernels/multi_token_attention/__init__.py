"""The whole multi-token attention: convolutions and mixings of heads before and after the softmax, norm and gate."""

from mta_kernels.backend import Choice
from mta_kernels.multi_token_attention.api import multi_token_attention
from mta_kernels.multi_token_attention.backends import BACKENDS
from mta_kernels.multi_token_attention.choice import explain, unsupported
from mta_kernels.multi_token_attention.decode.api import multi_token_attention_decode
from mta_kernels.multi_token_attention.decode.reference import multi_token_attention_decode_reference, prefill_state
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.module import MultiTokenAttention, layer_entries
from mta_kernels.multi_token_attention.reference import multi_token_attention_reference

__all__ = [
    "BACKENDS",
    "Choice",
    "DecodeState",
    "MultiTokenAttention",
    "explain",
    "layer_entries",
    "multi_token_attention",
    "multi_token_attention_decode",
    "multi_token_attention_decode_reference",
    "multi_token_attention_reference",
    "prefill_state",
    "unsupported",
]
