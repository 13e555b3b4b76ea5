"""How the backward is cut into chunks of rows, and where a call's scratch has what."""

from __future__ import annotations

from typing import NamedTuple

from mta_kernels.conv_attention.hopper.backward_constants import BackwardConstants
from mta_kernels.conv_attention.hopper.prepare import NORM_PARTS

TILE, CARRIED = 64, 16  # keys of a tile, and columns of c that it leaves to the next
PLACES, ALIGNED = 256, 128  # of scratch, that a block's products read; rows and keys of the blocks of `rows_that_see`
MOST_CHUNK_ROWS, FEWEST_SLOTS = 4248, 4
SPARED_SCRATCH = 4 * 2**30  # bytes that the scratch may take however few heads there are: see `ChunkPlan`
SCRATCH_ALIGNED = 256  # bytes, at multiples of which the parts of the scratch begin


class ScratchLayout(NamedTuple):
    """Where in the scratch, whose start is p and then ds, the rest begins, and where it ends, in bytes."""

    stored: int  # p and ds `[2, slots, rows of a chunk, pitch]`, in q's dtype
    prepared: dict[str, int]  # what prepare.cu writes, by the names of `Preparation` and `BackwardArguments`
    ds_unit: int
    counters: int
    end: int

    @classmethod
    def of(
        cls, constants: BackwardConstants, plan: ChunkPlan, batch: int, heads: int, kv_heads: int, query_rows: int
    ) -> ScratchLayout:
        """The scratch of a call."""
        stored = 2 * 2 * plan.slots * plan.row_blocks * constants.block_rows * plan.pitch
        numbers = {
            "taps": heads * constants.prepared.tap_bytes // 4, "taps_back": heads * constants.prepared.tap_bytes // 4,
            "weight_scale": heads,
            "value_norms": batch * kv_heads * NORM_PARTS,
            "grad_norms": (1 + constants.margins) * batch * heads * NORM_PARTS,  # and those of out
            "delta": batch * heads * query_rows, "ds_unit": batch * heads, "counters": 1 + 2 * plan.stages,
        }  # fmt: skip
        starts, at = {}, stored
        for name, count in numbers.items():
            starts[name] = at
            at += -(-4 * count // SCRATCH_ALIGNED) * SCRATCH_ALIGNED
        ds_unit, counters = starts.pop("ds_unit"), starts.pop("counters")
        return cls(stored, starts, ds_unit, counters, at)


class ChunkPlan(NamedTuple):
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
    def of(
        cls, constants: BackwardConstants, batch_heads: int, query_rows: int, key_rows: int, multiprocessors: int
    ) -> ChunkPlan:
        """Chunks as long as MOST_CHUNK_ROWS allows, and slots for those under way, whatever the number of heads.

        A multiprocessor has one block at a time: when the products of a stage are taken, `lag` stages later, its row
        blocks are done or about to be. The scratch has room for no more rows than MOST_CHUNK_ROWS of every head, unless
        SPARED_SCRATCH holds them; where it has room for few, chunks are shorter, so that some are under way at a time.
        """
        rows, pitch = constants.block_rows, -(-(key_rows + CARRIED) // TILE) * TILE
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
            keys = end + key_rows - query_rows if constants.causal else key_rows
            work_tiles += batch_heads * sum(-(-(keys + shift) // PLACES) for shift in (constants.left, constants.lag))
        return cls(all_row_blocks, row_blocks, chunks, lag, slots, stages, pitch, work_tiles)
