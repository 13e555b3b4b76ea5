"""Tiles by the Triton kernels: the margins are cut off what the kernels read, so that they know nothing of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mta_kernels.conv_attention.context_parallel.tiles import Problem, Tile
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.conv_attention.triton.backward import conv_attention_backward
from mta_kernels.conv_attention.triton.forward import conv_attention_forward
from mta_kernels.conv_attention.triton.prepare import Margins


@dataclass(frozen=True)
class TritonTiles:
    """As `EagerTiles`, with results in float32 and memory that is proportional to the rows."""

    head_chunk: int

    def forward(self, problem: Problem, tile: Tile, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
        with on_device_of(q), without_autocast(q):
            out, logsumexp = conv_attention_forward(
                problem.operation(tile.causal), q, k, v, weight, head_chunk=self.head_chunk,
                margins=Margins(tile.query_margin, tile.key_margin), out_dtype=torch.float32,
            )  # fmt: skip
        return [out, logsumexp]

    def backward(
        self, problem: Problem, tile: Tile, q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
        out: Tensor, logsumexp: Tensor, grad_out: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        with on_device_of(q), without_autocast(q):
            gradients = conv_attention_backward(
                problem.operation(tile.causal), q, k, v, weight, out, logsumexp, grad_out,
                head_chunk=self.head_chunk, margins=Margins(tile.query_margin, tile.key_margin),
                gradient_dtype=torch.float32,
            )  # fmt: skip
        return list(gradients)
