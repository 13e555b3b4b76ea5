"""Launches forward.cu: which constants a shape takes, tensor maps for the copy engine, scratch, and the two kernels."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_void_p
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty, empty_like, new_empty
from mta_kernels.conv_attention.banded.structures import Inputs, Positions, heads_in_l2
from mta_kernels.conv_attention.hopper.prepare import (
    HopperLaunches,
    HopperPreparation,
    HopperTileConstants,
    prepare_launch,
)
from mta_kernels.conv_attention.hopper.source import hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import TensorMap, describable, tensor_map
from mta_kernels.gpu_limits import sm_count
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ELEMENTS, Rows, Weight, fields
from mta_kernels.operation import Operation

QUERY_TAPS, KEY_TAPS = 8, 17  # at most
ROWS, SLAB = 64, 64 * 128
SLOTS, WORK_TILE = 2, 48  # work tiles in flight, and bytes of each
MAX_VALUE_DIM = 128
MAX_BACKWARD_HEAD_DIM = 128  # of backward.cu: see backend.py


def shape_unsupported(dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why no Hopper GPU could run these, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if not (16 <= head_dim <= 128 and head_dim % 8 == 0) and not (128 < head_dim <= 256 and head_dim % 16 == 0):
        return f"head_dim {head_dim} is not a multiple of 8 from 16 to 128, or of 16 up to 256"
    if query_taps > QUERY_TAPS or key_taps > KEY_TAPS:
        return f"{query_taps}x{key_taps} taps are outside 1x1 to {QUERY_TAPS}x{KEY_TAPS} (query taps x key taps)"
    return None


class HopperForwardConstants(HopperTileConstants):
    """The constants of forward.cu for a shape."""

    kernel_name = "hopper_forward"

    @property
    def value_parts(self) -> int:
        """Blocks that share the columns of v: the accumulators of 128 columns fill the registers."""
        return -(-self.head_dim // MAX_VALUE_DIM)

    @property
    def value_dim(self) -> int:
        return self.head_dim // self.value_parts

    @property
    def warpgroups(self) -> int:
        """Consumers a block: three have 160 registers a thread, enough for 64 columns, and two have 240."""
        return 3 if self.head_dim <= 64 else 2

    @property
    def stages(self) -> int:
        """Four where they fit; at head dim 128 three are as fast."""
        return 4 if self.head_dim <= 64 else 3 if self.head_dim <= 128 else 2

    @property
    def block_rows(self) -> int:
        """Rows of out of a work tile. Of two consumers only the first computes a halo; it stores the second's."""
        halos = 1 if self.warpgroups == 2 else self.warpgroups
        return self.warpgroups * ROWS - halos * (self.conv.query_taps - 1)

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as forward_layout.cuh lays them out."""
        value_slabs = -(-self.value_dim // 64)
        query_slots = SLOTS if self.warpgroups == 3 else 1
        tiles = query_slots * self.warpgroups * self.slabs + self.stages * (self.slabs + value_slabs)
        scores = 2 * self.warpgroups * 8 * (8 + ROWS) * 16
        barriers = 2 * self.stages + 8
        small = SLOTS * (self.prepared.tap_bytes + WORK_TILE) + barriers * 8
        return tiles * SLAB + scores + small

    def constants(self) -> dict[str, Any]:
        own = {"VALUE_DIM": self.value_dim, "VALUE_PARTS": self.value_parts}
        return {**super().constants(), **own}

    def source(self, architecture: str = "sm_90a") -> Source:
        return hopper_source("forward.cu", self.constants(), 64, self.value_dim)


class HopperForwardArguments(ctypes.Structure):
    """`struct Arguments` of forward_layout.cuh."""

    _fields_ = (
        ("at", Positions), *fields(c_void_p, "taps weight_scale out logsumexp tile_counter"),
        *fields(c_int, "row_blocks work_tiles blocks heads_in_l2"), ("inputs", Inputs),
    )  # fmt: skip


def conv_attention_forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, head_chunk: int = 0,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the Triton backend's `conv_attention_forward`: out `[B, Hq, M, D]` and logsumexp `[B, Hq, M]` float32.

    Inputs that the copy engine cannot describe are copied first. It describes inputs whose last dimension is
    contiguous, and whose start and other strides are multiples of 16 bytes. Nothing waits for the GPU. The scratch is
    too small for `head_chunk` to matter.
    """
    launches = ForwardLaunches.of(operation, q, k, v, weight, packed=spans is not None)
    return launches(q, k, v, weight, spans)


