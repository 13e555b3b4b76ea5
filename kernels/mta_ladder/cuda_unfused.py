"""Attention in three CUDA kernels with the scores in memory: launches cuda_naive.cu and cuda_tiled.cu.

float32, float16 and bfloat16, any head dim. Takes `4 B Hq M N` bytes for the scores.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.nvrtc.structures import ALL_ELEMENTS, fields
from mta_ladder.cuda_launch import device_unsupported, diagonal, kernel

STEPS = ("scores", "softmax_rows", "weighted_sum")  # the kernels of a source
THREADS = 256  # of their blocks
TILE = 64  # as in cuda_tiled.cu


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
    source, blocks_of = SOURCES[rung]
    constants, device = (("ELEMENT", ALL_ELEMENTS[q.dtype]),), q.device.index
    for name, blocks in zip(STEPS, blocks_of(batch * heads, queries, keys, value_dim), strict=True):
        driver.launch(kernel(source, name, constants, device), (blocks, 1), THREADS, 0, device, arguments)
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
