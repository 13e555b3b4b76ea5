"""mtabench: measure attention kernels so that the numbers can be trusted."""

__version__ = "0.1.0"

RESULTS = "mtabench-results"  # the folder that commands write to where they are given no other
