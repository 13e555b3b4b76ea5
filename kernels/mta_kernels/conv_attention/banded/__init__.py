"""What the kernels of the banded convolution share: headers of CUDA C++, the structures that they are given."""

from __future__ import annotations

from pathlib import Path

from mta_kernels.nvrtc.compiler import headers_in

FOLDER = Path(__file__).parent


def banded_headers() -> dict[str, str]:
    """Texts of the headers of this folder, by their names."""
    return headers_in(FOLDER, sorted(path.name for path in FOLDER.glob("*.cuh")))
