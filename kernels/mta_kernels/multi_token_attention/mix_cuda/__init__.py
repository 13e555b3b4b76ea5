"""CUDA kernels of the forward with mixed heads and without convolutions, for Hopper: see logits.cu and values.cu."""

from mta_kernels.multi_token_attention.mix_cuda.logits import keep_logits
from mta_kernels.multi_token_attention.mix_cuda.values import mix_values

__all__ = ["keep_logits", "mix_values"]
