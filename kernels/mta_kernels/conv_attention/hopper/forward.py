"""Launches forward.cu: which constants a shape takes, tensor maps for the copy engine, scratch, and the two kernels."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention.hopper.prepare import (
    ELEMENTS,
    NORM_PARTS,
    Positions,
    Preparation,
    Rows,
    Tiles,
    launch_prepare,
)
from mta_kernels.conv_attention.hopper.source import Product, hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import describable, tensor_map
from mta_kernels.cuda import driver
from mta_kernels.cuda.compiler import Source, machine_code, missing_package
from mta_kernels.gpu_limits import sm_count
from mta_kernels.torch_compile import asked_once

QUERY_TAPS, KEY_TAPS = 8, 17  # at most
ROWS, SLAB = 64, 64 * 128
FETCHING_WARPS = 3  # of a block's producer
MAX_VALUE_DIM = 128


def hopper_unsupported(
    *, device: torch.device | str, dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int
) -> str | None:
    """Why the Hopper kernels cannot run with these on this machine, or None if they can."""
    return _platform_unsupported(device) or shape_unsupported(dtype, head_dim, query_taps, key_taps)


@asked_once
def _platform_unsupported(device: torch.device | str) -> str | None:
    device = torch.device(device)
    if device.type != "cuda":
        return f"Hopper kernels need an NVIDIA H100, H200 or GH200, not a {device.type} device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is no Hopper GPU (sm_90), whose instructions these kernels use"
    return missing_package()


def shape_unsupported(dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why no Hopper GPU could run these, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if not (16 <= head_dim <= 128 and head_dim % 8 == 0) and not (128 < head_dim <= 256 and head_dim % 16 == 0):
        return f"head_dim {head_dim} is not a multiple of 8 from 16 to 128, or of 16 up to 256"
    if query_taps > QUERY_TAPS or key_taps > KEY_TAPS:
        return f"{query_taps}x{key_taps} taps are outside 1x1 to {QUERY_TAPS}x{KEY_TAPS} (query taps x key taps)"
    return None


class Geometry(Tiles):
    """The constants of forward.cu for a shape."""

    @property
    def value_parts(self) -> int:
        """Blocks that share the columns of v: the accumulators of 128 columns fill the registers."""
        return -(-self.head_dim // MAX_VALUE_DIM)

    @property
    def value_dim(self) -> int:
        return self.head_dim // self.value_parts

    @property
    def warpgroups(self) -> int:  # type: ignore[override]
        """Consumers a block: three have 160 registers a thread, enough for 64 columns, and two have 240."""
        return 3 if self.head_dim <= 64 else 2

    @property
    def stages(self) -> int:  # type: ignore[override]
        """Tiles of keys and of values under way: a third helps where there is room for it."""
        return 3 if 64 < self.head_dim <= 128 else 2

    @property
    def block_rows(self) -> int:
        """Rows of out of a work."""
        return self.warpgroups * (ROWS - (self.query_taps - 1))

    @property
    def query_buffers(self) -> int:
        """Queries of this work and of the next, where consumers read them from shared memory to the end."""
        return 2 if self.warpgroups == 3 else 1

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as forward.cu lays them out."""
        value_slabs = -(-self.value_dim // 64)
        tiles = self.query_buffers * self.warpgroups * self.slabs + self.stages * (self.slabs + value_slabs)
        scores = 2 * self.warpgroups * 8 * (8 + ROWS) * 16
        barriers = 4 * self.stages + 11
        small = 2 * self.prepared.tap_bytes + barriers * 8 + 2 * 8 + FETCHING_WARPS * 4
        return tiles * SLAB + scores + small

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "VALUE_DIM": self.value_dim, "VALUE_PARTS": self.value_parts}

    def products(self) -> list[Product]:
        element = ELEMENTS[self.dtype]
        found = [
            Product(columns, of, how)
            for columns, of in ((64, element), (32, "Half"))
            for how in ("shared", "fragments")
        ]
        found.append(Product(self.value_dim, element, "registers"))
        return list(dict.fromkeys(found))

    @property
    def source(self) -> Source:
        return hopper_source("forward.cu", self.products(), self.constants())


class Arguments(ctypes.Structure):
    """`struct Arguments` of forward.cu."""

    _fields_ = (
        ("at", Positions),
        ("taps", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("key_norms", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),
        ("taken", ctypes.c_void_p),
        ("row_blocks", ctypes.c_int),
        ("works", ctypes.c_int),
        ("blocks", ctypes.c_int),
    )


def conv_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool, scale: float, pad: int, spans: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As the Triton backend's `conv_attention_forward`: out `[B, Hq, M, D]` and logsumexp `[B, Hq, M]` float32.

    Inputs that the copy engine cannot describe are copied first: those whose last dimension is not contiguous, whose
    other strides are not multiples of 16 bytes, or that do not begin at one. Nothing waits for the GPU.
    """
    q, k, v = (describable(x) for x in (q, k, v))
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    geometry = Geometry(q.dtype, head_dim, weight.shape[1], weight.shape[2], pad, causal, spans is not None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    scratch = torch.empty(scratch_bytes(geometry, heads, batch * kv_heads), dtype=torch.uint8, device=q.device)
    taps, weight_scale, key_norms, taken = scratch_addresses(scratch, geometry, heads, batch * kv_heads)
    preparation = Preparation(
        k=Rows.of(k), **Preparation.of_weight(weight), taps=taps, weight_scale=weight_scale, key_norms=key_norms,
        taken=taken, scale_log2=scale * math.log2(math.e), heads=heads, kv_heads=kv_heads, batch=batch, query_rows=query_rows,
        key_rows=key_rows,
    )  # fmt: skip
    launch_prepare(geometry.prepared, preparation, q.device.index)
    row_blocks = -(-query_rows // geometry.block_rows)
    positions = Positions(
        spans.data_ptr() if spans is not None else None, heads, heads // kv_heads, query_rows, key_rows
    )
    works = row_blocks * geometry.value_parts * heads * batch
    blocks = min(works, sm_count(q.device))
    arguments = Arguments(
        positions, taps, weight_scale, key_norms, out.data_ptr(), logsumexp.data_ptr(), taken, row_blocks, works, blocks
    )
    maps = [tensor_map(x) for x in (q, k, v)]
    driver.launch(
        kernel(geometry, q.device.index), (blocks, 1), geometry.threads, geometry.shared_memory, q.device.index,
        *maps, arguments,
    )  # fmt: skip
    return out, logsumexp


def scratch_bytes(geometry: Geometry, heads: int, batch_kv_heads: int) -> int:
    """For T `[Hq, cq, 512]` fp16, its scale `[Hq]` and key norms `[B * Hkv, NORM_PARTS]` float32, and a counter."""
    return heads * (geometry.prepared.tap_bytes + 4) + batch_kv_heads * NORM_PARTS * 4 + 4


def scratch_addresses(
    scratch: Tensor, geometry: Geometry, heads: int, batch_kv_heads: int
) -> tuple[int, int, int, int]:
    """Where T, its scale, the key norms and the counter begin."""
    taps = scratch.data_ptr()
    weight_scale = taps + heads * geometry.prepared.tap_bytes
    key_norms = weight_scale + heads * 4
    return taps, weight_scale, key_norms, key_norms + batch_kv_heads * NORM_PARTS * 4


@functools.cache
def kernel(geometry: Geometry, device: int) -> Any:
    """The kernel on a device, compiled at the first call: seconds, unless the disk has it."""
    return driver.load(machine_code(geometry.source), "hopper_forward", geometry.shared_memory, device)
