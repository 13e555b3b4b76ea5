"""The constants of pre.cu and post.cu for a shape, and which of these fit a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import ELEMENTS
from mta_kernels.operation import ONE_TAP, Convolution

FOLDER = Path(__file__).parent
HEADERS = ("tiles_instructions.cuh", "layout.cuh", "steps.cuh", "load.cuh", "convolve.cuh", "mix.cuh", "pipeline.cuh")
MOST_HEADS = 64
MOST_TAPS = (8, 17)


@dataclass(frozen=True)
class TileConstants:
    """The constants of pre.cu, or with `post` of post.cu.

    A block takes `rows` x `columns` of all heads at a time. Loads run `lead` such steps ahead; `results` is how many of
    them are kept between convolution and mixing.
    """

    post: bool
    dtype: torch.dtype
    heads: int
    conv: Convolution
    mix: bool
    causal: bool
    documents: bool
    warps: int
    rows: int
    columns: int
    lead: int
    results: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a block takes, as layout.cuh lays them out."""
        query_taps, key_taps, pad = self.conv.query_taps, self.conv.key_taps, self.conv.pad
        step, beside = self.columns // 8, -(-pad // 8) + -(-(key_taps - 1 - pad) // 8)
        interleave = self.rows // 16
        ring = (step + beside + self.lead * step) | 1
        slots = 16 + (interleave + query_taps - 2) // interleave
        ring_bytes = interleave * ((slots * ring + 3) // 8 * 8 + 4) * 16
        result = max(8, self.heads) * (self.rows * self.columns * 2 + 16)
        blocks = -(-self.heads // 16)
        mixing = blocks * blocks * 512 if self.mix and blocks > 1 else 0
        return self.heads * ring_bytes + self.results * result + mixing + 8 * 48

    def source(self, architecture: str) -> Source:
        constants = {
            "POST": int(self.post), "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads,
            "QUERY_TAPS": self.conv.query_taps, "KEY_TAPS": self.conv.key_taps, "PAD": self.conv.pad,
            "MIX": int(self.mix), "CAUSAL": int(self.causal), "DOCUMENTS": int(self.documents), "WARPS": self.warps,
            "ROWS": self.rows, "COLUMNS": self.columns, "LEAD": self.lead, "RESULTS": self.results,
            "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        headers = headers_in(FOLDER, HEADERS)
        return Source(FOLDER / ("post.cu" if self.post else "pre.cu"), architecture, constants, headers)


def plan_on(
    limit: int, post: bool, dtype: torch.dtype, heads: int, conv: Convolution | None, mix: bool, causal: bool,
    documents: bool,
) -> TileConstants | None:  # fmt: skip
    """The best constants that fit into `limit` bytes of shared memory a block, or None."""
    for rows, columns, lead, results in _shapes(post):
        found = TileConstants(
            post, dtype, heads, conv or ONE_TAP, mix, causal, documents, warps_for(heads), rows, columns, lead, results
        )
        if found.shared_memory <= limit:
            return found
    return None


def warps_for(heads: int) -> int:
    """Heads are shared evenly among 8 to 16 warps; with 9 to 16 heads, some warps have a row more to mix instead."""
    if heads <= 16:
        return max(8, -(-heads // 4) * 4)
    return max(8, -(-heads // -(-heads // 16)))


def _shapes(post: bool) -> Iterator[tuple[int, int, int, int]]:
    """Rows, columns, lead and results, the best first: few rows of halo, then stages that overlap."""
    yield from ((32, 32, 2, 2), (32, 32, 1, 2)) if post else ((32, 32, 1, 2),)
    yield from ((16, 32, 2, 2), (32, 32, 1, 1), (16, 32, 1, 2), (16, 32, 1, 1), (16, 16, 1, 2), (16, 16, 1, 1))
