"""The forward's kernels in which heads meet against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_heads import emulated_heads  # noqa: F401
from kernel_inputs import DEVICE, poison_memory
from mta_chunk_case import ChunkCase, convolve_exactly
from planted_faults import plant
from torch import Tensor

from mta_kernels.multi_token_attention.heads_cuda import forward, plan
from mta_kernels.operation import Convolution

ON_GPU = DEVICE == "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
TAPS = Convolution(6, 11, 5)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels run, in the emulator, where there is no GPU; what nobody writes is NaN."""
    poison_memory(monkeypatch)
    return SimpleNamespace(seed=0) if ON_GPU else request.getfixturevalue("emulated_heads")


@dataclass(frozen=True)
class Case(ChunkCase):
    """A chunk whose heads are mixed."""

    heads: int = 3
    conv: Convolution = TAPS
    magnitude: float = 1.0
    sizes: plan.WalkSizes | None = None

    def mix(self, seed: int) -> Tensor:
        noise = torch.randn(self.heads, self.heads, generator=torch.Generator().manual_seed(seed))
        return (torch.eye(self.heads) + 0.3 * noise).to(self.dtype)

    def taps(self, seed: int) -> Tensor:
        taps = torch.randn(self.heads, *self.conv.taps, generator=torch.Generator().manual_seed(seed))
        return (0.3 * taps).to(self.dtype)

    def convolved(self, x: Tensor, taps: Tensor) -> Tensor:
        """Of each document alone, zero where a key is not seen, as rounded; in float64."""
        out = torch.zeros_like(x, dtype=torch.float64)
        known = x.double().where(self.seen(), 0)
        for number in range(-1, len(self.bounds) + 1):
            rows = (self.row_documents() == number)[:, None]
            out += convolve_exactly(known.where(rows, 0), taps, self.conv).where(rows & self.seen(), 0)
        return out.to(self.dtype).double()


def factors_of(case: Case, stored: Tensor) -> Tensor:
    """`[B, H, rows, units]` of what `pre_heads` returns, in float64."""
    if case.dtype == FP16:
        factors = stored.cpu().view(torch.float32).double()
    else:
        factors = stored.cpu().view(BF16).unflatten(-1, (-1, 2)).double().sum(-1)
    return factors.permute(0, 3, 2, 1)


def check(case: Case) -> list[Tensor]:
    eps, seen = torch.finfo(case.dtype).eps, case.seen()
    scores = case.scores(1) * case.magnitude
    nothing = torch.full_like(scores, torch.nan)
    logsumexp = torch.full((case.batch, case.heads, case.queries), torch.nan, device=DEVICE)
    kept, x = nothing.to(DEVICE, copy=True), scores.to(DEVICE)
    factors = forward.pre_heads(
        x, case.taps(2).to(DEVICE), case.conv, case.mix(3).to(DEVICE), kept, logsumexp, case.where(), above=case.above,
        owned=case.owned, sizes=case.sizes,
    )  # fmt: skip
    assert torch.equal(x.cpu().nan_to_num(9), scores.nan_to_num(9))
    logits = torch.einsum("hg,bgij->bhij", case.mix(3).double(), case.convolved(scores, case.taps(2)))
    exact = logits.where(seen, -torch.inf).logsumexp(-1)
    want = (logits - exact.nan_to_num(0, 0, 0)[..., None]).exp().where(seen, 0)
    of_keys = factors_of(case, factors)
    got = kept.cpu().double() * of_keys.repeat_interleave(case.pitch // of_keys.shape[-1], -1)
    assert (got - want).where(seen, 0).abs().max() <= 4 * eps * want.abs().max() * max(1, case.magnitude), case
    assert kept.cpu()[~case.stored().expand_as(kept)].isnan().all(), case
    rows = torch.arange(case.above, case.above + case.owned)
    query = rows + case.first_row
    inside = (query >= 0) & (query < case.queries)
    others = torch.ones(case.queries, dtype=torch.bool)
    others[query[inside]] = False
    assert logsumexp.cpu()[..., others].isnan().all()
    found, wanted = logsumexp.cpu()[..., query[inside]].double(), exact[..., rows[inside]]
    assert (found - wanted).abs().max() <= eps * (1 + wanted.abs().max())

    out = nothing.to(DEVICE, copy=True)
    forward.post_heads(
        kept, factors, case.taps(4).to(DEVICE), case.conv, case.mix(5).to(DEVICE), out, case.where(), sizes=case.sizes
    )
    p = got.where(seen, 0).to(case.dtype)  # sums of those as stored are one
    assert (p.double().sum(-1) - 1)[..., seen.any(-1)].abs().max() <= eps
    want = torch.einsum("gh,bgij->bhij", case.mix(5).double(), case.convolved(p, case.taps(4)))
    got = out.cpu().double()
    assert (got - want).where(case.stored(), 0).abs().max() <= 2 * eps * want.abs().max(), case
    assert (got[(case.stored() & ~seen).expand_as(got)] == 0).all()
    assert got[~case.stored().expand_as(got)].isnan().all()
    return [x.cpu().nan_to_num(9) for x in (kept, logsumexp, out)]


@pytest.mark.parametrize(("causal", "dtype"), [(True, BF16), (False, FP16)])
def test_a_chunk(gpu, causal: bool, dtype: torch.dtype) -> None:
    check(Case(causal=causal, dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 2, "heads": 2, "keys": 130, "queries": 40, "rows": 40, "first_row": 0, "above": 0, "owned": 40},
        {"heads": 1, "keys": 700, "queries": 700, "first_row": 560, "rows": 60, "above": 10, "owned": 40},
        {"keys": 300, "queries": 300, "first_row": 240, "rows": 70, "above": 10, "owned": 50, "causal": False},
        {"heads": 16, "keys": 140, "queries": 140, "first_row": 100, "rows": 40, "above": 10, "owned": 20},
        {"keys": 1, "queries": 1, "first_row": -10, "rows": 21, "above": 10, "owned": 1},
    ],
    ids=str,
)
def test_where_a_chunk_is(gpu, shape: dict[str, Any]) -> None:
    """Queries later than keys, far from the diagonal, beyond the last query, of all heads, of one key."""
    check(Case(**shape))


