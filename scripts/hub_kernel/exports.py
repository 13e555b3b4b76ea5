"""Multi-token attention (arXiv 2504.00927): attention whose scores are convolved and mixed before the softmax."""

from mta_kernels import layers
from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    conv_attention_decode,
    conv_attention_decode_reference,
    conv_attention_reference,
    explain,
    identity_weight,
)
from mta_kernels.multi_token_attention import (
    DecodeState,
    MultiTokenAttention,
    layer_entries,
    multi_token_attention,
    multi_token_attention_decode,
    multi_token_attention_decode_reference,
    multi_token_attention_reference,
    prefill_state,
)

__all__ = [
    "ConvAttention",
    "DecodeState",
    "MultiTokenAttention",
    "conv_attention",
    "conv_attention_decode",
    "conv_attention_decode_reference",
    "conv_attention_reference",
    "explain",
    "identity_weight",
    "layer_entries",
    "layers",
    "multi_token_attention",
    "multi_token_attention_decode",
    "multi_token_attention_decode_reference",
    "multi_token_attention_reference",
    "prefill_state",
]
