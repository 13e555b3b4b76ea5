"""CUDA kernels of the forward of mixed heads without convolutions, for Hopper: see logits.cu."""

from mta_kernels.multi_token_attention.mix_cuda.logits import keep_logits, logits_unsupported

__all__ = ["keep_logits", "logits_unsupported"]
