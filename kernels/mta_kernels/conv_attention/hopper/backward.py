"""Launches backward.cu, whose blocks compute rows of a head, or products of what these left."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention.hopper.forward import ROWS, SLAB
from mta_kernels.conv_attention.hopper.prepare import (
    ELEMENTS,
    NORM_PARTS,
    Inputs,
    Positions,
    Preparation,
    Prepared,
    Rows,
    Tiles,
    Weight,
    prepare_launch,
)
from mta_kernels.conv_attention.hopper.source import Product, hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import TensorMap, describable, has_describable_strides, tensor_map
from mta_kernels.cuda import driver
from mta_kernels.cuda.compiler import Source, machine_code
from mta_kernels.gpu_limits import sm_count
from mta_kernels.remembering import keep

TILE, CARRIED = 64, 16  # keys of a tile, and columns of c that it leaves to the next
SCORES_ABOVE, GRADS_ABOVE = 16, 8  # rows above a warpgroup's own
PLACES, ALIGNED = 256, 128  # of scratch, that a block's products read; rows and keys of the blocks of `rows_that_see`
MOST_CHUNK_ROWS, FEWEST_SLOTS = 4248, 4
SPARED_SCRATCH = 4 * 2**30  # bytes that the scratch may take however few heads there are: see `Plan`
SCRATCH_ALIGNED = 256  # bytes, at multiples of which the parts of the scratch begin
_launches: dict[tuple, Launches] = {}


class Geometry(Tiles):
    """The constants of backward.cu for a shape."""

    @property
    def stages(self) -> int:
        """Two are what there is room for above head dim 64; below, a fourth takes no less time than three."""
        return 3 if self.head_dim <= 64 else 2

    @property
    def block_rows(self) -> int:
        """Rows that a block computes whole, of those of its warpgroups."""
        return self.warpgroups * ROWS - 2 * (self.query_taps - 1)

    @property
    def left(self) -> int:
        """Columns by which p's tiles begin before those of scores, LEFT of tiles.cuh."""
        return -(-(self.key_taps - 1 - self.pad) // 8) * 8

    @property
    def lag(self) -> int:
        """Columns by which ds's tiles do, LAG of backward_layout.cuh."""
        return self.left + -(-self.pad // 8) * 8

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_layout.cuh lays them out."""
        tiles = (2 * self.warpgroups + 3 * self.stages) * self.slabs
        above = SCORES_ABOVE + GRADS_ABOVE
        buffers = (self.warpgroups * 10 * (2 * ROWS + above) + 8 * above) * 16
        small = 2 * self.prepared.tap_bytes + (2 * self.stages + 5) * 8 + 16
        return tiles * SLAB + buffers + small

    def products(self) -> list[Product]:
        element = ELEMENTS[self.dtype]
        found = [
            Product(64, element),
            Product(32, "Half"),
            Product(32, "Half", "fragments"),
            Product(24, "Half", "transposed"),
        ]
        return [*found, Product(self.head_dim, element, "registers"), Product(self.head_dim, element, "transposed")]

    @property
    def source(self) -> Source:
        return hopper_source("backward.cu", self.products(), self.constants())


@dataclass(frozen=True)
class Exact:
    """The constants of backward_exact.cu for a shape."""

    prepared: Prepared
    causal: bool
    spans: bool

    threads = 256

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_exact.cu lays them out."""
        taps = self.prepared.query_taps
        return 4 * ((2 * taps + 2) * self.threads + taps * self.prepared.head_dim)

    @property
    def source(self) -> Source:
        constants = self.prepared.constants() | {"CAUSAL": int(self.causal), "SPANS": int(self.spans)}
        return hopper_source("backward_exact.cu", self.prepared.products(), constants)


class Chunks(ctypes.Structure):
    """`struct Chunks` of backward_scheduler.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("batch_heads", "chunks", "row_blocks", "all_row_blocks", "lag", "slots")),
        *((name, ctypes.c_void_p) for name in ("tile_counter", "rows_done", "products_done")),
    )


class Arguments(ctypes.Structure):
    """`struct Arguments` of backward_layout.cuh."""

    _fields_ = (
        ("at", Positions),
        ("taps", ctypes.c_void_p),
        ("taps_back", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("value_norms", ctypes.c_void_p),
        ("grad_norms", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("p", ctypes.c_void_p),
        ("ds", ctypes.c_void_p),
        ("ds_unit", ctypes.c_void_p),
        ("dk", ctypes.c_void_p),
        ("dv", ctypes.c_void_p),
        ("seen_by", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dweight", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("chunk_rows", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("chunks", Chunks),
    )


class ExactArguments(ctypes.Structure):
    """`struct Arguments` of backward_exact.cu."""

    _fields_ = (
        ("at", Positions),
        ("inputs", Inputs),
        ("grad_out", Rows),
        ("logsumexp", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dk", ctypes.c_void_p),
        ("dv", ctypes.c_void_p),
        ("dweight", ctypes.c_void_p),
        ("weight_pitch", ctypes.c_int),
    )


def part_backward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, *,
    causal: bool, scale: float, pad: int, spans: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of some heads: dq in q's dtype, dk, dv and the weight's in float32; logsumexp is contiguous.

    The same from run to run. Scratch: p and ds of the chunks of rows under way, see `Plan`.
    """
    launches = launches_for(q, k, v, weight, out, grad_out, causal, scale, pad, spans is not None)
    return launches(q, k, v, weight, out, logsumexp, grad_out, spans)


def launches_for(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, grad_out: Tensor,
    causal: bool, scale: float, pad: int, packed: bool,
) -> Launches:  # fmt: skip
    """The launches for tensors like these, remembered; `packed` is whether there are spans."""
    options = causal, scale, pad, packed
    key = (
        q.shape, k.shape, weight.shape, q.stride(), k.stride(), v.stride(), weight.stride(), out.stride(),
        grad_out.stride(), q.dtype, weight.dtype, q.device, options,
    )  # fmt: skip
    found = _launches.get(key)
    if found is None:
        found = keep(_launches, key, Launches(q, k, v, weight, out, grad_out, *options))
    return found


class Launches:
    """The backward for calls that differ in addresses alone: what these do not change is worked out once."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, grad_out: Tensor,
        causal: bool, scale: float, pad: int, packed: bool,
    ) -> None:  # fmt: skip
        self.options = causal, scale, pad, packed
        self._geometry = Geometry(q.dtype, q.shape[3], weight.shape[1], weight.shape[2], pad, causal, packed)
        self._has_describable_strides = all(has_describable_strides(x) for x in (q, k, v, out, grad_out))
        batch, heads, query_rows, head_dim = q.shape
        kv_heads, key_rows = k.shape[1:3]
        self._is_grouped = heads != kv_heads
        self._plan = Plan.of(self._geometry, batch * heads, query_rows, key_rows, sm_count(q.device))
        self._layout = ScratchLayout.of(self._geometry, self._plan, batch, heads, kv_heads, query_rows)
        # What tensors are made like: torch.empty, given a shape and a device, takes the host twice as long.
        self._bytes = torch.empty(0, dtype=torch.uint8, device=q.device)
        element, number = (torch.empty(1, dtype=dtype, device=q.device) for dtype in (q.dtype, torch.float32))
        dk = number.expand(batch, kv_heads, heads // kv_heads, key_rows, head_dim)
        dweight = number.expand(batch, heads, self._plan.all_row_blocks * self._geometry.warpgroups, weight[0].numel())
        dk = dk if self._is_grouped else dk.squeeze(2)
        self._results = element.expand(q.shape), dk, dk, dweight
        self._maps: dict[tuple[int, ...], list[TensorMap]] = {}
        self._idle: list[Call] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor,
        spans: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """As `part_backward`."""
        of_inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), grad_out.data_ptr(), out.data_ptr()
        if not self._has_describable_strides or functools.reduce(operator.or_, of_inputs) % 16:
            q, k, v, out, grad_out = (describable(x) for x in (q, k, v, out, grad_out))
            launches = launches_for(q, k, v, weight, out, grad_out, *self.options)
            return launches(q, k, v, weight, out, logsumexp, grad_out, spans)
        dq, dk, dv, dweight = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in self._results)
        scratch = self._bytes.new_empty(self._layout.end)
        starts = *of_inputs, scratch.data_ptr()
        try:
            call = self._idle.pop()  # so that no other thread has it
        except IndexError:
            call = Call(q, k, v, weight, out, grad_out, self._geometry, self._plan, self._layout, self.options[1])
        if call.starts != starts:
            call.place(starts, self._maps.get(starts) or self._describe(starts, q, k, v, grad_out, scratch))
        call.preparation.weight.start = call.exact.inputs.weight.start = weight.data_ptr()
        for arguments in (call.arguments, call.exact):
            arguments.logsumexp = logsumexp.data_ptr()
            arguments.dq, arguments.dk, arguments.dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
            arguments.dweight = dweight.data_ptr()
            if spans is not None:
                arguments.at.spans = spans.data_ptr()
        if spans is not None:
            seen_by = rows_that_see(spans)
            call.arguments.seen_by = seen_by.data_ptr()
        call.launches()
        self._idle.append(call)  # the driver has read its arguments
        if self._is_grouped:
            dk, dv = dk.sum(2), dv.sum(2)
        return dq, dk, dv, dweight.sum((0, 2)).view(weight.shape)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `part_backward`, each in the dtype of what it is the gradient of."""
        dq, dk, dv, dweight = self(q, k, v, weight, out, logsumexp, grad_out)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dweight.to(weight.dtype)

    def _describe(
        self, starts: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scratch: Tensor
    ) -> list[TensorMap]:
        """The tensor maps of a call, remembered by where all begin."""
        stored = scratch[: self._layout.stored].view(q.dtype).view(2, self._plan.slots, -1, self._plan.pitch)
        return keep(self._maps, starts, [tensor_map(x) for x in (q, k, v, grad_out, stored)])


class Call:
    """The launches of one call at a time, laid out for the driver but for addresses."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, grad_out: Tensor,
        geometry: Geometry, plan: Plan, layout: ScratchLayout, scale: float,
    ) -> None:  # fmt: skip
        batch, heads, query_rows, _ = q.shape
        kv_heads, key_rows = k.shape[1:3]
        device = q.device.index
        self.preparation = Preparation(
            v=Rows.of(v), out=Rows.of(out), grad_out=Rows.of(grad_out), weight=Weight.of(weight),
            scale_log2=scale * math.log2(math.e), counter_count=1 + 2 * plan.stages,
            heads=heads, kv_heads=kv_heads, batch=batch, query_rows=query_rows, key_rows=key_rows,
        )  # fmt: skip
        self.arguments = Arguments(
            Positions(None, heads, heads // kv_heads, query_rows, key_rows),
            scale=scale, chunk_rows=plan.row_blocks * geometry.block_rows, pitch=plan.pitch,
            chunks=Chunks(batch * heads, plan.chunks, plan.row_blocks, plan.all_row_blocks, plan.lag, plan.slots),
        )  # fmt: skip
        self.exact = ExactArguments(
            self.arguments.at, Inputs(Rows.of(q), Rows.of(k), Rows.of(v), Weight.of(weight), scale), Rows.of(grad_out),
            weight_pitch=plan.all_row_blocks * geometry.warpgroups * weight[0].numel(),
        )  # fmt: skip
        self._maps, self._layout, self._stages = (TensorMap * 5)(), layout, plan.stages
        self.starts: tuple[int, ...] = ()
        backward = driver.Launch(
            kernel(geometry, device), (plan.work_tiles, 1), geometry.threads, geometry.shared_memory, device,
            *self._maps, self.arguments,
        )  # fmt: skip
        exact = Exact(geometry.prepared, geometry.causal, geometry.spans)
        exactly = driver.Launch(
            exact_kernel(exact, device), (batch * heads, 1), exact.threads, exact.shared_memory, device, self.exact
        )
        prepare = prepare_launch(geometry.prepared, self.preparation, device)
        self.launches = driver.LaunchSequence(prepare, backward, exactly)

    def place(self, starts: tuple[int, ...], maps: list[TensorMap]) -> None:
        """Take q, k, v, grad_out, out and the scratch from these addresses; `maps` are of all but out."""
        preparation, arguments, layout = self.preparation, self.arguments, self._layout
        self._maps[:] = maps
        exact = self.exact
        q, k, v, grad_out, out, scratch = starts
        exact.inputs.q.start, exact.inputs.k.start, exact.inputs.v.start, exact.grad_out.start = q, k, v, grad_out
        preparation.v.start, preparation.grad_out.start, preparation.out.start = v, grad_out, out
        for name, at in layout.prepared.items():
            setattr(preparation, name, scratch + at)
            setattr(arguments, name, scratch + at)
        arguments.p, arguments.ds = scratch, scratch + layout.stored // 2
        arguments.ds_unit, counters = scratch + layout.ds_unit, scratch + layout.counters
        preparation.counters = arguments.chunks.tile_counter = counters  # which prepare.cu sets to 0, at every call
        arguments.chunks.rows_done, arguments.chunks.products_done = counters + 4, counters + 4 * (1 + self._stages)
        self.starts = starts


class ScratchLayout(NamedTuple):
    """Where in the scratch, whose start is p and then ds, the rest begins, and where it ends, in bytes."""

    stored: int  # p and ds `[2, slots, rows of a chunk, pitch]`, in q's dtype
    prepared: dict[str, int]  # what prepare.cu writes, by the names of `Preparation` and `Arguments`
    ds_unit: int
    counters: int
    end: int

    @classmethod
    def of(
        cls, geometry: Geometry, plan: Plan, batch: int, heads: int, kv_heads: int, query_rows: int
    ) -> ScratchLayout:
        """The scratch of a call."""
        stored = 2 * 2 * plan.slots * plan.row_blocks * geometry.block_rows * plan.pitch
        numbers = {
            "taps": heads * geometry.prepared.tap_bytes // 4, "taps_back": heads * geometry.prepared.tap_bytes // 4,
            "weight_scale": heads,
            "value_norms": batch * kv_heads * NORM_PARTS, "grad_norms": batch * heads * NORM_PARTS,
            "delta": batch * heads * query_rows, "ds_unit": batch * heads, "counters": 1 + 2 * plan.stages,
        }  # fmt: skip
        starts, at = {}, stored
        for name, count in numbers.items():
            starts[name] = at
            at += -(-4 * count // SCRATCH_ALIGNED) * SCRATCH_ALIGNED
        ds_unit, counters = starts.pop("ds_unit"), starts.pop("counters")
        return cls(stored, starts, ds_unit, counters, at)


class Plan(NamedTuple):
    """Work tiles of a launch, in the order of backward_scheduler.cuh, and how many chunks the scratch has room for."""

    all_row_blocks: int
    row_blocks: int  # of a chunk
    chunks: int  # of a head
    lag: int
    slots: int
    stages: int
    pitch: int  # numbers of p, or ds, of a row
    work_tiles: int

    @classmethod
    def of(cls, geometry: Geometry, batch_heads: int, query_rows: int, key_rows: int, multiprocessors: int) -> Plan:
        """Chunks as long as MOST_CHUNK_ROWS allows, and slots for those under way, whatever the number of heads.

        A multiprocessor has one block at a time: when the products of a stage are taken, `lag` stages later, its row
        blocks are done or about to be. The scratch has room for no more rows than MOST_CHUNK_ROWS of every head, unless
        SPARED_SCRATCH holds them; where it has room for few, chunks are shorter, so that some are under way at a time.
        """
        rows, pitch = geometry.block_rows, -(-(key_rows + CARRIED) // TILE) * TILE
        most_rows = max(batch_heads * MOST_CHUNK_ROWS, SPARED_SCRATCH // (2 * 2 * pitch))
        all_row_blocks, most_row_blocks = -(-query_rows // rows), most_rows // rows
        chunks = -(-all_row_blocks // max(min(MOST_CHUNK_ROWS // rows, most_row_blocks // FEWEST_SLOTS), 1))
        row_blocks = -(-all_row_blocks // chunks)
        stages = batch_heads * chunks
        lag = -(-multiprocessors // row_blocks) + 1
        slots = min(lag + 2, stages, max(most_row_blocks // row_blocks, 1))
        lag = min(lag, slots - 1)  # a slot's rows come after the products that read those before them
        work_tiles = batch_heads * all_row_blocks
        for chunk in range(chunks):
            end = min((chunk + 1) * row_blocks * rows, query_rows)
            keys = end + key_rows - query_rows if geometry.causal else key_rows
            work_tiles += batch_heads * sum(-(-(keys + shift) // PLACES) for shift in (geometry.left, geometry.lag))
        return cls(all_row_blocks, row_blocks, chunks, lag, slots, stages, pitch, work_tiles)


def rows_that_see(spans: Tensor) -> Tensor:
    """For blocks of ALIGNED keys the rows, multiples of it, from and to before which one is seen: `[2, blocks]`."""
    key_rows = spans.shape[1]
    blocks = torch.arange(-(-key_rows // ALIGNED), device=spans.device, dtype=torch.int32) * ALIGNED
    last_rows = (blocks + ALIGNED - 1).clamp(max=key_rows - 1)
    first = torch.searchsorted(spans[1, last_rows], blocks, right=True)
    end = torch.searchsorted(spans[0, ::ALIGNED].contiguous(), blocks + ALIGNED)
    return (torch.stack([first, end]) * ALIGNED).to(torch.int32)


@functools.cache
def kernel(geometry: Geometry, device: int) -> Any:
    """The kernel on a device, compiled at the first call: seconds, unless the disk has it."""
    return driver.load(machine_code(geometry.source), "hopper_backward", geometry.shared_memory, device)


@functools.cache
def exact_kernel(exact: Exact, device: int) -> Any:
    """The kernel on a device, compiled at the first call."""
    return driver.load(machine_code(exact.source), "hopper_backward_exact", exact.shared_memory, device)
