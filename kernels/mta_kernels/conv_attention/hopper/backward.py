"""Launches backward.cu, whose blocks compute rows of a head, or products of what these left."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention.hopper.forward import ROWS, SLAB
from mta_kernels.conv_attention.hopper.prepare import (
    ELEMENTS,
    NORM_PARTS,
    Positions,
    Preparation,
    Rows,
    Tiles,
    prepare_launch,
)
from mta_kernels.conv_attention.hopper.source import Product, hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import describable, tensor_map
from mta_kernels.cuda import driver
from mta_kernels.cuda.compiler import Source, machine_code
from mta_kernels.gpu_limits import sm_count

MAX_HEAD_DIM = 128
TILE, CARRIED = 64, 16  # keys of a tile, and columns of c that it leaves to the next
SCORES_ABOVE, GRADS_ABOVE = 16, 8  # rows above a warpgroup's own
PLACES, ALIGNED = 256, 128  # of scratch, that a block's products read; rows and keys of the blocks of `rows_that_see`
MOST_CHUNK_ROWS, FEWEST_SLOTS = 4248, 4
SPARED_SCRATCH = 4 * 2**30  # bytes that the scratch may take however few heads there are: see `Plan`


class Geometry(Tiles):
    """The constants of backward.cu for a shape."""

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
        """Columns by which ds's tiles do, LAG of backward.cu."""
        return self.left + -(-self.pad // 8) * 8

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward.cu lays them out."""
        tiles = (2 * self.warpgroups + 3 * self.stages) * self.slabs
        above = SCORES_ABOVE + GRADS_ABOVE
        buffers = (self.warpgroups * 10 * (2 * ROWS + above) + 8 * above) * 16
        small = 2 * self.prepared.tap_bytes + (6 * self.stages + 5) * 8 + self.warpgroups * 16 + 16
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


class Chunks(ctypes.Structure):
    """`struct Chunks` of works.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("batch_heads", "chunks", "row_blocks", "all_row_blocks", "lag", "slots")),
        *((name, ctypes.c_void_p) for name in ("taken", "rows_done", "products_done")),
    )


class Arguments(ctypes.Structure):
    """`struct Arguments` of backward.cu."""

    _fields_ = (
        ("at", Positions),
        ("taps", ctypes.c_void_p),
        ("taps_back", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("key_norms", ctypes.c_void_p),
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


def part_backward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, *,
    causal: bool, scale: float, pad: int, spans: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of some heads: dq in q's dtype, dk, dv and the weight's in float32; logsumexp is contiguous.

    The same from run to run. Scratch: p and ds of the chunks of rows under way, see `Plan`.
    """
    q, k, v, out, grad_out = (describable(x) for x in (q, k, v, out, grad_out))
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    geometry = Geometry(q.dtype, head_dim, weight.shape[1], weight.shape[2], pad, causal, spans is not None)
    prepared, device = geometry.prepared, q.device

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    taps, taps_back = numbers(2, heads, prepared.tap_bytes // 2, dtype=torch.float16)
    weight_scale, ds_unit = numbers(heads), numbers(batch * heads)
    key_norms, value_norms = numbers(2, batch * kv_heads, NORM_PARTS)
    grad_norms, delta = numbers(batch * heads, NORM_PARTS), numbers(batch, heads, query_rows)
    plan = Plan.of(geometry, batch * heads, query_rows, key_rows, sm_count(device))
    counters = numbers(1 + 2 * plan.stages, dtype=torch.int32)  # set to 0 by prepare.cu, at every call
    made = {"taps": taps, "taps_back": taps_back, "weight_scale": weight_scale, "key_norms": key_norms}
    made |= {"value_norms": value_norms, "grad_norms": grad_norms, "delta": delta}
    preparation = Preparation(
        k=Rows.of(k), v=Rows.of(v), out=Rows.of(out), grad_out=Rows.of(grad_out), **Preparation.of_weight(weight),
        **{name: x.data_ptr() for name, x in made.items()}, scale_log2=scale * math.log2(math.e),
        counters=counters.data_ptr(), counter_count=counters.numel(), heads=heads, kv_heads=kv_heads, batch=batch,
        query_rows=query_rows, key_rows=key_rows,
    )  # fmt: skip
    driver.LaunchSequence(prepare_launch(prepared, preparation, device.index))()

    scratch = numbers(2, plan.slots, plan.row_blocks * geometry.block_rows, plan.pitch, dtype=q.dtype)
    dq = torch.empty(q.shape, dtype=q.dtype, device=device)
    dk, dv = numbers(2, batch * heads, key_rows, head_dim)
    dweight = numbers(batch * heads, plan.all_row_blocks, geometry.warpgroups, weight[0].numel())
    seen_by = None if spans is None else rows_that_see(spans)
    positions = Positions(None if spans is None else spans.data_ptr(), heads, heads // kv_heads, query_rows, key_rows)
    taken, rows_done, products_done = (counters[i:].data_ptr() for i in (0, 1, 1 + plan.stages))
    arguments = Arguments(
        at=positions, **{name: x.data_ptr() for name, x in made.items()}, logsumexp=logsumexp.data_ptr(),
        p=scratch[0].data_ptr(), ds=scratch[1].data_ptr(), ds_unit=ds_unit.data_ptr(), dk=dk.data_ptr(),
        dv=dv.data_ptr(), seen_by=None if seen_by is None else seen_by.data_ptr(), dq=dq.data_ptr(),
        dweight=dweight.data_ptr(), scale=scale, chunk_rows=scratch.shape[2], pitch=plan.pitch,
        chunks=Chunks(
            batch * heads, plan.chunks, plan.row_blocks, plan.all_row_blocks, plan.lag, plan.slots,
            taken, rows_done, products_done,
        ),
    )  # fmt: skip
    driver.launch(
        kernel(geometry, device.index), (plan.works, 1), geometry.threads, geometry.shared_memory, device.index,
        *(tensor_map(x) for x in (q, k, v, grad_out, scratch)), arguments,
    )  # fmt: skip
    grouped = (x.view(batch, kv_heads, heads // kv_heads, key_rows, head_dim) for x in (dk, dv))
    dk, dv = (x.squeeze(2) if heads == kv_heads else x.sum(2) for x in grouped)
    return dq, dk, dv, dweight.view(batch, heads, -1, weight[0].numel()).sum((0, 2)).view(weight.shape)


class Plan(NamedTuple):
    """Works of a launch, in the order of works.cuh, and how many chunks the scratch has room for."""

    all_row_blocks: int
    row_blocks: int  # of a chunk
    chunks: int  # of a head
    lag: int
    slots: int
    stages: int
    pitch: int  # numbers of p, or ds, of a row
    works: int

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
        chunks = -(-all_row_blocks // row_blocks)
        stages = batch_heads * chunks
        lag = -(-multiprocessors // row_blocks) + 1
        slots = min(lag + 2, stages, max(most_row_blocks // row_blocks, 1))
        lag = min(lag, slots - 1)  # a slot's rows come after the products that read those before them
        works = batch_heads * all_row_blocks
        for chunk in range(chunks):
            end = min((chunk + 1) * row_blocks * rows, query_rows)
            keys = end + key_rows - query_rows if geometry.causal else key_rows
            works += batch_heads * sum(-(-(keys + shift) // PLACES) for shift in (geometry.left, geometry.lag))
        return cls(all_row_blocks, row_blocks, chunks, lag, slots, stages, pitch, works)


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
