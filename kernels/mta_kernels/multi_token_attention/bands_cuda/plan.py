"""The constants of convolve.cu and gradients.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import ELEMENTS
from mta_kernels.operation import Convolution

FOLDER = Path(__file__).parent
MOST_TAPS = (8, 17)
KEYS, THREADS = 128, 32  # of a block, which is one warp


@dataclass(frozen=True)
class Sizes:
    """Rows of a warp, about, stages of its ring, and warps for which an SM has registers."""

    rows: int
    stages: int
    warps: int


def rows_of_turns(turns: int, query_taps: int) -> int:
    """Rows of a task which fill so many turns, of `query_taps` rows each, together with its halo."""
    return turns * query_taps - (query_taps - 1)


# A warp reads QUERY_TAPS - 1 rows more than its own; the fewer these are, the more evenly SMs are busy at the end.
CONVOLVE = Sizes(50, 3, 16)
GRADIENTS = Sizes(104, 2, 12)


@dataclass(frozen=True)
class BandConstants:
    """The constants of convolve.cu, or with `gradients` of gradients.cu."""

    gradients: bool
    dtype: torch.dtype
    conv: Convolution
    delta: bool
    causal: bool
    documents: bool
    sizes: Sizes

    threads = THREADS

    @property
    def kernel_name(self) -> str:
        return "convolution_gradients" if self.gradients else "convolve_rows"

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a block takes, as layout.cuh lays them out."""
        query_taps, key_taps, pad = self.conv.query_taps, self.conv.key_taps, self.conv.pad
        beside = -(-pad // 8) + -(-(key_taps - 1 - pad) // 8)
        ring = self.sizes.stages * query_taps * (KEYS // 8 + beside) * 16
        return max(2 * ring, query_taps * (beside + 1) * 8 * 8 * 4) if self.gradients else ring

    def constants(self) -> dict[str, Any]:
        return {
            "ELEMENT": ELEMENTS[self.dtype], "QUERY_TAPS": self.conv.query_taps, "KEY_TAPS": self.conv.key_taps,
            "PAD": self.conv.pad, "CAUSAL": int(self.causal), "DOCUMENTS": int(self.documents),
            "DELTA": int(self.delta), "STAGES": self.sizes.stages, "SHARED_BYTES": self.shared_memory,
            "BLOCKS_AN_SM": self.sizes.warps,
        }  # fmt: skip

    def source(self, architecture: str) -> Source:
        path = FOLDER / ("gradients.cu" if self.gradients else "convolve.cu")
        return Source(path, architecture, self.constants(), headers_in(FOLDER))
