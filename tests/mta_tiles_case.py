"""A chunk of stored scores for the tile kernels, and what float64 PyTorch makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from mta_chunk_case import convolve_exactly
from torch import Tensor

from mta_kernels.multi_token_attention.tiles_cuda import post_tiles, pre_tiles
from mta_kernels.operation import Convolution

NAN = float("nan")
TAPS = Convolution(6, 11, 5)


@dataclass(frozen=True)
class Case:
    """Queries are the last `queries` of `keys` positions; the chunk is `rows` of them from `first_row` on."""

    batch: int = 1
    heads: int = 3
    keys: int = 50
    queries: int = 50
    first_row: int = 0
    rows: int = 50
    pre: Convolution | None = TAPS
    post: Convolution | None = TAPS
    pre_mix: bool = True
    post_mix: bool = True
    causal: bool = True
    bounds: tuple[int, ...] = ()  # first positions of documents after the first
    dtype: torch.dtype = torch.bfloat16
    magnitude: float = 1.0
    zero_block: int = 128
    spare: int = 0  # columns of the stored rows beyond those that are needed
    blank: int = 0  # stored rows above the first that are no queries
    seed: int = 0

    @property
    def above(self) -> tuple[int, int]:
        """Rows above the chunk's of which logits, and scores, are stored: as far as there are queries."""
        after = min(self.first_row, self.post.query_taps - 1 if self.post else 0)
        return after, min(self.first_row, after + (self.pre.query_taps - 1 if self.pre else 0))

    @property
    def pitch(self) -> int:
        """Columns of the stored rows."""
        end = self.first_position + self.rows if self.causal else self.keys
        return -(-end // 8) * 8 + self.spare

    @property
    def first_position(self) -> int:
        return self.keys - self.queries + self.first_row

    def documents(self, device: str) -> Tensor | None:
        if not self.bounds:
            return None
        bounds = torch.tensor([0, *self.bounds, self.keys])
        number = torch.searchsorted(bounds, torch.arange(self.keys), right=True) - 1
        return torch.stack([bounds[number], bounds[number + 1]]).to(device, torch.int32)

    def seen(self, position: Tensor) -> Tensor:
        """`[rows, keys]`: whether the rows at these positions see each key."""
        key = torch.arange(self.keys)
        seen = (key <= position[:, None]) if self.causal else torch.ones(len(position), self.keys, dtype=torch.bool)
        documents = self.documents("cpu")
        if documents is not None:
            seen = seen & (key >= documents[0, position][:, None]) & (key < documents[1, position][:, None])
        return seen

    def tensors(self) -> dict[str, Tensor | None]:
        """Scores `[B, H, queries, keys]` of all queries, and mixers, of this dtype."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def weight(conv: Convolution | None) -> Tensor | None:
            if conv is None:
                return None
            found = normal(self.heads, *conv.taps) * 0.2
            found[:, -1, conv.pad] += 1
            return found.to(self.dtype)

        def mix(wanted: bool) -> Tensor | None:
            return (normal(self.heads, self.heads) * 0.3 + torch.eye(self.heads)).to(self.dtype) if wanted else None

        scores = (normal(self.batch, self.heads, self.queries, self.keys) * self.magnitude).to(self.dtype)
        return {
            "scores": scores, "pre_conv": weight(self.pre), "pre_mix": mix(self.pre_mix),
            "post_conv": weight(self.post), "post_mix": mix(self.post_mix),
        }  # fmt: skip


def convolved(x: Tensor, weight: Tensor | None, conv: Convolution | None) -> Tensor:
    """`x [B, H, rows, keys]` with zeros outside."""
    return x if conv is None or weight is None else convolve_exactly(x, weight, conv)


def definition(case: Case, given: dict[str, Tensor | None], dtype: torch.dtype, stop: int) -> tuple[Tensor, ...]:
    """Mixed probabilities and logsumexp of the rows up to `stop`, by documents, each step rounded to `dtype`.

    On the device of what is given: a CPU takes seconds to convolve long rows in float64.
    """
    scores = given["scores"].to(dtype)
    device = scores.device
    batch, heads, _, keys = scores.shape
    bounds = [0, *case.bounds, keys]
    out = torch.zeros(batch, heads, stop, keys, dtype=dtype, device=device)
    logsumexp = torch.full((batch, heads, stop), -float("inf"), dtype=torch.float64, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    for first, last in pairwise(bounds):
        rows = slice(max(first - (keys - case.queries), 0), min(last - (keys - case.queries), stop))
        if rows.start >= rows.stop:
            continue
        seen = case.seen(torch.arange(rows.start, rows.stop) + keys - case.queries)[:, first:last].to(device)
        x = scores[:, :, rows, first:last].where(seen, 0)
        x = convolved(x, given["pre_conv"], case.pre)
        if given["pre_mix"] is not None:
            x = torch.einsum("hg,bgij->bhij", given["pre_mix"].to(dtype), x)
        x = x.where(seen, -float("inf"))
        logsumexp[:, :, rows] = torch.logsumexp(x.double(), -1)
        p = torch.softmax(x, -1, dtype=wide).to(dtype)
        p = convolved(p, given["post_conv"], case.post).where(seen, 0)
        if given["post_mix"] is not None:
            p = torch.einsum("bgij,gh->bhij", p, given["post_mix"].to(dtype))
        out[:, :, rows, first:last] = p
    return out, logsumexp


def forward_chunk(case: Case, given: dict[str, Tensor | None], device: str, **plans) -> tuple[Tensor, Tensor]:
    """A chunk as a pipeline would run it: `out [B, H, rows, pitch]` and logsumexp `[B, H, rows]`.

    Scores that are not seen, and all that nobody has written, are NaN.
    """
    after, before = case.above
    first, stop = case.first_row - before, case.first_row + case.rows
    shape, columns, blank = (case.batch, case.heads), min(case.keys, case.pitch), case.blank
    scores = torch.full((*shape, blank + stop - first, case.pitch), NAN, dtype=case.dtype)
    position = torch.arange(first, stop) + case.keys - case.queries
    all_scores = given["scores"][:, :, first:stop, :columns].cpu()
    # As q k^T gives, or skips.
    scores[:, :, blank:, :columns] = all_scores.where(case.seen(position)[:, :columns], NAN)
    scores = scores.to(device)
    logits = torch.full((*shape, blank + after + case.rows, case.pitch), NAN, dtype=case.dtype, device=device)
    out = torch.full((*shape, case.rows, case.pitch), NAN, dtype=case.dtype, device=device)
    logsumexp = torch.full((*shape, blank + after + case.rows + 3), NAN, device=device)[..., 3:]
    mixers = {name: None if x is None else x.to(device) for name, x in given.items() if name != "scores"}
    where = {
        "keys": case.keys, "causal": case.causal, "first_query": case.keys - case.queries,
        "documents": case.documents(device),
    }  # fmt: skip
    statistics = pre_tiles(
        scores, mixers["pre_conv"], case.pre.pad if case.pre else 0, mixers["pre_mix"], logits, logsumexp,
        above=before - after, first_position=case.first_position - after - blank, plan=plans.get("pre_plan"), **where,
    )  # fmt: skip
    post_tiles(
        logits, statistics, mixers["post_conv"], case.post.pad if case.post else 0, mixers["post_mix"], out,
        above=after + blank, first_position=case.first_position, zero_block=case.zero_block,
        plan=plans.get("post_plan"), **where,
    )  # fmt: skip
    return out, logsumexp[:, :, blank + after :]


def error(got: Tensor, want: Tensor) -> Tensor:
    """Of each head, relative."""
    difference = (got.double() - want.double()).transpose(0, 1).flatten(1).norm(dim=1)
    return difference / want.double().transpose(0, 1).flatten(1).norm(dim=1).clamp_min(1e-300)


def check(case: Case, device: str, **plans) -> tuple[Tensor, Tensor]:
    """Run a case and compare it with float64, and with eager's own error."""
    given = case.tensors()
    got, logsumexp = (x.cpu() for x in forward_chunk(case, given, device, **plans))
    stop = case.first_row + case.rows
    given = {name: None if x is None else x.to(device) for name, x in given.items()}
    want, want_sums = (x[:, :, case.first_row :].cpu() for x in definition(case, given, torch.float64, stop))
    eager, eager_sums = (x[:, :, case.first_row :].cpu() for x in definition(case, given, case.dtype, stop))
    columns = min(case.keys, case.pitch)
    assert not want[..., columns:].any()
    want, eager = want[..., :columns], eager[..., :columns]
    eps = torch.finfo(case.dtype).eps
    allowed = 2 * error(eager, want) + eps
    found = error(got[..., :columns].nan_to_num(0), want)
    assert (found <= allowed).all(), (case, found, allowed)
    worst = 2 * (eager_sums - want_sums).abs().max() + 4 * eps
    assert (logsumexp.double() - want_sums).abs().max() <= worst, (case, logsumexp, want_sums)
    # Zeros where nothing is seen, as far as a product reads; beyond, whatever was there.
    row = torch.arange(case.rows)
    block = case.zero_block
    below = case.first_position + row // block * block + block
    end = (-(-below // block) * block).clamp_max(case.pitch) if case.causal else torch.full_like(row, case.pitch)
    read = torch.arange(case.pitch) < end[:, None]
    seen = F.pad(case.seen(case.first_position + row)[:, :columns], (0, case.pitch - columns))
    assert (got.where(read & ~seen, 0) == 0).all(), case
    return got, logsumexp
