"""The kernels in which heads of stored numbers meet against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_heads import emulated_heads  # noqa: F401
from kernel_inputs import DEVICE, poison_memory
from mta_chunk_case import ChunkCase, convolve_exactly
from planted_faults import plant
from torch import Tensor

from mta_kernels.multi_token_attention.bands_cuda import plan as bands
from mta_kernels.multi_token_attention.heads_cuda import HeadMixings, heads, plan, rebuild_probabilities
from mta_kernels.multi_token_attention.heads_cuda.heads import shape_unsupported
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution

ON_GPU = DEVICE == "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
TAPS = Convolution(6, 11, 5)
H100 = 227 * 1024  # bytes of shared memory that a block may have


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels run, in the emulator, on one multiprocessor, where there is no GPU; what nobody writes is NaN."""
    poison_memory(monkeypatch)
    if ON_GPU:
        return SimpleNamespace()
    monkeypatch.setattr(heads, "sm_count", lambda device: 1)
    return request.getfixturevalue("emulated_heads")


@dataclass(frozen=True)
class Case(ChunkCase):
    """A chunk whose heads are mixed."""

    heads: int = 3
    conv: Convolution = TAPS
    tiles: plan.Sizes | None = None
    sizes: plan.WalkSizes | None = None

    def mixings(self) -> tuple[Tensor, Tensor]:
        noise = torch.randn(2, self.heads, self.heads, generator=torch.Generator().manual_seed(5))
        pre, post = (torch.eye(self.heads) + 0.3 * noise).to(self.dtype)
        return pre, post

    def taps(self) -> Tensor:
        taps = torch.randn(self.heads, *self.conv.taps, generator=torch.Generator().manual_seed(3))
        return (0.3 * taps).to(self.dtype)

    def known(self, x: Tensor) -> Tensor:
        """In float64, zeros where nothing is stored."""
        return x.double().where(self.stored(), 0)

    def mixed(self, x: Tensor, weights: Tensor) -> Tensor:
        """By `weights [H, H]` (out, in), in float64."""
        return torch.einsum("hg,bgij->bhij", weights.double(), self.known(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.mixed(x, self.mixings()[0])

    def logsumexp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, H, M]`, rounded up to 1 / 16, NaN but for the chunk's queries; and what it is less than that."""
        exact = self.logits(x).where(self.seen(), -torch.inf).logsumexp(-1)
        rounded = (exact * 16).ceil() / 16
        of_all = torch.full((self.batch, self.heads, self.queries), torch.nan)
        query = torch.arange(self.rows) + self.first_row
        inside = (query >= 0) & (query < self.queries)
        of_all[:, :, query[inside]] = rounded[:, :, inside].float()
        return of_all, (exact - rounded).float()

    def probabilities(self, x: Tensor, *less: Tensor) -> Tensor:
        """Of `x`, with each of `less [B, H, rows]` taken from the logits, in float64."""
        logits = self.logits(x)
        for number in less:
            logits = logits - number.double()[..., None]
        return logits.exp().where(self.seen(), 0)

    def of_rows(self, of_all: Tensor) -> Tensor:
        """`[B, H, M]` of all queries to `[B, H, rows]`."""
        return of_all[:, :, (torch.arange(self.rows) + self.first_row).clamp(0, self.queries - 1)]

    def convolved(self, x: Tensor) -> Tensor:
        """Of each document alone, zero where a key is not seen, as rounded; in float64."""
        out = torch.zeros_like(x, dtype=torch.float64)
        for number in range(-1, len(self.bounds) + 1):
            rows = (self.row_documents() == number)[:, None]
            known = self.known(x).where(rows, 0)
            out += convolve_exactly(known, self.taps(), self.conv).where(rows & self.seen(), 0)
        return out.to(self.dtype).double()

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """`sum left[g] right[h]` over the owned rows, `[H, H]`."""
        row = torch.arange(self.rows)[:, None]
        owned = (row >= self.above) & (row < self.above + self.owned)
        left, right = (self.known(t).where(owned, 0) for t in (left, right))
        return torch.einsum("bgij,bhij->gh", left, right)

    def kernels(self) -> HeadMixings:
        pre, post = (mix.to(DEVICE) for mix in self.mixings())
        every = {name: self.tiles for name in plan.TILES} if self.tiles else None
        return HeadMixings(
            pre, post, self.taps().to(DEVICE), self.conv, self.dtype, self.batch, [(self.rows + 200, self.pitch + 128)],
            tiles=every, heads=self.sizes,
        )  # fmt: skip

    def own(self) -> dict[str, int]:
        return {"above": self.above, "owned": self.owned}


def near(case: Case, got: Tensor, want: Tensor, eps: float) -> None:
    assert (got.cpu().double() - want).abs().max() <= eps * want.abs().max() + 1e-6, case


def check_stored(case: Case, got: Tensor, want: Tensor, before: Tensor, eps: float) -> None:
    """`got` is near to `want` where something is stored, and as before elsewhere."""
    got, stored = got.cpu(), case.stored()
    near(case, case.known(got), want, eps)
    assert torch.equal(got.where(~stored, 0).nan_to_num(9), before.where(~stored, 0).nan_to_num(9)), case


def check_probabilities(case: Case) -> list[Tensor]:
    x, nothing = case.scores(1), torch.full_like(case.scores(1), torch.nan)
    logsumexp, _ = case.logsumexp(x)
    of_x, out = x.to(DEVICE), nothing.to(DEVICE)
    sums, keys = case.kernels().probabilities(of_x, out, logsumexp.to(DEVICE), case.where())
    assert torch.equal(of_x.cpu().nan_to_num(9), x.nan_to_num(9))
    eps = torch.finfo(case.dtype).eps
    check_stored(case, out, case.probabilities(x, case.of_rows(logsumexp)), nothing, eps)
    return [out, check_sums(case, out, sums, keys, case.stored())]


def check_sums(case: Case, out: Tensor, sums: Tensor, keys: int, written: Tensor) -> Tensor:
    """Of `out`, of so many keys each, of which one is `written`; and zeros where out is stored and not seen."""
    assert (out.cpu()[(case.stored() & ~case.seen()).expand_as(out)] == 0).all()

    def parts(x: Tensor) -> Tensor:
        return F.pad(x, (0, -case.pitch % keys)).unflatten(-1, (-1, keys))

    sums = sums.cpu().where(parts(written).any(-1), 0)
    near(case, sums, parts(case.known(out.cpu())).sum(-1), 1e-5)
    return sums


def check_rebuilt(case: Case) -> list[Tensor]:
    x, nothing = case.scores(1), torch.full_like(case.scores(1), torch.nan)
    eps, want = torch.finfo(case.dtype).eps, case.convolved(x)
    logsumexp, _ = case.logsumexp(want.to(case.dtype))
    of_x, convolved, out = x.to(DEVICE), nothing.to(DEVICE, copy=True), nothing.to(DEVICE, copy=True)
    sums, keys = rebuild_probabilities(
        of_x, case.mixings()[0].to(DEVICE), convolved, out, logsumexp.to(DEVICE), case.where(),
        taps=case.taps().to(DEVICE), conv=case.conv, sizes=case.sizes,
    )  # fmt: skip
    assert torch.equal(of_x.cpu().nan_to_num(9), x.nan_to_num(9))
    check_stored(case, convolved, want, nothing, eps)
    exact = case.probabilities(convolved.cpu(), case.of_rows(logsumexp))
    check_stored(case, out, exact, nothing, eps)
    return [convolved, out, check_sums(case, out, sums, keys, case.seen())]


def check_convolution(case: Case) -> list[Tensor]:
    x, grad = case.scores(1), case.gradient()
    eps, (_, post), kernels = torch.finfo(case.dtype).eps, case.mixings(), case.kernels()
    nothing = torch.full_like(x, torch.nan)
    for _ in range(2):  # as of two chunks
        out, of_grad = nothing.to(DEVICE), grad.to(DEVICE, copy=True)
        kernels.convolve(x.to(DEVICE), out, of_grad, case.where(), **case.own())
    convolved = case.convolved(x)
    check_stored(case, out, case.mixed(convolved, post.T), nothing, 2 * eps)
    check_stored(case, of_grad, case.mixed(grad, post), grad, eps)
    near(case, kernels.dpost(), 2 * case.products(convolved, grad / case.scale_of_rows()), eps / 4)
    return [out, of_grad, kernels.dpost()]


def check_logits(case: Case) -> list[Tensor]:
    x, grad = case.scores(1), case.gradient()
    eps, (pre, _), kernels = torch.finfo(case.dtype).eps, case.mixings(), case.kernels()
    logsumexp, residual = case.logsumexp(x)
    delta = torch.randn(x.shape[:3], generator=torch.Generator().manual_seed(6))
    for _ in range(2):
        dx = grad.to(DEVICE, copy=True)
        of_rows = (t.to(DEVICE) for t in (logsumexp, residual, delta))
        kernels.differentiate(x.to(DEVICE), dx, *of_rows, case.where(), **case.own())
    p = case.probabilities(x, case.of_rows(logsumexp), residual)
    dl = (p * (case.known(grad) - delta.double()[..., None])).where(case.seen(), 0)
    eps *= 2
    check_stored(case, dx, case.mixed(dl, pre.T), grad, eps)
    near(case, kernels.dpre(), 2 * case.products(dl / case.scale_of_rows(), x), eps)
    return [dx, kernels.dpre()]


CHECKS = {
    "probabilities": check_probabilities, "heads": check_convolution, "logits": check_logits, "rebuild": check_rebuilt,
}  # fmt: skip


def check(case: Case) -> list[Tensor]:
    return [t.cpu().nan_to_num(9) for check_one in CHECKS.values() for t in check_one(case)]


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


@pytest.mark.parametrize("bounds", [(), (30, 31, 34, 90)])
def test_each_sequence_and_document_has_a_loss_scale(gpu, bounds: tuple[int, ...]) -> None:
    case = Case(batch=1 if bounds else 3, bounds=bounds, heads=2, dtype=FP16, scaled=True, rows=120, owned=100)
    check_convolution(case)
    check_logits(case)


@pytest.mark.parametrize("taps", [Convolution(1, 1, 0), Convolution(3, 8, 0), Convolution(8, 17, 8)], ids=str)
def test_taps(gpu, taps: Convolution) -> None:
    check_convolution(Case(conv=taps, heads=2, rows=80, owned=60))


def test_any_sizes(gpu) -> None:
    shape: dict[str, Any] = {"keys": 400, "queries": 400, "first_row": 330, "rows": 60, "owned": 50, "heads": 2}
    check(Case(**shape, tiles=plan.Sizes(64, 4, 3, 256), sizes=plan.WalkSizes(20, 3, 3, 5, 64)))
    check(Case(**shape, tiles=plan.Sizes(32, 2, 2, 128), sizes=plan.WalkSizes(300, 2, 2, 2, 64), bounds=(350,)))


def test_the_order_of_threads_changes_nothing(gpu) -> None:
    case, results = Case(bounds=(40,), heads=2, rows=80, owned=60), []
    for gpu.seed in (0, 1, 2):
        results.append(check(case))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("kernel", "name", "line", "instead"),
    [
        ("probabilities", "tiles.cuh", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        ("logits", "tiles.cuh", "stored_end(args, row));", "args.pitch);"),
        ("logits", "tiles.cuh", "        __syncwarp();\n        store(", "        store("),
        ("probabilities", "softmax.cuh", "Whole || seen.all(key, 1) ? p : 0;", "p;"),
        ("logits", "softmax.cuh", " - residual.numbers[half]", ""),
        ("logits", "logits.cu", "if (owned) {", "{"),
        ("heads", "heads.cu", "if (owned) {", "{"),
        ("heads", "walk.cuh", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        ("heads", "walk.cuh", "            block_sync(full(number), THREADS);", ""),
        ("heads", "heads.cu", "SLOTS = STAGES + TILES - 1,", "SLOTS = STAGES + TILES - 2,"),
        ("heads", "heads.cu", "if (unit.key >= stored_end(args, unit.row)) return;", ""),
        ("heads", "walk.cuh", "load_more(segment, before + turn,", "load_more(segment, turn,"),
        ("rebuild", "walk.cuh", "store_zeros(args, behind, out);", "break;"),
        ("rebuild", "walk.cuh", "            block_sync(full(number), THREADS);", ""),
        ("rebuild", "rebuild.cu", "if (!unit.whole && unit.key >= stored_end(args, unit.row)) return;", ""),
        ("rebuild", "rebuild.cu", "x = whole.value ||", "x = true ||"),
        ("rebuild", "rebuild.cu", "unit.key / UNIT", "unit.key / KEYS"),
        ("rebuild", "mixed.cuh", "load_matrices(pairs[i], tile + i * 32);", "load_matrices(pairs[i], tile);"),
    ],
    ids=["no wait", "unstored", "stored too early", "unseen", "residual", "not owned logits", "not owned heads",
         "no wait of heads", "no barrier", "few slots", "unstored heads", "slots of segments", "nothing behind",
         "no barrier of rebuilt", "unstored rebuilt", "unseen rebuilt", "sums of other keys", "convolved of one half"],
)  # fmt: skip
def test_faults_are_found(gpu, monkeypatch, tmp_path, kernel: str, name: str, line: str, instead: str) -> None:
    plant(monkeypatch, plan, tmp_path / "heads", name, line, instead)
    if "SLOTS" in instead:  # the host lays out as many
        monkeypatch.setattr(plan.WalkConstants, "shared_memory", property(slots_short))

    def check_orders() -> None:
        for gpu.seed in range(4):
            CHECKS[kernel](Case(keys=300, queries=300, first_row=170, rows=80, owned=60, bounds=(187, 190)))
            # A run's first rows are not stored to its end.
            CHECKS[kernel](Case(heads=2, sizes=plan.WalkSizes(300, 2, 2, 2, 64)))
            # Tasks whose last rows are stored behind the keys that they see.
            CHECKS[kernel](Case(heads=2, keys=400, queries=400, first_row=330, sizes=plan.WalkSizes(20, 2, 2, 2, 64)))

    with pytest.raises(AssertionError):
        check_orders()


def slots_short(constants: plan.WalkConstants) -> int:
    tile = constants.conv.query_taps * constants.heads * (bands.KEYS * 2 + 16)
    tiles = 2 * constants.sizes.tiles + constants.sizes.stages - 2
    return constants.heads * constants.of_a_head.shared_memory + tiles * tile


def test_what_cannot_be_is_told() -> None:
    def reason(limit: int, dtype: torch.dtype, heads: int, conv: Convolution, kernel: str = "heads") -> str | None:
        return shape_unsupported(limit, dtype, heads, {kernel: conv})

    assert reason(H100, BF16, 16, TAPS) is None
    assert "dtype torch.float32 is not float16 or bfloat16" in reason(H100, torch.float32, 16, TAPS)
    assert "9x11 taps are more than the 8x17" in reason(H100, BF16, 16, Convolution(9, 11, 5))
    assert "17 heads are more than the 16" in reason(H100, BF16, 17, TAPS)
    assert "185856 bytes of shared memory; a block may have 166912" in reason(163 * 1024, BF16, 16, TAPS)
    assert reason(163 * 1024, BF16, 16, TAPS, "pre") is None
    assert "133632 bytes of shared memory; a block may have 101376" in reason(99 * 1024, BF16, 16, TAPS, "post")


@pytest.mark.parametrize("name", ["probabilities", "logits", *plan.WALKS])
def test_it_compiles_with_hardly_a_spill(name: str) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    constants: plan.WalkConstants | plan.TileConstants
    if name in plan.WALKS:
        constants = plan.WalkConstants(name, BF16, 16, TAPS, True, False, plan.walk_sizes(name, (9, 0)))
    else:
        constants = plan.TileConstants(name, BF16, 16, True, False, plan.TILES[name])
    code, words = compiler.compile_source(constants.source("sm_90a"))
    assert code.startswith(b"\x7fELF")
    if "ptxas info" not in words:
        pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
    spills = [int(part.split()[-1]) for part in words.split(" bytes spill stores")[:-1]]
    assert max(spills) <= (16 if name in plan.WALKS else 0), words
    if isinstance(constants, plan.WalkConstants):  # who takes more than the block has waits for ever
        of_heads, mixers = (88 if constants.sizes.mixers == 8 else 104), constants.sizes.mixers
        used = max(int(part.split()[-1]) for part in words.split(" registers")[:-1])
        assert 16 * of_heads + mixers * 64 <= used * (16 + mixers), words


@pytest.mark.parametrize(
    ("name", "architecture", "heads"),
    [
        ("pre", "sm_80", 16),
        ("post", "sm_86", 10),
        ("post", "sm_100", 16),
        ("pre", "sm_120", 12),
        ("rebuild", "sm_80", 16),
    ],
)
def test_it_compiles_for_other_gpus(name: str, architecture: str, heads: int) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    constants = plan.WalkConstants(name, FP16, heads, TAPS, False, True, plan.WALKS[name])
    assert compiler.compile_source(constants.source(architecture))[0].startswith(b"\x7fELF")


def test_tasks_of_a_chunk_end_nearly_together() -> None:
    """On 132 multiprocessors, of rows that see up to 12298 keys; of few rows they are no longer than need be."""

    def rounds(run: int) -> int:
        ends = [min(first + run, 2068) for first in range(0, 2068, run)]
        return -(-sum(-(-(12298 - 2068 + end) // 128) for end in ends) // 132)

    run = plan.rows_of_even_tasks(103, 6, 2068, 12298, 97, 1, 132)
    assert (run + 5) % 6 == 0
    assert rounds(run) * (run + 5 + 9) < 0.95 * rounds(103) * (103 + 5 + 9)
    assert plan.rows_of_even_tasks(103, 6, 40, 40, 1, 1, 132) == 103
    assert plan.rows_of_even_tasks(103, 6, 2068, 0, 97, 1, 1 << 30) == 103


@pytest.mark.parametrize("conv", [TAPS, Convolution(8, 17, 8), Convolution(2, 3, 1)], ids=str)
def test_what_rebuilds_needs_no_more_memory_than_the_forward(conv: Convolution) -> None:
    """As `stages.recomputes_probabilities` has it."""
    for capability in (None, (9, 0)):
        pre, rebuild = (
            plan.WalkConstants(name, BF16, 16, conv, True, False, plan.walk_sizes(name, capability))
            for name in ("pre", "rebuild")
        )
        assert rebuild.shared_memory <= pre.shared_memory


@pytest.mark.gpu
def test_a_long_chunk(gpu) -> None:
    case = Case(batch=2, heads=16, keys=1500, queries=1500, first_row=500, rows=800, above=10, owned=780)
    check(case)
    check(replace(case, bounds=(613, 614, 900), dtype=FP16, heads=10))
