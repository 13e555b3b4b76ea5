"""`attn_implementation="mta"` in Hugging Face transformers. Importing this registers it."""

from transformers import AttentionInterface, AttentionMaskInterface

from mta_kernels.integrations.transformers.attention import mta_attention_forward
from mta_kernels.integrations.transformers.layers import add_multi_token_attention, reserve_states, watch_registrations
from mta_kernels.integrations.transformers.masks import mta_mask
from mta_kernels.integrations.transformers.options import NAME

AttentionInterface.register(NAME, mta_attention_forward)
AttentionMaskInterface.register(NAME, mta_mask)  # without one of the same name transformers drops the mask
reserve_states()
watch_registrations()

__all__ = ["add_multi_token_attention"]
