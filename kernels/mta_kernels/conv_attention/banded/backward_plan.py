"""How a backward is cut into chunks of rows, for backward_scheduler.cuh."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

from mta_kernels.conv_attention.banded import FOLDER
from mta_kernels.conv_attention.banded.structures import BandedConstants, Inputs, Positions
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import Rows, fields
from mta_kernels.operation import Convolution


@dataclass(frozen=True)
class ExactConstants(BandedConstants):
    """The constants of backward_exact.cu for a shape."""

    architecture: str = ""  # instead of the GPU's own

    kernel_name, threads = "backward_exact", 256

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_exact.cu lays them out."""
        taps = self.conv.query_taps
        return 4 * ((2 * taps + 2) * self.threads + taps * self.head_dim)

    def source(self, architecture: str) -> Source:
        return Source(
            FOLDER / "backward_exact.cu", self.architecture or architecture, self.constants(), headers_in(FOLDER)
        )


class BackwardConstants(BandedConstants):
    """What a plan reads of a backward's constants."""

    exact_architecture = ""  # as of `ExactConstants`

    @property
    def block_rows(self) -> int:
        """Rows that a block computes whole."""
        raise NotImplementedError

    @property
    def places(self) -> int:
        """Numbers of a scratch row that a block of products reads."""
        raise NotImplementedError

    def products_of_rows(self, rows: int) -> int:
        """Blocks of products that a chunk of so many rows has besides the products of p and ds: here none."""
        return 0

    @property
    def exact(self) -> ExactConstants:
        """The constants of the last launch."""
        shape = self.dtype, self.head_dim, self.conv, self.causal, self.spans
        return ExactConstants(*shape, architecture=self.exact_architecture)


class ExactArguments(ctypes.Structure):
    """`struct Arguments` of backward_exact.cu."""

    _fields_ = (
        ("at", Positions), ("inputs", Inputs), ("grad_out", Rows), *fields(c_void_p, "logsumexp dq dk dv dweight"),
        ("weight_pitch", c_int), *fields(c_void_p, "dk_rounded dv_rounded weight_grad heads_done"),
        *fields(c_int, "weight_grad_is_float batch"),
    )  # fmt: skip


class GradientPreparation(ctypes.Structure):
    """`struct GradientPreparation` of prepare_gradients.cuh."""

    _fields_ = (
        *fields(Rows, "v out grad_out"), *fields(c_void_p, "value_norms grad_norms delta counters"),
        *fields(c_int, "heads kv_heads batch query_rows key_rows counter_count"),
    )  # fmt: skip


TILE, CARRIED = 64, 16  # most keys of a tile, and columns of c that it leaves to the next
NORM_PARTS = 32  # as in backward_scale.cuh
ALIGNED = 128  # rows and keys of the blocks of `rows_that_see`
MOST_CHUNK_ROWS, FEWEST_SLOTS = 4248, 4
CHEAP_SCRATCH = 2 * 2**30  # bytes that the scratch takes if that keeps row blocks from waiting for it
SPARED_SCRATCH = 4 * 2**30  # bytes that the scratch may take however few heads there are: see `ChunkPlan`


class Chunks(ctypes.Structure):
    """`struct Chunks` of backward_scheduler.cuh."""

    _fields_ = (
        *fields(c_int, "batch_heads chunks row_blocks all_row_blocks slots stages work_tiles open_at_first"),
        ("scheduler", c_void_p),
    )


def columns_left(conv: Convolution) -> int:
    """Columns by which p's tiles begin before the score tiles, LEFT of positions.cuh."""
    return -(-(conv.key_taps - 1 - conv.pad) // 8) * 8


def columns_lag(conv: Convolution) -> int:
    """Columns by which ds's tiles begin before the score tiles, LAG of backward_layout.cuh."""
    return columns_left(conv) + -(-conv.pad // 8) * 8


class ChunkPlan(NamedTuple):
    """Work tiles of a launch, in the order of backward_scheduler.cuh, and how many chunks the scratch has room for."""

    all_row_blocks: int
    row_blocks: int  # of a chunk
    chunks: int  # of a head
    slots: int
    stages: int
    pitch: int  # numbers of p, or ds, of a row
    work_tiles: int

    @classmethod
    def of(
        cls, constants: BackwardConstants, batch_heads: int, query_rows: int, key_rows: int, blocks_at_once: int
    ) -> ChunkPlan:
        """Chunks as long as MOST_CHUNK_ROWS allows, and slots for the chunks in flight, whatever the number of heads.

        The GPU runs `blocks_at_once`. The scratch holds that many row blocks and three more stages for their products.
        Within CHEAP_SCRATCH bytes it holds three times as many row blocks, so that none waits for scratch. It holds at
        most MOST_CHUNK_ROWS rows of every head, or what SPARED_SCRATCH bytes hold if that is more. Where few rows fit,
        chunks are shorter, so that several are in flight.
        """
        rows, pitch = constants.block_rows, -(-(key_rows + CARRIED) // TILE) * TILE
        most_rows = max(batch_heads * MOST_CHUNK_ROWS, SPARED_SCRATCH // (2 * 2 * pitch))
        all_row_blocks, most_row_blocks = -(-query_rows // rows), most_rows // rows
        chunks = -(-all_row_blocks // max(min(MOST_CHUNK_ROWS // rows, most_row_blocks // FEWEST_SLOTS), 1))
        row_blocks = -(-all_row_blocks // chunks)
        stages = batch_heads * chunks
        few, many = (-(-times * blocks_at_once // row_blocks) + 3 for times in (1, 3))
        cheap = CHEAP_SCRATCH // (2 * 2 * pitch * rows * row_blocks)
        slots = min(max(few, min(many, cheap)), stages, max(most_row_blocks // row_blocks, 1))
        work_tiles = batch_heads * all_row_blocks
        shifts = columns_left(constants.conv), columns_lag(constants.conv)
        for chunk in range(chunks):
            first, end = chunk * row_blocks * rows, min((chunk + 1) * row_blocks * rows, query_rows)
            keys = end + key_rows - query_rows if constants.causal else key_rows
            products = sum(-(-(keys + shift) // constants.places) for shift in shifts)
            work_tiles += batch_heads * (products + constants.products_of_rows(end - first))
        return cls(all_row_blocks, row_blocks, chunks, slots, stages, pitch, work_tiles)

    @property
    def counters(self) -> int:
        """Numbers of `struct Scheduler`, and of each stage the row blocks and the products that are done."""
        return 2 * 3 + 2 * self.stages

    def chunk_structure(self, batch_heads: int) -> Chunks:
        """What the kernel receives, except the address of the counters."""
        last_blocks = self.all_row_blocks - (self.chunks - 1) * self.row_blocks
        open_at_first = min(self.slots, batch_heads) * last_blocks + max(self.slots - batch_heads, 0) * self.row_blocks
        sizes = self.chunks, self.row_blocks, self.all_row_blocks, self.slots, self.stages, self.work_tiles
        return Chunks(batch_heads, *sizes, open_at_first)
