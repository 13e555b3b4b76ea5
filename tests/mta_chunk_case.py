"""A chunk of stored scores, as the CUDA kernels of the multi-token attention's backward take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernel_inputs import DEVICE
from torch import Tensor

from mta_kernels.multi_token_attention.bands_cuda.bands import Rows
from mta_kernels.operation import Convolution

GUARD = 7.0  # where nobody may write


def convolve_exactly(x: Tensor, taps: Tensor, conv: Convolution) -> Tensor:
    """`x [B, H, rows, keys]` by `taps [H, cq, ck]` in x's dtype, with zeros outside; on a GPU if there is one."""
    padded = F.pad(x.to(DEVICE), (conv.pad, conv.key_taps - 1 - conv.pad, conv.query_taps - 1, 0))
    return F.conv2d(padded, taps[:, None].to(DEVICE, x.dtype), groups=taps.shape[0]).to(x.device)


@dataclass(frozen=True)
class ChunkCase:
    """Queries are the last `queries` of `keys` positions; a chunk has `rows` rows, of which row 0 is `first_row`."""

    batch: int = 1
    heads: int = 2
    keys: int = 200
    queries: int = 200
    first_row: int = -10
    rows: int = 150
    above: int = 10
    owned: int = 130
    causal: bool = True
    bounds: tuple[int, ...] = ()  # first positions of documents after the first
    dtype: torch.dtype = torch.bfloat16
    scaled: bool = False  # whether gradients are times a loss scale of each sequence or document

    def __post_init__(self) -> None:
        assert self.above + self.owned <= self.rows

    @property
    def first_position(self) -> int:
        return self.keys - self.queries + self.first_row

    @property
    def pitch(self) -> int:
        last = min(self.first_row + self.rows, self.queries)
        return -(-(self.keys - self.queries + last if self.causal else self.keys) // 128) * 128

    def document(self) -> Tensor:
        """Of each position."""
        return torch.searchsorted(torch.tensor([0, *self.bounds, self.keys]), torch.arange(self.keys), right=True) - 1

    def where(self) -> Rows:
        documents = None
        if self.bounds:
            bounds, number = torch.tensor([0, *self.bounds, self.keys]), self.document()
            documents = torch.stack([bounds[number], bounds[number + 1]]).to(DEVICE, torch.int32)
        scale = self.loss_scale().to(DEVICE) if self.scaled else None
        return Rows(self.first_position, self.first_row, self.queries, self.keys, self.causal, documents, scale)

    def loss_scale(self) -> Tensor:
        """Powers of two: `[B]`, or with documents `[keys]`."""
        return torch.exp2(3.0 - 2 * (self.document() if self.bounds else torch.arange(self.batch)) % 7)

    def scale_of_rows(self) -> Tensor:
        """`[B, 1, rows, 1]`, or `[rows, 1]`."""
        if not self.scaled:
            return torch.ones(1, 1)
        if not self.bounds:
            return self.loss_scale()[:, None, None, None]
        position = torch.arange(self.rows) + self.first_position
        return self.loss_scale()[position.clamp(0, self.keys - 1), None]

    def row_documents(self) -> Tensor:
        """Of each row; -1 where it is no query."""
        position = torch.arange(self.rows) + self.first_position
        query = torch.arange(self.rows) + self.first_row
        inside = (query >= 0) & (query < self.queries)
        return torch.where(inside, self.document()[position.clamp(0, self.keys - 1)], -1)

    def seen(self) -> Tensor:
        """`[rows, pitch]`."""
        key, position = torch.arange(self.pitch), torch.arange(self.rows) + self.first_position
        document = F.pad(self.document(), (0, max(0, self.pitch - self.keys)), value=-2)[: self.pitch]
        seen = self.row_documents()[:, None] == document
        return seen & (key <= position[:, None]) if self.causal else seen

    def stored(self) -> Tensor:
        """`[rows, pitch]`: to the end of the block that has the key 127 behind a row's own."""
        if not self.causal:
            return torch.ones(self.rows, self.pitch, dtype=torch.bool)
        position = torch.arange(self.rows)[:, None] + self.first_position
        return torch.arange(self.pitch) < ((position + 127).clamp_min(-1) + 128) // 128 * 128

    def scores(self, seed: int) -> Tensor:
        """`[B, H, rows, pitch]`: zero where a row sees no key, NaN where nothing is stored."""
        shape = self.batch, self.heads, self.rows, self.pitch
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        return x.where(self.seen(), 0).where(self.stored(), float("nan"))

    def gradient(self) -> Tensor:
        """As `scores`, times the loss scale."""
        return (self.scores(2) * self.scale_of_rows()).to(self.dtype)
