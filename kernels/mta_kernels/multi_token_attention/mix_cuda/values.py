"""Launches values.cu: from stored exponentials to rows of out."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mta_kernels.call_memory import keep
from mta_kernels.conv_attention.hopper.tensor_maps import describable, tensor_map
from mta_kernels.multi_token_attention.mix_cuda.logits import shape_unsupported, source
from mta_kernels.multi_token_attention.rows_cuda.rows import Matrix
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ELEMENTS, fields

KEYS, THREADS = 32, 512
UNIT = 8 * 16 * KEYS * 2  # bytes: exponentials of 8 rows, 16 heads and the keys of a step
SHARED_BYTES = 232448  # of a block, on sm_90
PLANE_STAGES = 2


@dataclass(frozen=True)
class ValuesConstants:
    """The constants of a kernel: `cluster` blocks share a tile of `rows` query rows, 64 or 128.

    A block's sums, its heads x rows x head_dim in float32, must fit half of the registers.
    """

    heads: int
    head_dim: int
    cluster: int
    rows: int
    value_stages: int

    kernel_name, threads = "mix_values", THREADS

    @functools.cached_property
    def bytes_beside_units(self) -> int:
        """Bytes of shared memory, as values_layout.cuh lays it out, without units and their barriers."""
        slots, own = 16 // self.cluster, -(-self.heads // self.cluster)
        values = own * -(-self.head_dim // 64) * KEYS * 128
        piece = 8 * KEYS * slots * 2
        planes, sent = self.rows // 8 * piece, self.rows // self.cluster // 8 * piece
        stages = self.value_stages * values + PLANE_STAGES * (planes + (self.cluster - 1) * sent)
        return stages + 16 * (self.value_stages + PLANE_STAGES)

    @property
    def units(self) -> int:
        """The units that fit, the same number for each group of 8 rows that a block mixes."""
        groups = self.rows // self.cluster // 8
        return (SHARED_BYTES - self.bytes_beside_units) // (UNIT + 16) // groups * groups

    @property
    def shared_memory(self) -> int:
        return self.bytes_beside_units + self.units * (UNIT + 16)

    def source(self, architecture: str = "sm_90a") -> Source:
        constants = {
            "ELEMENT": ELEMENTS[torch.bfloat16], "HEADS": self.heads, "HEAD_DIM": self.head_dim,
            "CLUSTER": self.cluster, "BULK": 1, "ROWS": self.rows, "UNITS": self.units,
            "VALUE_STAGES": self.value_stages, "PLANE_STAGES": PLANE_STAGES, "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        return source("values.cu", constants, self.head_dim)


def constants_for(heads: int, head_dim: int) -> ValuesConstants:
    """The fastest constants of those measured."""
    if head_dim <= 64:
        return ValuesConstants(heads, head_dim, cluster=2, rows=64, value_stages=2)
    return ValuesConstants(heads, head_dim, cluster=4, rows=64, value_stages=3)


MAX_LAUNCHES = 1024
_launches: dict[tuple, Any] = {}


class ValueArguments(ctypes.Structure):
    """`struct Arguments` of values_layout.cuh."""

    _fields_ = (
        ("out", c_void_p), *fields(c_int64, "out_batch out_head out_row"), ("scale", c_void_p), ("post", Matrix),
        *fields(c_int, "rows first_position keys causal sequences group"),
    )  # fmt: skip


def mix_values(
    exponentials: Tensor, scale: Tensor, post_mix: Tensor | None, v: Tensor, out: Tensor, *, first_position: int,
    keys: int, causal: bool, constants: ValuesConstants | None = None,
) -> None:  # fmt: skip
    """`out[h, i] = sum_j (sum_g post_mix[g, h] scale[g, i] exponentials[g, i, j]) v[h, j]` of a chunk's rows.

    exponentials `[B, H, R, ld]` is contiguous, bf16, with `ld` a multiple of 64 from `keys` on. Row r has position
    `first_position + r`; it sees the first `keys` columns, if `causal` only up to its position. Columns that it does
    not see are zero up to the end of the 64-column block with the last key that its block of 64 rows sees; after it
    they may be NaN. scale `[B, H, R]` is float32, contiguous. `post_mix [H, H]` (in, out) is float32 (then rounded),
    bf16 or None. v `[B, Hkv, N, D]`, bf16, is copied if the copy engine cannot describe it. out `[B, H, R, D]`, bf16,
    has contiguous rows. `constants` override the chosen ones, for measurements.
    Raises ValueError where `shape_unsupported` has a reason, or for exponentials of another layout.
    """
    key = (
        exponentials.data_ptr(), exponentials.shape, scale.data_ptr(), v.data_ptr(), v.shape, v.stride(),
        out.data_ptr(), out.stride(),
        None if post_mix is None else (post_mix.data_ptr(), post_mix.stride(), post_mix.dtype),
        first_position, keys, causal, constants, exponentials.device,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        v = describable(v)
        launch = _launch(exponentials, scale, post_mix, v, out, first_position, keys, causal, constants)
        if launch is not None and v.data_ptr() == key[3]:  # not of a copy, which is temporary
            keep(_launches, key, launch, MAX_LAUNCHES)
    if launch is not None:
        launch()


def _launch(
    exponentials: Tensor, scale: Tensor, post_mix: Tensor | None, v: Tensor, out: Tensor, first_position: int,
    keys: int, causal: bool, constants: ValuesConstants | None,
) -> Any:  # fmt: skip
    """The launch prepared for the driver, or None if there is nothing to compute."""
    batch, heads, rows, ld = exponentials.shape
    if reason := shape_unsupported(exponentials.dtype, heads, v.shape[3]):
        raise ValueError(reason)
    if not exponentials.is_contiguous() or ld % 64 or ld < keys or exponentials.data_ptr() % 16:
        raise ValueError(
            f"stored exponentials are {list(exponentials.shape)} with strides {exponentials.stride()}; expected "
            f"contiguous rows of a multiple of 64 columns, {keys} or more, at a multiple of 16 bytes"
        )
    if not batch * rows:
        return None
    constants = constants or constants_for(heads, v.shape[3])
    arguments = ValueArguments(
        out=out.data_ptr(), out_batch=out.stride(0), out_head=out.stride(1), out_row=out.stride(2),
        scale=scale.data_ptr(), post=Matrix.of(post_mix), rows=rows, first_position=first_position, keys=keys,
        causal=causal, sequences=batch, group=heads // v.shape[1],
    )  # fmt: skip
    by_rows = exponentials.permute(0, 2, 1, 3)  # the heads of a row side by side: no bank conflicts
    maps = tensor_map(by_rows, (1, 8, 16, KEYS)), tensor_map(v, (1, 1, KEYS, 64))
    blocks = -(-rows // constants.rows) * batch * constants.cluster
    return driver.LaunchSequence(kernel(constants, exponentials.device.index).prepared((blocks, 1), *maps, arguments))
