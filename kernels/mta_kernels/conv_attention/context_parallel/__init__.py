"""Conv attention of a sequence that the ranks of a process group share (context parallel)."""

from mta_kernels.conv_attention.context_parallel.layout import cache_positions, shard_sequence, unshard_sequence
from mta_kernels.conv_attention.context_parallel.ring import passed_bytes

__all__ = ["cache_positions", "passed_bytes", "shard_sequence", "unshard_sequence"]
