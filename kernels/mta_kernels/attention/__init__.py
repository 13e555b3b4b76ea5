"""Plain attention, the yardstick: the eager definition and PyTorch's own fused backends."""

from mta_kernels.attention.reference import attention_reference
from mta_kernels.attention.sdpa import attention_sdpa, sdpa_unsupported

__all__ = ["attention_reference", "attention_sdpa", "sdpa_unsupported"]