class ForwardLaunches(HopperLaunches):
    """The forward for calls that differ only in addresses."""

    def __init__(self, operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, packed: bool) -> None:
        constants = HopperForwardConstants(q.dtype, q.shape[3], operation.conv, operation.causal, packed)
        batch, heads, query_rows, _ = q.shape
        kv_heads, key_rows = k.shape[1:3]
        scratch = {
            "taps": heads * constants.prepared.tap_bytes, "weight_scale": 4 * heads, "tile_counter": 4,
            "own_logsumexp": 4 * batch * heads * query_rows,  # of a call that does not return it
        }  # fmt: skip
        super().__init__((q, k, v), scratch, 4)
        self._operation, self._packed = operation, packed
        self._logsumexp = empty(1, dtype=torch.float32, device=q.device).expand(q.shape[:3])
        self._is_contiguous = q.is_contiguous()
        self._preparation = HopperPreparation(
            weight=Weight.of(weight), scale_log2=operation.scale * math.log2(math.e), counter_count=1,
            heads=heads, kv_heads=kv_heads, batch=batch, query_rows=query_rows, key_rows=key_rows,
        )  # fmt: skip
        row_blocks = -(-query_rows // constants.block_rows)
        work_tiles = row_blocks * constants.value_parts * heads * batch
        blocks = min(work_tiles, sm_count(q.device))
        self._arguments = HopperForwardArguments(
            Positions(None, heads, heads // kv_heads, query_rows, key_rows),
            row_blocks=row_blocks, work_tiles=work_tiles, blocks=blocks,
            heads_in_l2=heads_in_l2(k, batch * heads) * constants.value_parts,
            inputs=Inputs(Rows.of(q), Rows.of(k), Rows.of(v), Weight.of(weight), operation.scale),
        )  # fmt: skip
        self._positions, self._inputs = self._arguments.at, self._arguments.inputs  # parts of it, not copies
        self._maps, device = (TensorMap * 3)(), q.device.index
        self._starts["counters"] = self._starts["tile_counter"]
        self._sequence(
            (self._preparation, self._arguments), [[self._inputs.q], [self._inputs.k], [self._inputs.v]],
            prepare_launch(constants.prepared, self._preparation, device),
            kernel(constants, device).prepared((blocks, 1), *self._maps, self._arguments, follows=True),
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, spans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `conv_attention_forward`."""
        logsumexp = empty_like(self._logsumexp, memory_format=torch.contiguous_format)
        return self._run(q, k, v, weight, spans, logsumexp), logsumexp

    def out_alone(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """As `conv_attention_forward`, without returning the logsumexp."""
        return self._run(q, k, v, weight, None, None)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, spans: Tensor | None, logsumexp: Tensor | None
    ) -> Tensor:
        starts = self._addresses(q, k, v)
        if starts is None:
            q, k, v = map(describable, (q, k, v))
            launches = self.of(self._operation, q, k, v, weight, packed=self._packed)
            return launches._run(q, k, v, weight, spans, logsumexp)
        out = empty_like(q) if self._is_contiguous else new_empty(q, q.shape)
        own_logsumexp = self._starts["own_logsumexp"]
        scratch = new_empty(self._bytes, self._end if logsumexp is None else own_logsumexp)
        scratch_at = scratch.data_ptr()
        with self._lock:
            self._bind(scratch_at, starts, lambda: [tensor_map(x) for x in (q, k, v)])
            self._preparation.weight.start = self._inputs.weight.start = weight.data_ptr()
            arguments = self._arguments
            arguments.out = out.data_ptr()
            arguments.logsumexp = scratch_at + own_logsumexp if logsumexp is None else logsumexp.data_ptr()
            if spans is not None:
                self._positions.spans = spans.data_ptr()
            self._launch()
        return out
