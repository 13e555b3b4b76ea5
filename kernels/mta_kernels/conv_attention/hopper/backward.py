"""Launches backward.cu, whose blocks compute rows of a head, or products of the p and ds that rows stored."""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_float, c_int, c_void_p

import torch
from torch import Tensor

from mta_kernels.allocation import empty, empty_like, new_empty
from mta_kernels.backend import Gradients
from mta_kernels.conv_attention.banded.backward_plan import (
    ALIGNED,
    NORM_PARTS,
    BackwardConstants,
    ChunkPlan,
    Chunks,
    ExactArguments,
)
from mta_kernels.conv_attention.banded.structures import Inputs, Positions
from mta_kernels.conv_attention.head_chunks import gradients_by_chunks
from mta_kernels.conv_attention.hopper.forward import ROWS, SLAB
from mta_kernels.conv_attention.hopper.prepare import (
    HopperLaunches,
    HopperPreparation,
    HopperTileConstants,
    prepare_launch,
)
from mta_kernels.conv_attention.hopper.source import hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import TensorMap, describable, tensor_map
from mta_kernels.conv_attention.packing import document_factors, rows_that_see
from mta_kernels.gpu_limits import sm_count
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import Rows, Weight, fields
from mta_kernels.operation import Operation

SCORES_ABOVE, GRADS_ABOVE = 16, 8  # rows above a warpgroup's own


