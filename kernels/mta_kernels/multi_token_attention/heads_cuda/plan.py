"""The constants of probabilities.cu, heads.cu and logits.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from mta_kernels.multi_token_attention.bands_cuda import plan as bands
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import ELEMENTS
from mta_kernels.operation import Convolution

FOLDER = Path(__file__).parent
MOST_HEADS = 16
OPERANDS = {"probabilities": 1, "logits": 2}  # by the name of the source


@dataclass(frozen=True)
class Sizes:
    """Keys of a tile, stages of a warp's ring, warps an SM, and keys of a row that follow one another in a warp."""

    keys: int
    stages: int
    warps: int
    run: int


TILES = {"probabilities": Sizes(128, 3, 12, 512), "logits": Sizes(128, 2, 12, 512)}
# A block of all heads has an SM to itself.
HEADS = bands.Sizes(104, 2, 1)


@dataclass(frozen=True)
class TileConstants:
    """The constants of probabilities.cu or logits.cu, whichever is the `name`."""

    name: str
    dtype: torch.dtype
    heads: int
    causal: bool
    documents: bool
    round_logits: bool
    sizes: Sizes

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a block takes, as tiles.cuh lays them out."""
        return self.sizes.stages * OPERANDS[self.name] * self.heads * (self.sizes.keys * 2 + 16)

    def source(self, architecture: str) -> Source:
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads, "KEYS": self.sizes.keys,
            "OPERANDS": OPERANDS[self.name], "CAUSAL": int(self.causal), "DOCUMENTS": int(self.documents),
            "ROUND": int(self.round_logits), "STAGES": self.sizes.stages, "SHARED_BYTES": self.shared_memory,
            "BLOCKS_AN_SM": self.sizes.warps,
        }  # fmt: skip
        own = headers_in(FOLDER, ("mixing.cuh", "tiles.cuh", "softmax.cuh"))
        headers = {**own, **headers_in(bands.FOLDER, ("stored.cuh",))}
        return Source(FOLDER / f"{self.name}.cu", architecture, constants, headers)


@dataclass(frozen=True)
class HeadConstants:
    """The constants of heads.cu."""

    dtype: torch.dtype
    heads: int
    conv: Convolution
    causal: bool
    documents: bool
    sizes: bands.Sizes

    @property
    def of_a_head(self) -> bands.BandConstants:
        return bands.BandConstants(False, self.dtype, self.conv, False, self.causal, self.documents, self.sizes)

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a block takes, as heads.cu lays them out."""
        tile = self.conv.query_taps * self.heads * (bands.KEYS * 2 + 16)
        return self.heads * self.of_a_head.shared_memory + (2 + self.sizes.stages + 1) * tile

    def source(self, architecture: str) -> Source:
        of_a_head = self.of_a_head.source(architecture)
        constants = {**of_a_head.constants, "HEADS": self.heads, "SHARED_BYTES": self.shared_memory}
        headers = {**of_a_head.headers, **headers_in(FOLDER, ("mixing.cuh",))}
        return Source(FOLDER / "heads.cu", architecture, constants, headers)
