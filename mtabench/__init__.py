"""mtabench: measure attention kernels so that the numbers can be trusted."""

__version__ = "0.1.0"
