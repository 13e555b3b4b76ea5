"""mtabench: measure attention kernels so that the numbers can be trusted."""

from mta_kernels import __version__ as __version__  # both are one distribution

RESULTS = "mtabench-results"  # the folder that commands write to where they are given no other
