"""Attention kernels: multi-token (conv) attention, and plain attention as its yardstick."""

__version__ = "0.1.0"
