"""Kernels of stored scores in bfloat16, against float64: on a GPU, else in the emulator.

`tests/conformance` runs all kernels of stored scores by public functions. These need a GPU for bfloat16, which Triton's
interpreter lacks; and only its range holds logits as far apart. What a logsumexp was rounded by shows in no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from emulators import (
    emulated_bands,  # noqa: F401
    emulated_heads,  # noqa: F401
)
from kernel_inputs import DEVICE, poison_memory
from torch import Tensor

from mta_kernels.multi_token_attention.bands_cuda import BandsGradient
from mta_kernels.multi_token_attention.bands_cuda.bands import BandRows
from mta_kernels.multi_token_attention.heads_cuda import HeadMixings, heads
from mta_kernels.operation import Convolution

BF16, FP16 = torch.bfloat16, torch.float16
TAPS = Convolution(6, 11, 5)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels run, in the emulator, where there is no GPU; what nobody writes is NaN."""
    poison_memory(monkeypatch)
    return SimpleNamespace() if DEVICE == "cuda" else request.getfixturevalue("emulated_heads")


@dataclass(frozen=True)
class Case:
    """Rows `first_row` to `first_row + rows` of scores, of as many queries as keys."""

    heads: int = 3
    keys: int = 200
    first_row: int = -10
    rows: int = 150
    above: int = 10
    owned: int = 130
    causal: bool = True
    bounds: tuple[int, ...] = ()  # first positions of documents after the first
    dtype: torch.dtype = BF16
    magnitude: float = 1.0
    conv: Convolution = TAPS

    @property
    def pitch(self) -> int:
        return -(-(min(self.first_row + self.rows, self.keys) if self.causal else self.keys) // 128) * 128

    def document(self) -> Tensor:
        """Of each position."""
        return torch.searchsorted(torch.tensor([0, *self.bounds, self.keys]), torch.arange(self.keys), right=True) - 1

    def where(self) -> BandRows:
        documents = None
        if self.bounds:
            bounds, number = torch.tensor([0, *self.bounds, self.keys]), self.document()
            documents = torch.stack([bounds[number], bounds[number + 1]]).to(DEVICE, torch.int32)
        return BandRows(self.first_row, self.first_row, self.keys, self.keys, self.causal, documents, None)

    def row_documents(self) -> Tensor:
        """Of each row; -1 where it is no query."""
        row = torch.arange(self.rows) + self.first_row
        return torch.where((row >= 0) & (row < self.keys), self.document()[row.clamp(0, self.keys - 1)], -1)

    def seen(self) -> Tensor:
        """`[rows, pitch]`."""
        key, row = torch.arange(self.pitch), torch.arange(self.rows)[:, None] + self.first_row
        document = F.pad(self.document(), (0, max(0, self.pitch - self.keys)), value=-2)[: self.pitch]
        seen = self.row_documents()[:, None] == document
        return seen & (key <= row) if self.causal else seen

    def stored(self) -> Tensor:
        """`[rows, pitch]`: to the end of the block that has the key 127 behind a row's own."""
        if not self.causal:
            return torch.ones(self.rows, self.pitch, dtype=torch.bool)
        row = torch.arange(self.rows)[:, None] + self.first_row
        return torch.arange(self.pitch) < ((row + 127).clamp_min(-1) + 128) // 128 * 128

    def normal(self, seed: int, *shape: int) -> Tensor:
        return torch.randn(self.heads, *shape, generator=torch.Generator().manual_seed(seed))

    def scores(self, seed: int = 1) -> Tensor:
        """`[1, H, rows, pitch]`: zero where a row sees no key, NaN where nothing is stored."""
        x = (self.normal(seed, self.rows, self.pitch)[None] * self.magnitude).to(self.dtype)
        return x.where(self.seen(), 0).where(self.stored(), float("nan"))

    def mix(self, seed: int) -> Tensor:
        return (torch.eye(self.heads) + 0.3 * self.normal(seed, self.heads)).to(self.dtype)

    def taps(self, seed: int) -> Tensor:
        return (0.3 * self.normal(seed, *self.conv.taps)).to(self.dtype)

    def convolved(self, x: Tensor, taps: Tensor) -> Tensor:
        """Of each document alone, zero where a key is not seen; in float64."""
        conv, out = self.conv, torch.zeros_like(x, dtype=torch.float64)
        for number in range(-1, len(self.bounds) + 1):
            rows = (self.row_documents() == number)[:, None]
            of_rows = x.double().where(self.seen() & rows, 0)
            padded = F.pad(of_rows, (conv.pad, conv.key_taps - 1 - conv.pad, conv.query_taps - 1, 0)).to(DEVICE)
            found = F.conv2d(padded, taps[:, None].to(DEVICE, torch.float64), groups=self.heads).cpu()
            out = out + found.where(rows & self.seen(), 0)
        return out

    def rounded(self, x: Tensor, taps: Tensor) -> Tensor:
        return self.convolved(x, taps).to(self.dtype).double()


def factors_of(case: Case, stored: Tensor) -> Tensor:
    """`[1, H, rows, units]` of what `pre_heads` returns, in float64."""
    if case.dtype == FP16:
        factors = stored.cpu().view(torch.float32).double()
    else:
        factors = stored.cpu().view(BF16).unflatten(-1, (-1, 2)).double().sum(-1)
    return factors.permute(0, 3, 2, 1)


def check(case: Case) -> None:
    eps, seen, scores = torch.finfo(case.dtype).eps, case.seen(), case.scores()
    nothing = torch.full_like(scores, torch.nan)
    logsumexp = torch.full((1, case.heads, case.keys), torch.nan, device=DEVICE)
    kept, x = nothing.to(DEVICE, copy=True), scores.to(DEVICE)
    factors = heads.pre_heads(
        x, case.taps(2).to(DEVICE), case.conv, case.mix(3).to(DEVICE), kept, logsumexp, case.where(), above=case.above,
        owned=case.owned,
    )  # fmt: skip
    assert torch.equal(x.cpu().nan_to_num(9), scores.nan_to_num(9))
    logits = torch.einsum("hg,bgij->bhij", case.mix(3).double(), case.rounded(scores, case.taps(2)))
    exact = logits.where(seen, -torch.inf).logsumexp(-1)
    want = (logits - exact.nan_to_num(0, 0, 0)[..., None]).exp().where(seen, 0)
    of_keys = factors_of(case, factors)
    got = kept.cpu().double() * of_keys.repeat_interleave(case.pitch // of_keys.shape[-1], -1)
    assert (got - want).where(seen, 0).abs().max() <= 4 * eps * want.abs().max() * max(1, case.magnitude), case
    assert kept.cpu()[~case.stored().expand_as(kept)].isnan().all(), case
    rows = torch.arange(case.above, case.above + case.owned)
    rows = rows[(rows + case.first_row >= 0) & (rows + case.first_row < case.keys)]
    query = rows + case.first_row
    others = torch.ones(case.keys, dtype=torch.bool).index_fill(0, query, False)
    assert logsumexp.cpu()[..., others].isnan().all()
    found, wanted = logsumexp.cpu()[..., query].double(), exact[..., rows]
    assert (found - wanted).abs().max() <= eps * (1 + wanted.abs().max())

    out = nothing.to(DEVICE, copy=True)
    heads.post_heads(kept, factors, case.taps(4).to(DEVICE), case.conv, case.mix(5).to(DEVICE), out, case.where())
    p = got.where(seen, 0).to(case.dtype)  # sums of those as stored are one
    assert (p.double().sum(-1) - 1)[..., seen.any(-1)].abs().max() <= eps
    want = torch.einsum("gh,bgij->bhij", case.mix(5).double(), case.rounded(p, case.taps(4)))
    got = out.cpu().double()
    assert (got - want).where(case.stored(), 0).abs().max() <= 2 * eps * want.abs().max(), case
    assert (got[(case.stored() & ~seen).expand_as(got)] == 0).all()
    assert got[~case.stored().expand_as(got)].isnan().all()


@pytest.mark.parametrize(("bounds", "causal"), [((), True), ((125, 131), False)])
def test_a_chunk(gpu, bounds: tuple[int, ...], causal: bool) -> None:
    check(Case(bounds=bounds, causal=causal))


@pytest.mark.parametrize(("dtype", "magnitude"), [(BF16, 60), (FP16, 12), (BF16, 2**31), (BF16, 2**40)])
def test_logits_far_apart(gpu, dtype: torch.dtype, magnitude: float) -> None:
    """Sums over a unit's first logit overflow in float32 or fp16; the last digit of a logit is worth 256 and more."""
    check(Case(dtype=dtype, magnitude=magnitude, keys=300, first_row=200, rows=60, owned=40))


def test_gradients_of_logits(gpu) -> None:
    """By a logsumexp that is rounded, and what it was rounded by."""
    case = Case()
    x, grad, pre = case.scores(), case.scores(2), case.mix(3)
    known, eps = x.double().where(case.seen(), 0), torch.finfo(BF16).eps
    logits = torch.einsum("hg,bgij->bhij", pre.double(), known)
    exact = logits.where(case.seen(), -torch.inf).logsumexp(-1)
    rounded = (exact * 16).ceil() / 16
    residual = (exact - rounded).nan_to_num(0, 0, 0).float()
    query = torch.arange(case.rows) + case.first_row
    inside = query >= 0
    logsumexp = torch.full((1, case.heads, case.keys), torch.nan)
    logsumexp[..., query[inside]] = rounded[..., inside].float()
    delta = case.normal(6, case.rows)[None]
    kernels = HeadMixings(
        pre.to(DEVICE), case.mix(5).to(DEVICE), case.taps(4).to(DEVICE), case.conv, BF16, 1, [(case.rows, case.pitch)]
    )
    got = grad.to(DEVICE, copy=True)
    of_rows = (t.to(DEVICE) for t in (logsumexp, residual, delta))
    kernels.differentiate(x.to(DEVICE), got, *of_rows, case.where(), above=case.above, owned=case.owned)
    p = (logits - exact.nan_to_num(0, 0, 0)[..., None]).exp().where(case.seen(), 0)
    dl = (p * (grad.double() - delta.double()[..., None])).where(case.seen(), 0)
    want = torch.einsum("hg,bhij->bgij", pre.double(), dl)
    assert (got.cpu().double() - want).where(case.stored(), 0).abs().max() <= 2 * eps * want.abs().max()
    own = slice(case.above, case.above + case.owned)
    want = torch.einsum("bhij,bgij->hg", dl[:, :, own], known[:, :, own])
    assert (kernels.dpre().cpu().double() - want).abs().max() <= 2 * eps * want.abs().max()


def test_gradients_of_taps(gpu, request: pytest.FixtureRequest) -> None:
    """A task of rows that see none of its keys has what rows below it give."""
    if DEVICE == "cpu":
        request.getfixturevalue("emulated_bands")
    case = Case(keys=300, first_row=100, bounds=(187, 190))
    x, grad, taps = case.scores(), case.scores(2), case.taps(4)
    gradients = BandsGradient(taps.to(DEVICE), case.conv, BF16, True, True, 1, [(case.rows, case.pitch)], delta=True)
    dx, own = torch.empty_like(x).to(DEVICE), {"above": case.above, "owned": case.owned}
    gradients.add(x.to(DEVICE), grad.to(DEVICE), dx, case.where(), **own)
    leaf, row = taps.double().requires_grad_(), torch.arange(case.rows)[:, None]
    owned = (row >= case.above) & (row < case.above + case.owned)
    (want,) = torch.autograd.grad(case.convolved(x, leaf), leaf, grad.double().where(owned & case.seen(), 0))
    assert (gradients.dtaps().cpu() - want).norm() <= 1e-5 * want.norm()
