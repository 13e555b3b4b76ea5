"""Attention kernels: multi-token (conv) attention, and plain attention as its yardstick."""
