"""The constants of the kernels in which heads meet."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mta_kernels.multi_token_attention.bands_cuda import bands
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import ELEMENTS
from mta_kernels.operation import Convolution

FOLDER = Path(__file__).parent
MOST_HEADS = 16
OPERANDS = {"probabilities": 1, "logits": 2}  # by the name of the source
KERNELS = {
    "probabilities": "mix_probabilities", "heads": "convolve_heads", "logits": "differentiate_logits",
    "pre": "pre_heads", "post": "post_heads", "rebuild": "rebuild_probabilities",
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Keys of a tile, stages of a warp's ring, warps an SM, and keys of a row that follow one another in a warp."""

    keys: int
    stages: int
    warps: int
    run: int


TILES = {"probabilities": Sizes(128, 3, 12, 512), "logits": Sizes(128, 2, 12, 512)}


@dataclass(frozen=True)
class WalkSizes:
    """Rows of a task, about, stages of a warp's ring, tiles, warps that mix, and keys of a row that each takes."""

    rows: int
    stages: int
    tiles: int
    mixers: int
    unit: int

    @property
    def of_a_head(self) -> bands.Sizes:
        return bands.Sizes(self.rows, self.stages, 1)  # a block of all heads has an SM to itself


WALKS = {
    "pre": WalkSizes(104, 2, 3, 4, 64), "post": WalkSizes(104, 2, 3, 4, 64), "heads": WalkSizes(104, 2, 2, 4, 64),
    "rebuild": WalkSizes(104, 2, 3, 4, 64),
}  # fmt: skip
# Those with exponentials, on Hopper, where registers go to the warps that need them.
HOPPER_WALKS = {name: dataclasses.replace(WALKS[name], mixers=8) for name in ("pre", "rebuild")}


def walk_sizes(name: str, capability: tuple[int, int] | None) -> WalkSizes:
    """Those of a kernel on a GPU, or in the emulator."""
    hopper = capability is not None and capability[0] == 9
    return HOPPER_WALKS.get(name, WALKS[name]) if hopper else WALKS[name]


# Of a task that has an SM to itself: what it costs beside its turns, in turns; its most turns over its least.
START, MOST_TURNS = 1.5, 5 / 3


@functools.lru_cache(1024)
def rows_of_even_tasks(
    least: int, query_taps: int, rows: int, keys: int, key_tiles: int, batch: int, blocks: int
) -> int:  # fmt: skip
    """Rows of a task, from `least` on, with which the last of `blocks` tasks at a time ends the earliest.

    Of a chunk of `rows` rows whose last sees `keys` keys and each before it one less; all see all keys if `keys` is 0.
    """
    found = []
    first = -(-(least + query_taps - 1) // query_taps)
    for turns in range(first, int(first * MOST_TURNS) + 1):
        run = bands.rows_of_turns(turns, query_taps)
        ends = range(run, rows + run, run)
        seen = (keys - rows + min(end, rows) for end in ends)
        tasks = batch * sum(min(max(-(-x // bands.KEYS), 1), key_tiles) if keys else key_tiles for x in seen)
        found.append((-(-tasks // blocks) * (turns + START), run))
    return min(found)[1]


@dataclass(frozen=True)
class HeadConstants:
    """What the constants of each kernel begin with; `name` is its source's."""

    name: str
    dtype: torch.dtype
    heads: int
    causal: bool
    documents: bool

    @property
    def kernel_name(self) -> str:
        return KERNELS[self.name]

    def _source(self, architecture: str, constants: dict[str, Any]) -> Source:
        architecture += "a" if architecture == "sm_90" else ""  # for setmaxnreg
        return Source(FOLDER / f"{self.name}.cu", architecture, constants, headers_in(bands.FOLDER, FOLDER))


@dataclass(frozen=True)
class TileConstants(HeadConstants):
    """The constants of probabilities.cu or logits.cu."""

    sizes: Sizes

    threads = bands.THREADS

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a block takes, as tiles.cuh lays them out."""
        return self.sizes.stages * OPERANDS[self.name] * self.heads * (self.sizes.keys * 2 + 16)

    def source(self, architecture: str) -> Source:
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads, "KEYS": self.sizes.keys,
            "OPERANDS": OPERANDS[self.name], "CAUSAL": int(self.causal), "DOCUMENTS": int(self.documents),
            "STAGES": self.sizes.stages, "SHARED_BYTES": self.shared_memory, "BLOCKS_AN_SM": self.sizes.warps,
        }  # fmt: skip
        return self._source(architecture, constants)


@dataclass(frozen=True)
class WalkConstants(HeadConstants):
    """The constants of pre.cu, post.cu, heads.cu or rebuild.cu."""

    conv: Convolution
    sizes: WalkSizes

    @property
    def of_a_head(self) -> bands.BandConstants:
        sizes = self.sizes.of_a_head
        return bands.BandConstants(False, self.dtype, self.conv, False, self.causal, self.documents, sizes)

    @property
    def rows_of_task(self) -> int:
        """These and their halo fill a task's turns."""
        taps = self.conv.query_taps
        return bands.rows_of_turns(-(-self.sizes.rows // taps), taps)

    @property
    def threads(self) -> int:
        return bands.THREADS * (self.heads + self.sizes.mixers)

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a block takes, as walk.cuh and heads.cu lay them out."""
        tile = self.conv.query_taps * self.heads * (bands.KEYS * 2 + 16)
        tiles = self.sizes.tiles
        if self.name == "heads":
            tiles += self.sizes.stages + tiles - 1  # of the gradient
        return self.heads * self.of_a_head.shared_memory + tiles * tile

    def source(self, architecture: str) -> Source:
        constants = {
            **self.of_a_head.constants(), "HEADS": self.heads, "TILES": self.sizes.tiles,
            "MIXERS": self.sizes.mixers, "UNIT": self.sizes.unit, "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        return self._source(architecture, constants)
