"""Attention in one fused CUDA kernel on the tensor cores, no score in memory: launches cuda_flash.cu.

float16 and bfloat16, sm_80 or later. Head dims are multiples of 8 up to 256; v may have another head dim than q and k.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.gpu_limits import cuda_capability
from mta_kernels.nvrtc.compiler import Source, missing_package
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ALL_ELEMENTS, Rows, fields, in_chunks
from mta_ladder.cuda_unfused import device_unsupported, diagonal, rung_source

MAX_HEAD_DIM = 256
L2_BYTES = 32 << 20  # for keys and values: the L2 of an A100 has 40 MB, of an H200 50
MAX_STRIDE = 1 << 26


@dataclass(frozen=True)
class Geometry:
    """The constants of cuda_flash.cu for a shape."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int

    kernel_name = "cuda_flash"
    warps = 4
    keys = 64  # of a tile
    stages = 1  # buffers for k, and for v
    blocks = 2  # an SM: this leaves 255 registers a thread

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows for a warp: two reuse what is read from shared memory, but do not fit with more columns."""
        return 2 if max(self.head_dim, self.value_dim) <= 128 else 1

    @property
    def rows(self) -> int:
        """Rows of out that a block computes."""
        return self.warps * self.row_tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def tile_bytes(self) -> dict[str, int]:
        """Bytes of q, k and v in shared memory, as 16-bit numbers, rows padded to multiples of 16."""
        depth, value_columns = (2 * 16 * -(-dim // 16) for dim in (self.head_dim, self.value_dim))
        return {"q": self.rows * depth, "k": self.keys * depth, "v": self.keys * value_columns}

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes: the tiles, and at the end, in their place, its rows of out."""
        q, k, v = self.tile_bytes.values()
        return max(q + self.stages * (k + v), self.rows * v // self.keys)

    def source(self, architecture: str) -> Source:
        constants = {
            "ELEMENT": ALL_ELEMENTS[self.dtype], "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim,
            "WARPS": self.warps, "ROW_TILES": self.row_tiles, "KEYS": self.keys, "STAGES": self.stages,
            "BLOCKS": self.blocks,
        }  # fmt: skip
        return rung_source("cuda_flash.cu", architecture, constants)


class Arguments(ctypes.Structure):
    """`struct Arguments` of cuda_flash.cu."""

    _fields_ = (
        *fields(Rows, "q k v"), ("out", c_void_p), ("scale_log2", c_float),
        *fields(c_int, "batch_heads heads group queries keys diagonal heads_together"),
    )  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, v `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

    Copies inputs whose rows are not contiguous or do not begin at multiples of 16 bytes, and q if `scale` is negative.
    Raises ValueError if Dv is not a multiple of 8 up to 256.
    """
    head_dim, value_dim = q.shape[3], v.shape[3]
    if value_dim % 8 or value_dim > MAX_HEAD_DIM:
        raise ValueError(f"v has rows of {value_dim} numbers; cuda-flash takes multiples of 8 up to {MAX_HEAD_DIM}")
    return launch(Geometry(q.dtype, head_dim, value_dim), q, k, v, causal=causal, scale=scale)


def launch(geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """`attention` with these constants."""
    if scale < 0:  # the kernel takes the row maximum before it multiplies by the scale
        q, scale = -q, -scale
    near = (x if x.stride(2) <= MAX_STRIDE else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    q, k, v = map(in_chunks, near)
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    group = heads // kv_heads
    out = empty(batch, heads, queries, geometry.value_dim, dtype=q.dtype, device=q.device)
    bytes_a_head = 2 * keys * (geometry.head_dim + geometry.value_dim)
    together = group * max(L2_BYTES // bytes_a_head, 1)
    arguments = Arguments(
        Rows.of(q), Rows.of(k), Rows.of(v), out.data_ptr(), max(scale * math.log2(math.e), 1e-37), batch * heads, heads,
        group, queries, keys, diagonal(queries, keys, causal=causal), min(together, batch * heads),
    )  # fmt: skip
    blocks = -(-queries // geometry.rows) * batch * heads
    kernel(geometry, q.device.index).launch((blocks, 1), arguments)
    return out


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run, in one clause with what would work, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return (
            f"cuda-flash takes float16 and bfloat16, which tensor cores multiply, not {dtype}; cuda-tiled takes float32"
        )
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"cuda-flash takes head dims that are multiples of 8 up to {MAX_HEAD_DIM}, not {head_dim}"
    reason = device_unsupported(device)
    if reason:
        return reason
    if cuda_capability(device) < (8, 0):
        return f"cuda-flash needs a GPU of sm_80 or later, which {torch.cuda.get_device_name(device)} is not"
    return missing_package(device)


def tile_bytes(head_dim: int, element_size: int) -> dict[str, int]:
    """Bytes that a block keeps on the chip, by their purpose; v is as wide as q and k.

    "q tile", "k tile" and "v tile" lie in shared memory, in numbers of `element_size` bytes; "statistics", the running
    maximum and sum of each row, and "accumulator", the sums of out, are float32 in registers.
    """
    geometry = Geometry(torch.bfloat16, head_dim, head_dim)
    tiles = {f"{name} tile": size // 2 * element_size for name, size in geometry.tile_bytes.items()}
    accumulator = geometry.rows * 16 * -(-head_dim // 16) * 4
    return {**tiles, "statistics": geometry.rows * 2 * 4, "accumulator": accumulator}
