"""Conv attention of a sequence that the ranks of a process group share (context parallel)."""

from mta_kernels.conv_attention.context_parallel.layout import cache_positions, shard_sequence, unshard_sequence

__all__ = ["cache_positions", "shard_sequence", "unshard_sequence"]