@pytest.mark.parametrize(("bounds", "causal"), [((30, 31, 34, 90), True), ((125, 131), False)])
def test_documents(gpu, causal: bool, bounds: tuple[int, ...]) -> None:
    check(Case(bounds=bounds, causal=causal, heads=2, first_row=20, rows=120, owned=100))


@pytest.mark.parametrize("taps", [Convolution(1, 1, 0), Convolution(3, 8, 0), Convolution(8, 17, 8)], ids=str)
def test_taps(gpu, taps: Convolution) -> None:
    check(Case(conv=taps, heads=2, rows=80, owned=60))


def test_any_sizes(gpu) -> None:
    shape: dict[str, Any] = {"keys": 400, "queries": 400, "first_row": 330, "rows": 60, "owned": 50, "heads": 2}
    check(Case(**shape, sizes=plan.WalkSizes(20, 3, 2, 1, 128)))
    check(Case(**shape, sizes=plan.WalkSizes(300, 2, 3, 5, 64), bounds=(350,)))
    check(Case(**shape, sizes=plan.HOPPER_WALKS["pre"]))


@pytest.mark.parametrize(("dtype", "magnitude"), [(BF16, 60), (FP16, 12), (BF16, 2**31), (BF16, 2**40)])
def test_logits_far_apart(gpu, dtype: torch.dtype, magnitude: float) -> None:
    """Sums over a unit's first logit would overflow, in float32 or in fp16; the digits of a logit are worth 256 and more."""
    check(Case(dtype=dtype, magnitude=magnitude, keys=300, queries=300, first_row=200, rows=60, owned=40))


def test_the_order_of_threads_changes_nothing(gpu) -> None:
    case, results = Case(bounds=(40,), heads=2, rows=80, owned=60), []
    for gpu.seed in (0, 1, 2):
        results.append(check(case))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("walk.cuh", "            block_sync(full(number), THREADS);", ""),
        ("walk.cuh", "if (number >= TILES) block_sync(empty(number), THREADS);", ""),
        ("walk.cuh", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        ("pre.cu", "if (unit.whole) return;", "return;"),
        ("pre.cu", "    __syncthreads();", ""),
        ("post.cu", "if (!Whole) p[i] =", "if (false) p[i] ="),
        ("post.cu", "coming = factor_of(first);", "coming = 0;"),
    ],
    ids=["not full", "not empty", "no wait", "unseen exponentials", "pieces", "unseen", "first factors"],
)
def test_faults_are_found(gpu, monkeypatch, tmp_path, name: str, line: str, instead: str) -> None:
    plant(monkeypatch, plan, tmp_path / "heads", name, line, instead)

    def check_orders() -> None:
        for gpu.seed in range(4):
            check(Case(keys=300, queries=300, first_row=170, rows=80, owned=60, bounds=(187, 190)))

    with pytest.raises(AssertionError):
        check_orders()


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("walk.cuh", "store_zeros(args, behind, out);", "break;"),
        ("walk.cuh", "key_tile += args.blocks,", "key_tile += args.blocks + 1,"),
    ],
    ids=["no zeros", "tasks left out"],
)
def test_faults_between_tasks_are_found(gpu, monkeypatch, tmp_path, name: str, line: str, instead: str) -> None:
    plant(monkeypatch, plan, tmp_path / "heads", name, line, instead)
    shape: dict[str, Any] = {"keys": 400, "queries": 400, "first_row": 330, "rows": 60, "owned": 50, "heads": 2}

    def check_orders() -> None:
        for gpu.seed in range(4):
            check(Case(**shape, sizes=plan.WalkSizes(20, 3, 2, 1, 128)))

    with pytest.raises(AssertionError):
        check_orders()


@pytest.mark.gpu
def test_a_long_chunk(gpu) -> None:
    case = Case(batch=2, heads=16, keys=1500, queries=1500, first_row=500, rows=800, above=10, owned=780)
    check(case)
    check(dataclasses.replace(case, bounds=(613, 614, 900), dtype=FP16, heads=10))