class HopperBackwardConstants(HopperTileConstants, BackwardConstants):
    """The constants of backward.cu for a shape."""

    kernel_name, exact_architecture = "hopper_backward", "sm_90a"

    @property
    def stages(self) -> int:
        """Two fit above head dim 64; below, four are not faster than three."""
        return 3 if self.head_dim <= 64 else 2

    @property
    def block_rows(self) -> int:
        """Rows that a block computes whole: the rows of its warp groups, without the halos of c and ds."""
        return self.warpgroups * ROWS - 2 * (self.conv.query_taps - 1)

    @property
    def places(self) -> int:
        """PLACES of backward_products.cuh: 128 a warpgroup."""
        return 128 * self.warpgroups

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_layout.cuh lays them out."""
        tiles = (2 * self.warpgroups + 3 * self.stages) * self.slabs
        scores, grads = (2 if self.head_dim <= 64 else 1) * (ROWS + SCORES_ABOVE), ROWS + GRADS_ABOVE
        buffers = (self.warpgroups * 10 * (scores + grads) + 8 * (SCORES_ABOVE + GRADS_ABOVE)) * 16
        rows = tiles * SLAB + buffers + 2 * self.prepared.tap_bytes
        product_stages = min(rows // ((self.places // 64 + self.slabs) * SLAB), 4)
        return rows + (2 * self.stages + 2 * product_stages + 12) * 8 + 32

    def source(self, architecture: str = "sm_90a") -> Source:
        return hopper_source("backward.cu", self.constants(), 64, self.head_dim)


SCRATCH_ALIGNED = 256  # bytes, at multiples of which the parts of the scratch begin


class HopperBackwardArguments(ctypes.Structure):
    """`struct Arguments` of backward_layout.cuh."""

    _fields_ = (
        ("at", Positions),
        *fields(c_void_p, "taps taps_back weight_scale value_norms grad_norms logsumexp delta p ds"),
        *fields(c_void_p, "ds_unit dk dv dk_rounded dv_rounded exact_rows seen_by dq dweight"), ("scale", c_float),
        *fields(c_int, "chunk_rows pitch"), ("chunks", Chunks),
    )  # fmt: skip


def _gradients(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, spans: Tensor | None,
) -> Gradients:  # fmt: skip
    launches = BackwardLaunches.of(operation, q, k, v, weight, out, grad_out, packed=spans is not None)
    return launches(q, k, v, weight, out, logsumexp, grad_out, spans)


conv_attention_backward = functools.partial(gradients_by_chunks, _gradients)


class BackwardLaunches(HopperLaunches):
    """The backward for calls that differ only in addresses.

    Scratch: p and ds of the chunks of rows in flight, see `ChunkPlan`; what prepare.cu writes; sums of dk and dv in
    float32 that are rounded at the end, unless the caller receives them.
    """

    def __init__(
        self, operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, grad_out: Tensor, *,
        packed: bool,
    ) -> None:  # fmt: skip
        self._operation, self._packed = operation, packed
        constants = HopperBackwardConstants(q.dtype, q.shape[3], operation.conv, operation.causal, packed)
        batch, heads, query_rows, head_dim = q.shape
        kv_heads, key_rows = k.shape[1:3]
        batch_heads, tap_bytes, device = batch * heads, constants.prepared.tap_bytes, q.device.index
        self._is_grouped = heads != kv_heads
        plan = self._plan = ChunkPlan.of(constants, batch_heads, query_rows, key_rows, sm_count(q.device))
        chunk_rows, dweights = plan.row_blocks * constants.block_rows, plan.all_row_blocks * constants.warpgroups
        sums = {} if self._is_grouped else dict.fromkeys(("dk", "dv"), 4 * batch_heads * key_rows * head_dim)
        self._stored = 2 * 2 * plan.slots * chunk_rows * plan.pitch
        scratch = {
            "p": self._stored,  # and ds: [2, slots, pitch / 32, rows of a chunk, 32], in q's dtype
            "taps": heads * tap_bytes, "taps_back": heads * tap_bytes, "weight_scale": 4 * heads,
            "value_norms": 4 * batch * kv_heads * NORM_PARTS, "grad_norms": 4 * batch_heads * NORM_PARTS,
            "delta": 4 * batch_heads * query_rows, "exact_rows": 4 * batch_heads, "ds_unit": 4 * batch_heads,
            "counters": 4 * (plan.counters + heads),  # of the scheduler, and one a query head
            "dweight": 4 * batch_heads * dweights * weight[0].numel(),  # of each block of rows and warpgroup
            **sums,
        }  # fmt: skip
        super().__init__((q, k, v, out, grad_out), scratch, SCRATCH_ALIGNED)
        starts = self._starts
        starts["ds"], starts["scheduler"] = self._stored // 2, starts["counters"]
        starts["heads_done"] = starts["counters"] + 4 * plan.counters
        element, number = (empty(1, dtype=dtype, device=q.device) for dtype in (q.dtype, torch.float32))
        dk = (number if self._is_grouped else element).expand(batch, kv_heads, heads // kv_heads, key_rows, head_dim)
        dk = dk if self._is_grouped else dk.squeeze(2)
        dweight = (number if weight.dtype == torch.float32 else element).expand(weight.shape)
        self._results = element.expand(q.shape), dk, dk, dweight
        preparation = self._preparation = HopperPreparation(
            v=Rows.of(v), out=Rows.of(out), grad_out=Rows.of(grad_out), weight=Weight.of(weight),
            scale_log2=operation.scale * math.log2(math.e), counter_count=plan.counters + heads,
            heads=heads, kv_heads=kv_heads, batch=batch, query_rows=out.shape[2], key_rows=v.shape[2],
        )  # fmt: skip
        arguments = self._arguments = HopperBackwardArguments(
            Positions(None, heads, heads // kv_heads, query_rows, key_rows),
            scale=operation.scale, chunk_rows=chunk_rows, pitch=plan.pitch, chunks=plan.chunk_structure(batch_heads),
        )  # fmt: skip
        exact = self._exact = ExactArguments(
            arguments.at, Inputs(Rows.of(q), Rows.of(k), Rows.of(v), Weight.of(weight), operation.scale),
            Rows.of(grad_out), weight_pitch=dweights * weight[0].numel(),
            weight_grad_is_float=dweight.dtype == torch.float32, batch=batch,
        )  # fmt: skip
        self._maps = (TensorMap * 5)()
        rows = (
            [exact.inputs.q], [exact.inputs.k], [exact.inputs.v, preparation.v],
            [exact.grad_out, preparation.grad_out], [preparation.out],
        )  # fmt: skip
        blocks = min(plan.work_tiles, sm_count(q.device))
        self._sequence(
            (preparation, arguments, arguments.chunks, exact), rows,
            prepare_launch(constants.prepared, preparation, device),
            kernel(constants, device).prepared((blocks, 1), *self._maps, arguments, follows=True),
            kernel(constants.exact, device).prepared((batch_heads, 1), exact, follows=True),
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor,
        spans: Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        """Dq in q's dtype, the others in their own or in float32; logsumexp is contiguous."""
        starts = self._addresses(q, k, v, grad_out, out)
        if starts is None:
            q, k, v, out, grad_out = map(describable, (q, k, v, out, grad_out))
            launches = self.of(self._operation, q, k, v, weight, out, grad_out, packed=self._packed)
            return launches(q, k, v, weight, out, logsumexp, grad_out, spans)
        dq, dk, dv, dweight = (empty_like(x, memory_format=torch.contiguous_format) for x in self._results)
        scratch = new_empty(self._bytes, self._end)
        scratch_at = scratch.data_ptr()
        if spans is not None:
            seen_by, factors = rows_that_see(spans, ALIGNED), document_factors(grad_out, v, spans)

        def maps() -> list[TensorMap]:
            stored = scratch[: self._stored].view(q.dtype).view(2 * self._plan.slots, self._plan.pitch // 32, -1, 32)
            return [*map(tensor_map, (q, k, v, grad_out)), tensor_map(stored, box=(1, 2, 64, 32))]

        preparation, arguments, exact = self._preparation, self._arguments, self._exact
        with self._lock:
            self._bind(scratch_at, (*starts, scratch_at), maps)
            preparation.weight.start = exact.inputs.weight.start = weight.data_ptr()
            arguments.logsumexp = exact.logsumexp = logsumexp.data_ptr()
            arguments.dq = exact.dq = dq.data_ptr()
            exact.weight_grad = dweight.data_ptr()
            if self._is_grouped:
                arguments.dk = exact.dk = dk.data_ptr()
                arguments.dv = exact.dv = dv.data_ptr()
            else:
                preparation.logsumexp = arguments.logsumexp
                arguments.dk_rounded = exact.dk_rounded = dk.data_ptr()
                arguments.dv_rounded = exact.dv_rounded = dv.data_ptr()
            if spans is not None:
                arguments.at.spans = exact.at.spans = spans.data_ptr()
                arguments.seen_by, arguments.grad_norms = seen_by.data_ptr(), factors.data_ptr()
            self._launch()
        if self._is_grouped:
            dk, dv = dk.sum(2), dv.sum(2)
        return dq, dk, dv, dweight

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *others: Tensor) -> Gradients:
        """The gradients, each in the dtype of its tensor."""
        dq, dk, dv, dweight = self(q, k, v, weight, *others)
        return (dq, dk.to(k.dtype), dv.to(v.dtype), dweight) if self._is_grouped else (dq, dk, dv, dweight)
