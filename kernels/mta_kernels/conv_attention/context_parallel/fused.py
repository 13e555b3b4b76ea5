"""Tiles by the Triton and by the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention.context_parallel.tiles import Problem, Tile
from mta_kernels.conv_attention.hopper.backward import conv_attention_backward as hopper_backward
from mta_kernels.conv_attention.hopper.forward import conv_attention_forward as hopper_forward
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.conv_attention.triton.backward import conv_attention_backward
from mta_kernels.conv_attention.triton.forward import conv_attention_forward
from mta_kernels.conv_attention.triton.prepare import Margins


@dataclass(frozen=True)
class TritonTiles:
    """As `EagerTiles`, with results in float32 and memory that is proportional to the rows.

    The margins are cut off what the kernels read, so that they know nothing of them.
    """

    head_chunk: int
    add_logsumexps = staticmethod(torch.logaddexp)

    def forward(self, problem: Problem, tile: Tile, *tensors: Tensor) -> list[Tensor]:
        return self._run(conv_attention_forward, problem, tile, *tensors, out_dtype=torch.float32)

    def backward(self, problem: Problem, tile: Tile, *tensors: Tensor) -> list[Tensor]:
        return self._run(conv_attention_backward, problem, tile, *tensors, gradient_dtype=torch.float32)

    def _run(
        self, function: Callable[..., tuple[Tensor, ...]], problem: Problem, tile: Tile, *tensors: Tensor,
        **dtype: torch.dtype,
    ) -> list[Tensor]:  # fmt: skip
        operation, margins = problem.of_tile(tile), Margins(tile.query_margin, tile.key_margin)
        with on_device_of(tensors[0]), without_autocast(tensors[0]):
            return list(function(operation, *tensors, head_chunk=self.head_chunk, margins=margins, **dtype))


@dataclass(frozen=True)
class HopperTiles:
    """As `TritonTiles`; out and the gradient of q are rounded to their dtype tile by tile, and then added in float32.

    The lowest bit of a logsumexp marks rows whose gradients the kernels compute apart: see hopper/tiles.cuh.
    """

    head_chunk: int

    def forward(self, problem: Problem, tile: Tile, *tensors: Tensor) -> list[Tensor]:
        out, logsumexp = hopper_forward(problem.of_tile(tile), *tensors, margins=_has_margins(problem, tile))
        return [out.float(), logsumexp]

    def backward(self, problem: Problem, tile: Tile, *tensors: Tensor) -> list[Tensor]:
        options: dict[str, Any] = {"head_chunk": self.head_chunk, "margins": _has_margins(problem, tile)}
        return list(hopper_backward(problem.of_tile(tile), *tensors, **options, dtype=torch.float32))

    @staticmethod
    def add_logsumexps(one: Tensor, other: Tensor) -> Tensor:
        """With the mark of each row that either has."""
        marks = (one.view(torch.int32) | other.view(torch.int32)) & 1
        return (torch.logaddexp(one, other).view(torch.int32) & ~1 | marks).view(torch.float32)


def _has_margins(problem: Problem, tile: Tile) -> bool:
    """Whether the tile has all its margins: the one on the diagonal of the first chunk has none."""
    return not tile.causal or (tile.query_margin, tile.key_margin) == (problem.conv.query_taps - 1, problem.conv.pad)
