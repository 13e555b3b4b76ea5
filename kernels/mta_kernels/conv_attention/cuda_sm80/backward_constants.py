"""The constants that backward.cu is compiled with, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from mta_kernels.conv_attention.banded import FOLDER as BANDED
from mta_kernels.conv_attention.banded.backward_exact import ExactConstants
from mta_kernels.conv_attention.banded.structures import BandedConstants
from mta_kernels.conv_attention.cuda_sm80.forward import beside_eights
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.operation import ONE_TAP, Convolution, key_padding

FOLDER = Path(__file__).parent
ON_EVERY_GPU = 128  # head dims have tiles up to here; beyond, where thread blocks have 163 KB of shared memory
ABOVE = 16  # rows of zeros


class Tiles(NamedTuple):
    """How a block of backward.cu computes rows."""

    row_groups: int  # of 32 rows
    column_groups: int  # warps that share a group's rows, each with a part of the keys
    keys: int  # of a tile
    chunk: int  # columns of a warp that registers hold at a time
    blocks: int  # that share an SM
    in_registers: bool  # the rows of q and grad_out


@dataclass(frozen=True)
class BackwardConstants(BandedConstants):
    """The constants of backward.cu for a shape."""

    tiles: Tiles

    kernel_name = "cuda_backward"

    @property
    def warps(self) -> int:
        return self.tiles.row_groups * self.tiles.column_groups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def block_rows(self) -> int:
        """Rows that a block computes whole."""
        return 32 * self.tiles.row_groups - 2 * (self.conv.query_taps - 1)

    @property
    def places(self) -> int:
        """PLACES of backward_layout.cuh."""
        return 64 * self.warps // self.parts

    @property
    def parts(self) -> int:
        """Warps that share the columns of a product, PARTS of backward_layout.cuh."""
        return 4 if self.head_dim > 128 else 2 if self.head_dim > 64 else 1

    def products_of_rows(self, rows: int) -> int:
        """Those of dq."""
        return -(-rows // self.places)

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_layout.cuh lays them out."""
        depth, rows, taps = -(-self.head_dim // 16) * 16, 32 * self.tiles.row_groups, self.conv.query_taps
        beside = beside_eights(self.conv)
        scores = -(-((rows + ABOVE) * ((self.tiles.keys // 8 + beside) | 1) * 16 + 16) // 128) * 128
        queries = rows * depth * 2
        both = max(2 * scores, 2 * queries) if self.tiles.in_registers else 2 * scores + 2 * queries
        of_rows = both + 2 * self.tiles.keys * depth * 2 + taps * (beside + 1) * 128
        stages, product_depth = (3, 64) if self.head_dim > 64 else (2, 32)  # at least
        of_products = stages * product_depth * (self.places + depth) * 2
        return max(of_rows, of_products) + 16

    def source(self, architecture: str) -> Source:
        own = {
            "WARPS": self.warps, "ROW_TILES": 2, "COLUMN_GROUPS": self.tiles.column_groups, "KEYS": self.tiles.keys,
            "CHUNK": self.tiles.chunk, "BLOCKS": self.tiles.blocks,
            "OPERANDS_IN_REGISTERS": int(self.tiles.in_registers), "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        return Source(FOLDER / "backward.cu", architecture, self.constants() | own, headers_in(FOLDER, BANDED))

    @property
    def prepared(self) -> BackwardPrepareConstants:
        """The first launch's, which few of the constants change."""
        return BackwardPrepareConstants(self.dtype, self.head_dim)

    @property
    def exact(self) -> ExactConstants:
        """The third launch's."""
        return ExactConstants(self.dtype, self.head_dim, self.conv, self.causal, self.spans)


@dataclass(frozen=True)
class BackwardPrepareConstants(BandedConstants):
    """The constants of prepare.cu for a shape; none of the convolution's make a difference."""

    conv: Convolution = ONE_TAP
    causal: bool = True
    spans: bool = False

    kernel_name, threads, shared_memory = "cuda_backward_prepare", 256, 32

    def source(self, architecture: str) -> Source:
        return Source(FOLDER / "prepare.cu", architecture, self.constants(), headers_in(FOLDER, BANDED))


# The fastest first, up to head dim 64, up to 128 and above. The last of the first two are for the 99 KB of sm_86, sm_89
# and sm_120.
SMALL_TILES = (Tiles(4, 1, 64, 32, 2, True), Tiles(4, 1, 32, 32, 2, True))
LARGE_TILES = (
    Tiles(4, 1, 32, 32, 2, False), Tiles(2, 2, 64, 32, 2, False), Tiles(4, 2, 64, 32, 1, False),
    Tiles(2, 2, 64, 32, 1, False),
)  # fmt: skip
WIDE_TILES = Tiles(4, 2, 64, 32, 1, False), Tiles(2, 2, 64, 32, 1, False)


def constants_for(
    dtype: torch.dtype, head_dim: int, conv: Convolution, causal: bool, spans: bool, shared_limit: int
) -> BackwardConstants | None:
    """Of the first tiles that fit a GPU whose blocks can have `shared_limit` bytes, or None; an SM has 1 KB more."""
    tiles = SMALL_TILES if head_dim <= 64 else LARGE_TILES if head_dim <= ON_EVERY_GPU else WIDE_TILES
    found = (BackwardConstants(dtype, head_dim, conv, causal, spans, x) for x in tiles)
    return next((x for x in found if x.tiles.blocks * (x.shared_memory + 1024) <= shared_limit + 1024), None)


def no_room(head_dim: int, query_taps: int, key_taps: int, shared_limit: int) -> str | None:
    """Why a GPU whose blocks can have `shared_limit` bytes has no tiles for such a backward, in a clause, or None."""
    conv = Convolution(query_taps, key_taps, key_padding(key_taps, "both"))  # other paddings take no more
    if constants_for(torch.bfloat16, head_dim, conv, True, False, shared_limit):
        return None
    return (
        f"the backward of head_dim {head_dim} with {query_taps}x{key_taps} taps needs more shared memory than the "
        f"{shared_limit // 1024} KB that a thread block has on this GPU"
    )
