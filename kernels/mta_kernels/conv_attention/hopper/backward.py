"""Launches backward.cu, whose blocks compute rows of a head, or products of the p and ds that rows stored."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from ctypes import c_float, c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from mta_kernels.allocation import empty, empty_like, new_empty
from mta_kernels.backend import Gradients
from mta_kernels.call_memory import keep
from mta_kernels.conv_attention.banded.backward_plan import (
    ALIGNED,
    NORM_PARTS,
    ChunkPlan,
    Chunks,
    ExactArguments,
    ExactConstants,
)
from mta_kernels.conv_attention.banded.structures import Inputs, Positions
from mta_kernels.conv_attention.head_chunks import gradients_by_chunks
from mta_kernels.conv_attention.hopper.forward import ROWS, SLAB
from mta_kernels.conv_attention.hopper.prepare import HopperPreparation, HopperTileConstants, prepare_launch
from mta_kernels.conv_attention.hopper.source import hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import TensorMap, describable, has_describable_strides, tensor_map
from mta_kernels.conv_attention.packing import document_factors, rows_that_see
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.gpu_limits import sm_count
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import Rows, Weight, fields
from mta_kernels.operation import Operation

SCORES_ABOVE, GRADS_ABOVE = 16, 8  # rows above a warpgroup's own


class HopperBackwardConstants(HopperTileConstants):
    """The constants of backward.cu for a shape."""

    kernel_name = "hopper_backward"

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

    def products_of_rows(self, rows: int) -> int:
        """None: a row block writes dq itself."""
        return 0

    @property
    def exact(self) -> ExactConstants:
        shape = self.dtype, self.head_dim, self.conv, self.causal, self.spans
        return ExactConstants(*shape, architecture="sm_90a")

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


class BackwardScratch(NamedTuple):
    """Where the parts of the scratch begin, after p and ds, and where it ends, in bytes."""

    stored: int  # p and ds `[2, slots, pitch / 32, rows of a chunk, 32]`, in q's dtype
    prepared: dict[str, int]  # what prepare.cu writes, by the names that both argument structures have for it
    ds_unit: int
    counters: int  # of the scheduler, and one a query head
    dweight: int  # of each block of rows and warpgroup
    sums: int  # of dk, float32, if they are rounded at the end; 0 if the caller receives them
    last_sums: int  # of dv
    end: int

    @classmethod
    def of(
        cls, constants: HopperBackwardConstants, plan: ChunkPlan, batch: int, heads: int, kv_heads: int,
        query_rows: int, sum_rows: int,
    ) -> BackwardScratch:  # fmt: skip
        """The scratch of a call; `sum_rows` are the rows of dk's sums, 0 if these are not in it."""
        stored = 2 * 2 * plan.slots * plan.row_blocks * constants.block_rows * plan.pitch
        numbers = {
            "taps": heads * constants.prepared.tap_bytes // 4, "taps_back": heads * constants.prepared.tap_bytes // 4,
            "weight_scale": heads,
            "value_norms": batch * kv_heads * NORM_PARTS,
            "grad_norms": batch * heads * NORM_PARTS,
            "delta": batch * heads * query_rows, "exact_rows": batch * heads,
            "ds_unit": batch * heads, "counters": plan.counters + heads,
            "dweight": batch * heads * plan.all_row_blocks * constants.warpgroups * math.prod(constants.conv.taps),
            "sums": sum_rows * constants.head_dim, "last_sums": sum_rows * constants.head_dim,
        }  # fmt: skip
        starts, at = {}, stored
        for name, count in numbers.items():
            starts[name] = at
            at += -(-4 * count // SCRATCH_ALIGNED) * SCRATCH_ALIGNED
        apart = map(starts.pop, ("ds_unit", "counters", "dweight", "sums", "last_sums"))
        ds_unit, counters, dweight, sums, last_sums = apart
        if not sum_rows:
            sums = last_sums = 0
        return cls(stored, starts, ds_unit, counters, dweight, sums, last_sums, at)


_launches: dict[tuple, BackwardLaunches] = {}


class HopperBackwardArguments(ctypes.Structure):
    """`struct Arguments` of backward_layout.cuh."""

    _fields_ = (
        ("at", Positions),
        *fields(c_void_p, "taps taps_back weight_scale value_norms grad_norms logsumexp delta p ds"),
        *fields(c_void_p, "ds_unit dk dv dk_rounded dv_rounded exact_rows seen_by dq dweight"), ("scale", c_float),
        *fields(c_int, "chunk_rows pitch"), ("chunks", Chunks),
    )  # fmt: skip


def conv_attention_backward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, *, head_chunk: int = 0, spans: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of `conv_attention_forward` in q, k, v and weight, in their shapes and dtypes.

    Takes the arguments of the forward, its results `out [B, Hq, M, D]` and `logsumexp [B, Hq, M]`, and the gradient
    `grad_out [B, Hq, M, D]`. Tensors have any strides. Computes `head_chunk` query heads at a time, all if 0.
    Results are the same from run to run. Scratch: p and ds of the chunks of rows in flight, see `ChunkPlan`.
    """

    def some_heads(*tensors: Tensor) -> Gradients:
        q, k, v, weight, out, logsumexp, grad_out = tensors
        launches = launches_for(operation, q, k, v, weight, out, grad_out, spans is not None)
        return launches(q, k, v, weight, out, logsumexp, grad_out, spans)

    tensors = q, k, v, weight, out, logsumexp, grad_out
    with on_device_of(q), without_autocast(q):
        return gradients_by_chunks(some_heads, *tensors, head_chunk=head_chunk)


def launches_for(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, grad_out: Tensor,
    packed: bool = False,
) -> BackwardLaunches:  # fmt: skip
    """The launches for tensors like these, remembered; `packed` is whether there are spans."""
    key = (
        q.shape, k.shape, weight.shape, q.stride(), k.stride(), v.stride(), weight.stride(), out.stride(),
        grad_out.stride(), q.dtype, weight.dtype, q.device, operation, packed,
    )  # fmt: skip
    found = _launches.get(key)
    if found is None:
        found = keep(_launches, key, BackwardLaunches(operation, q, k, v, weight, out, grad_out, packed))
    return found


class BackwardLaunches:
    """The backward for calls that differ only in addresses: everything else is computed once."""

    def __init__(
        self, operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, grad_out: Tensor,
        packed: bool,
    ) -> None:  # fmt: skip
        self._operation, self._packed = operation, packed
        self._constants = HopperBackwardConstants(q.dtype, q.shape[3], operation.conv, operation.causal, packed)
        self._has_describable_strides = all(has_describable_strides(x) for x in (q, k, v, out, grad_out))
        batch, heads, query_rows, head_dim = q.shape
        kv_heads, key_rows = k.shape[1:3]
        self._is_grouped = heads != kv_heads
        self._plan = ChunkPlan.of(self._constants, batch * heads, query_rows, key_rows, sm_count(q.device))
        sum_rows = 0 if self._is_grouped else batch * heads * key_rows
        self._layout = BackwardScratch.of(self._constants, self._plan, batch, heads, kv_heads, query_rows, sum_rows)
        # A template for `new_empty`: torch.empty with a shape and a device takes the host twice as long.
        self._bytes = empty(0, dtype=torch.uint8, device=q.device)
        element, number = (empty(1, dtype=dtype, device=q.device) for dtype in (q.dtype, torch.float32))
        dk = (number if self._is_grouped else element).expand(batch, kv_heads, heads // kv_heads, key_rows, head_dim)
        dk = dk if self._is_grouped else dk.squeeze(2)
        dweight = (number if weight.dtype == torch.float32 else element).expand(weight.shape)
        self._results = element.expand(q.shape), dk, dk, dweight
        self._maps: dict[tuple[int, ...], list[TensorMap]] = {}
        self._idle: list[BackwardCall] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor,
        spans: Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        """Dq in q's dtype, the others in their own or in float32; logsumexp is contiguous."""
        of_inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), grad_out.data_ptr(), out.data_ptr()
        if not self._has_describable_strides or functools.reduce(operator.or_, of_inputs) % 16:
            q, k, v, out, grad_out = (describable(x) for x in (q, k, v, out, grad_out))
            launches = launches_for(self._operation, q, k, v, weight, out, grad_out, self._packed)
            return launches(q, k, v, weight, out, logsumexp, grad_out, spans)
        dq, dk, dv, dweight = (empty_like(x, memory_format=torch.contiguous_format) for x in self._results)
        scratch = new_empty(self._bytes, self._layout.end)
        scratch_at = scratch.data_ptr()
        try:
            call = self._idle.pop()  # so that no other thread has it
        except IndexError:
            call = BackwardCall(
                self._operation, q, k, v, weight, out, grad_out, self._constants, self._plan, self._layout,
                dweight.dtype == torch.float32,
            )  # fmt: skip
        if call.scratch != scratch_at:
            call.place(scratch_at)
        starts = *of_inputs, scratch_at
        if call.described != starts:
            call.describe(starts, self._maps.get(starts) or self._described(starts, q, k, v, grad_out, scratch))
        preparation, arguments, exact = call.preparation, call.arguments, call.exact
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
            seen_by = rows_that_see(spans, ALIGNED)
            factors = document_factors(grad_out, v, spans)
            arguments.seen_by, arguments.grad_norms = seen_by.data_ptr(), factors.data_ptr()
        call.launches()
        self._idle.append(call)  # the driver has read its arguments
        if self._is_grouped:
            dk, dv = dk.sum(2), dv.sum(2)
        return dq, dk, dv, dweight

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *others: Tensor) -> Gradients:
        """The gradients, each in the dtype of its tensor."""
        found = self(q, k, v, weight, *others)
        if not self._is_grouped:
            return found
        dq, dk, dv, dweight = found
        return dq, dk.to(k.dtype), dv.to(v.dtype), dweight.to(weight.dtype)

    def _described(
        self, starts: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scratch: Tensor
    ) -> list[TensorMap]:
        """The tensor maps of a call, remembered by the addresses of its tensors."""
        stored = scratch[: self._layout.stored].view(q.dtype).view(2 * self._plan.slots, self._plan.pitch // 32, -1, 32)
        maps = [*map(tensor_map, (q, k, v, grad_out)), tensor_map(stored, box=(1, 2, 64, 32))]
        return keep(self._maps, starts, maps)


class BackwardCall:
    """The launches of one call at a time, ready for the driver but for addresses."""

    def __init__(
        self, operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, grad_out: Tensor,
        constants: HopperBackwardConstants, plan: ChunkPlan, layout: BackwardScratch, weight_grad_is_float: bool,
    ) -> None:  # fmt: skip
        batch, heads, query_rows, _ = q.shape
        kv_heads, key_rows = k.shape[1:3]
        device = q.device.index
        self.preparation = HopperPreparation(
            v=Rows.of(v), out=Rows.of(out), grad_out=Rows.of(grad_out), weight=Weight.of(weight),
            scale_log2=operation.scale * math.log2(math.e), counter_count=plan.counters + heads,
            heads=heads, kv_heads=kv_heads, batch=batch, query_rows=out.shape[2], key_rows=v.shape[2],
        )  # fmt: skip
        self.arguments = HopperBackwardArguments(
            Positions(None, heads, heads // kv_heads, query_rows, key_rows),
            scale=operation.scale, chunk_rows=plan.row_blocks * constants.block_rows, pitch=plan.pitch,
            chunks=plan.chunk_structure(batch * heads),
        )  # fmt: skip
        self.exact = ExactArguments(
            self.arguments.at, Inputs(Rows.of(q), Rows.of(k), Rows.of(v), Weight.of(weight), operation.scale),
            Rows.of(grad_out),
            weight_pitch=plan.all_row_blocks * constants.warpgroups * weight[0].numel(),
            weight_grad_is_float=weight_grad_is_float, batch=batch,
        )  # fmt: skip
        self._maps, self._layout, self._counters = (TensorMap * 5)(), layout, plan.counters
        self.described: tuple[int, ...] = ()
        self.scratch: int | None = None
        blocks = min(plan.work_tiles, sm_count(q.device))
        backward = kernel(constants, device).prepared((blocks, 1), *self._maps, self.arguments, follows=True)
        exactly = kernel(constants.exact, device).prepared((batch * heads, 1), self.exact, follows=True)
        prepare = prepare_launch(constants.prepared, self.preparation, device)
        self.launches = driver.LaunchSequence(prepare, backward, exactly)

    def describe(self, starts: tuple[int, ...], maps: list[TensorMap]) -> None:
        """Set the addresses of q, k, v, grad_out and out; `maps` describe the first four and the scratch."""
        preparation, exact = self.preparation, self.exact
        self._maps[:] = maps
        q, k, v, grad_out, out, _ = starts
        exact.inputs.q.start, exact.inputs.k.start, exact.inputs.v.start, exact.grad_out.start = q, k, v, grad_out
        preparation.v.start, preparation.grad_out.start, preparation.out.start = v, grad_out, out
        self.described = starts

    def place(self, scratch: int) -> None:
        """Set the address of the scratch."""
        preparation, arguments, exact, layout = self.preparation, self.arguments, self.exact, self._layout
        for name, at in layout.prepared.items():
            setattr(preparation, name, scratch + at)
            setattr(arguments, name, scratch + at)
        arguments.p, arguments.ds = scratch, scratch + layout.stored // 2
        exact.delta = arguments.delta
        arguments.ds_unit, counters = scratch + layout.ds_unit, scratch + layout.counters
        preparation.counters = arguments.chunks.scheduler = counters  # which prepare.cu sets to 0, at every call
        exact.heads_done = counters + 4 * self._counters
        arguments.dweight = exact.dweight = scratch + layout.dweight
        if layout.sums:
            arguments.dk, arguments.dv = exact.dk, exact.dv = scratch + layout.sums, scratch + layout.last_sums
        self.scratch = scratch
