"""Attention in three CUDA kernels with the scores in memory: launches cuda_naive.cu and cuda_tiled.cu.

float32, float16 and bfloat16, any head dim. Takes `4 B Hq M N` bytes for the scores.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.allocation import empty
from mta_kernels.nvrtc.compiler import Source, headers_in, missing_package
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ALL_ELEMENTS, fields

FOLDER = Path(__file__).parent
THREADS = 256  # of the blocks of all kernels here
TILE = 64  # as in cuda_tiled.cu


def device_unsupported(device: torch.device) -> str | None:
    """Why no CUDA kernel runs on this device, or None."""
    if device.type != "cuda" or (torch.version.cuda is None and not planned.gpu_at(device.index)):
        return f"CUDA kernels need an NVIDIA GPU, not a {device.type} device"
    return None


def rung_source(file: str, architecture: str, constants: dict[str, Any]) -> Source:
    """A source in this folder, for an architecture such as "sm_90"."""
    return Source(FOLDER / file, architecture, constants, headers_in(FOLDER))


@dataclass(frozen=True)
class UnfusedStep:
    """A kernel of a source."""

    file: str
    kernel_name: str
    dtype: torch.dtype

    threads, shared_memory = THREADS, 0

    def source(self, architecture: str) -> Source:
        return rung_source(self.file, architecture, {"ELEMENT": ALL_ELEMENTS[self.dtype]})


def diagonal(queries: int, keys: int, *, causal: bool) -> int:
    """Query i sees the keys up to i + this: the queries are the last of the sequence."""
    return keys - queries if causal else keys


STEPS = ("scores", "softmax_rows", "weighted_sum")  # the kernels of a source


class Arguments(ctypes.Structure):
    """`struct Arguments` of both sources."""

    _fields_ = (
        *fields(c_void_p, "q k v out scores"), ("scale", c_float),
        *fields(c_int, "batch_heads group queries keys head_dim value_dim diagonal"),
    )  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, rung: str) -> Tensor:
    """q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, v `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`. Copies what is not contiguous."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, heads, queries, head_dim = q.shape
    keys, value_dim = v.shape[2:]
    scores = empty(batch, heads, queries, keys, dtype=torch.float32, device=q.device)
    out = empty(batch, heads, queries, value_dim, dtype=q.dtype, device=q.device)
    arguments = Arguments(
        *(x.data_ptr() for x in (q, k, v, out, scores)), scale, batch * heads, heads // k.shape[1], queries, keys,
        head_dim, value_dim, diagonal(queries, keys, causal=causal),
    )  # fmt: skip
    file, blocks_of = SOURCES[rung]
    for name, blocks in zip(STEPS, blocks_of(batch * heads, queries, keys, value_dim), strict=True):
        kernel(UnfusedStep(file, name, q.dtype), q.device.index).launch((blocks, 1), arguments)
    return out


def naive_blocks(batch_heads: int, queries: int, keys: int, value_dim: int) -> tuple[int, int, int]:
    """A thread a score, a row, and an element of out."""
    rows = batch_heads * queries
    return -(-rows * keys // THREADS), -(-rows // THREADS), -(-rows * value_dim // THREADS)


def tiled_blocks(batch_heads: int, queries: int, keys: int, value_dim: int) -> tuple[int, int, int]:
    """A block a tile of scores, a warp a row, and a block a tile of out."""
    query_tiles, key_tiles, value_tiles = (-(-length // TILE) for length in (queries, keys, value_dim))
    row_tiles, rows_a_block = batch_heads * query_tiles, THREADS // 32
    return row_tiles * key_tiles, -(-batch_heads * queries // rows_a_block), row_tiles * value_tiles


SOURCES = {"cuda-naive": ("cuda_naive.cu", naive_blocks), "cuda-tiled": ("cuda_tiled.cu", tiled_blocks)}


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int, rung: str) -> str | None:
    """Why it cannot run, in one clause with what would work, or None."""
    if dtype not in ALL_ELEMENTS:
        return f"{rung} takes float32, float16 and bfloat16, not {dtype}"
    return device_unsupported(device) or missing_package(device)
