"""What the CUDA rungs share: their sources as the compiler takes them, and a kernel of one of them on a device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source, headers_in, machine_code, missing_package
from mta_kernels.nvrtc.structures import fields

FOLDER = Path(__file__).parent
HEADERS = ("elements.cuh", "mma.cuh")
ELEMENTS = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}  # as in elements.cuh
THREADS = 256  # a block of cuda_naive.cu and cuda_tiled.cu
STEPS = ("scores", "softmax_rows", "weighted_sum")  # their kernels

Constants = tuple[tuple[str, Any], ...]


def device_unsupported(device: torch.device) -> str | None:
    """Why no CUDA kernel runs on this device, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"CUDA kernels need an NVIDIA GPU, not a {device.type} device"
    return None


def source(file: str, architecture: str, constants: Constants) -> Source:
    """A source in this folder, for an architecture such as "sm_90"."""
    return Source(FOLDER / file, architecture, dict(constants), headers_in(FOLDER, HEADERS))


@functools.cache
def kernel(file: str, name: str, constants: Constants, device: int, shared_memory: int = 0) -> Any:
    """The kernel `name` of a source on a device, compiled at the first call: seconds, unless the disk has it."""
    code = machine_code(source(file, driver.architecture(device), constants))
    return driver.load(code, name, shared_memory, device)


class MatrixArguments(ctypes.Structure):
    """`struct Arguments` of cuda_naive.cu and cuda_tiled.cu."""

    _fields_ = (
        *fields(c_void_p, "q k v out scores"), ("scale", c_float),
        *fields(c_int, "batch_heads group queries keys head_dim value_dim diagonal"),
    )  # fmt: skip


def unfused_attention(
    file: str, blocks: Callable[[int, int, int, int], Sequence[int]], q: Tensor, k: Tensor, v: Tensor, *, causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention by the three kernels of a source, with the scores in memory. Copies what is not contiguous.

    `blocks(batch * heads, queries, keys, columns of v)` gives the blocks of each kernel, of THREADS threads.
    """
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, heads, queries, head_dim = q.shape
    keys, value_dim = v.shape[2:]
    scores = torch.empty(batch, heads, queries, keys, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, queries, value_dim, dtype=q.dtype, device=q.device)
    arguments = MatrixArguments(
        *(x.data_ptr() for x in (q, k, v, out, scores)), scale, batch * heads, heads // k.shape[1], queries, keys,
        head_dim, value_dim, diagonal(queries, keys, causal=causal),
    )  # fmt: skip
    constants, device = (("ELEMENT", ELEMENTS[q.dtype]),), q.device.index
    for name, count in zip(STEPS, blocks(batch * heads, queries, keys, value_dim), strict=True):
        driver.launch(kernel(file, name, constants, device), (count, 1), THREADS, 0, device, arguments)
    return out


def unfused_unsupported(rung: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why such a rung cannot run, in one clause with what would work, or None."""
    if dtype not in ELEMENTS:
        return f"{rung} takes float32, float16 and bfloat16, not {dtype}"
    return device_unsupported(device) or missing_package()


def diagonal(queries: int, keys: int, *, causal: bool) -> int:
    """Query i sees the keys up to i + this: the queries are the last of the sequence."""
    return keys - queries if causal else keys
