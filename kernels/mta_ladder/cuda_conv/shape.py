"""The constants, tiles, shared memory and machine code of a shape; and which shapes the kernels refuse."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from mta_kernels.gpu_limits import absent, cuda_capability
from mta_kernels.nvrtc.compiler import Source, headers_in, missing_package
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ALL_ELEMENTS

FOLDER = Path(__file__).parent
MAX_HEAD_DIM, MAX_TAPS = 128, 11
OLDEST = (8, 0)  # the compute capability that has the instructions

# As in tiles.cuh.
THREADS, TILE = 128, 64
SCORE_BYTES = (TILE + 8) * 72 * 4


def unsupported(
    *, device: torch.device | str, dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int
) -> str | None:
    """Why these kernels cannot run here, in a clause, or None if they can."""
    return (
        device_unsupported(torch.device(device))
        or shape_unsupported(dtype, head_dim, query_taps, key_taps)
        or missing_package(torch.device(device))
    )


def device_unsupported(device: torch.device) -> str | None:
    """Why a device lacks what these kernels use, or None."""
    if device.type != "cuda":
        return f"its kernels need an NVIDIA GPU of sm_80 or later, not a {device.type} device"
    if reason := absent(device):
        return reason
    major, minor = cuda_capability(device)
    if (major, minor) < OLDEST:
        return f"its kernels need sm_80 or later, and {torch.cuda.get_device_name(device)} is sm_{major}{minor}"
    return None


def shape_unsupported(dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why no GPU could run these, or None."""
    if dtype not in ALL_ELEMENTS:
        return f"dtype {dtype} is not float16, bfloat16 or float32"
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 from 8 to {MAX_HEAD_DIM}"
    if query_taps > MAX_TAPS or key_taps > MAX_TAPS:
        return f"{query_taps}x{key_taps} taps are outside 1x1 to {MAX_TAPS}x{MAX_TAPS} (query taps x key taps)"
    return None


@dataclass(frozen=True)
class Shape:
    """The constants of the sources, and what follows from them for a launch."""

    dtype: torch.dtype
    head_dim: int
    query_taps: int
    key_taps: int

    @property
    def forward_rows(self) -> int:
        """Rows of out that a block computes."""
        return TILE - (self.query_taps - 1)

    @property
    def backward_rows(self) -> int:
        """Rows of dq that a block computes."""
        return TILE - 2 * (self.query_taps - 1)

    @property
    def backward_columns(self) -> int:
        """Rows of dk and dv that a block computes."""
        return TILE - 2 * (self.key_taps - 1)

    @property
    def shared_memory(self) -> dict[str, int]:
        """Bytes that a block of each source takes, as the source lays them out."""
        size = self.dtype.itemsize
        chunks = ceil(self.head_dim / (128 if size == 2 else 64))
        chunk = ceil(self.head_dim / chunks / 16) * 16
        tile = TILE * (chunk * size + 16)
        taps = self.query_taps * ceil(self.key_taps / 4) * 16
        backward = 3 * tile + 2 * SCORE_BYTES + 2 * taps + 2 * TILE * 4
        keys = THREADS * (self.head_dim * size + 16)
        decode = keys + 4 * (self.query_taps * (self.head_dim + THREADS) + THREADS) + taps + 16
        return {
            "forward.cu": 2 * tile + SCORE_BYTES + taps + TILE * 4,
            "backward_q.cu": backward,
            "backward_kv.cu": backward,
            "decode.cu": decode,
        }


@dataclass(frozen=True)
class ConvKernel:
    """A kernel of a source."""

    shape: Shape
    file: str
    kernel_name: str

    threads = THREADS

    @functools.cached_property
    def shared_memory(self) -> int:
        return self.shape.shared_memory[self.file]

    def source(self, architecture: str) -> Source:
        shape = self.shape
        constants = {
            "ELEMENT": ALL_ELEMENTS[shape.dtype], "TENSOR_CORES": int(shape.dtype.itemsize == 2),
            "HEAD_DIM": shape.head_dim, "QUERY_TAPS": shape.query_taps, "KEY_TAPS": shape.key_taps,
        }  # fmt: skip
        return Source(FOLDER / self.file, architecture, constants, headers_in(FOLDER))


def launch(shape: Shape, file: str, name: str, blocks: int, device: torch.device, arguments: Any) -> None:
    """Launch the kernel `name` of a source on PyTorch's current stream."""
    kernel(ConvKernel(shape, file, name), device.index).launch((blocks, 1), arguments)
