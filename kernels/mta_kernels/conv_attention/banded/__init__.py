"""Shared by the kernels of the banded convolution: CUDA C++ headers, constants, structures."""

from pathlib import Path

FOLDER = Path(__file__).parent
