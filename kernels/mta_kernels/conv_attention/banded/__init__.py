"""What the kernels of the banded convolution share: headers of CUDA C++, constants, structures."""

from pathlib import Path

FOLDER = Path(__file__).parent
