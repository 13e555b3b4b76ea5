"""The convolution kernels of stored scores against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from emulated_bands import emulated_bands  # noqa: F401
from kernel_inputs import DEVICE, poison_memory
from mta_chunk_case import GUARD, ChunkCase, convolve_exactly
from planted_faults import plant
from torch import Tensor

from mta_kernels.multi_token_attention.bands_cuda import BandsGradient, convolve, plan
from mta_kernels.multi_token_attention.bands_cuda.bands import shape_unsupported
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution

ON_GPU = DEVICE == "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
TAPS = Convolution(6, 11, 5)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels run, in the emulator where there is no GPU; with NaN in whatever nobody writes."""
    poison_memory(monkeypatch)
    return SimpleNamespace() if ON_GPU else request.getfixturevalue("emulated_bands")


@dataclass(frozen=True)
class Case(ChunkCase):
    """A chunk whose scores are convolved."""

    conv: Convolution = TAPS
    delta: bool = True

    def taps(self) -> Tensor:
        taps = torch.randn(self.heads, *self.conv.taps, generator=torch.Generator().manual_seed(3))
        return (0.3 * taps).to(self.dtype)

    def of_document(self, x: Tensor, number: int) -> Tensor:
        """The rows of one document in float64, and zeros."""
        return x.double().where(self.stored() & (self.row_documents() == number)[:, None], 0)

    def definition(self) -> tuple[Tensor, Tensor, Tensor]:
        """By autograd in float64: the convolution, its gradient, and that of the taps by the owned rows."""
        taps = self.taps().double().requires_grad_()
        out, dx, dtaps = (torch.zeros((), dtype=torch.float64) for _ in range(3))
        owned = torch.arange(self.rows)[:, None]
        owned = (owned >= self.above) & (owned < self.above + self.owned)
        for number in range(-1, len(self.bounds) + 1):
            x = self.of_document(self.scores(1), number).requires_grad_()
            grad = self.of_document(self.gradient(), number)
            seen = self.seen() & (self.row_documents() == number)[:, None]
            convolved = convolve_exactly(x, taps, self.conv)
            out = out + convolved.detach().where(seen, 0)
            dx = dx + torch.autograd.grad(convolved, x, grad, retain_graph=True)[0].where(seen, 0)
            dtaps = dtaps + torch.autograd.grad(convolved, taps, (grad / self.scale_of_rows()).where(owned, 0))[0]
        return out, dx, dtaps


def run(case: Case, sizes: plan.Sizes | None = None) -> dict[str, Tensor]:
    """Both kernels; the gradients twice, as of two chunks."""
    x, grad, taps = (t.to(DEVICE) for t in (case.scores(1), case.gradient(), case.taps()))
    out, dx = (torch.full_like(x, GUARD) for _ in range(2))
    convolve(x, out, taps, case.conv, case.where(), sizes=sizes)
    gradients = BandsGradient(
        taps, case.conv, case.dtype, case.causal, bool(case.bounds), case.batch, [(case.rows + 200, case.pitch + 128)],
        delta=case.delta, sizes=sizes,
    )  # fmt: skip
    for _ in range(2):
        delta = gradients.add(x, grad, dx, case.where(), above=case.above, owned=case.owned)
    found = {"out": out, "dx": dx, "dtaps": gradients.dtaps()} | ({} if delta is None else {"delta": delta})
    return {name: t.cpu() for name, t in found.items()}


def check(case: Case, sizes: plan.Sizes | None = None) -> dict[str, Tensor]:
    found = run(case, sizes)
    out, dx, dtaps = case.definition()
    eps = torch.finfo(case.dtype).eps
    for name, want in (("out", out), ("dx", dx)):
        got = found[name].double()
        assert (got[~case.stored().expand_as(got)] == GUARD).all(), (case, name)
        got = got.where(case.stored(), 0)
        assert (got[~case.seen().expand_as(got)] == 0).all(), (case, name)
        assert (got - want).abs().max() <= eps * want.abs().max() + 1e-5, (case, name)
    assert (found["dtaps"] - 2 * dtaps).norm() <= 1e-5 * dtaps.norm() + 1e-6, case
    if case.delta:
        stored = found["dx"].double().where(case.seen(), 0)
        want = (case.scores(1).nan_to_num(0).double() * stored).sum(-1)
        assert (found["delta"] - want).abs().max() <= 1e-6 * want.abs().max() + 1e-6, case
    return found


def conv(query_taps: int, key_taps: int, pad: int) -> Convolution:
    return Convolution(query_taps, key_taps, pad)


@pytest.mark.parametrize(("causal", "dtype"), [(True, BF16), (False, FP16)])
def test_a_chunk(gpu, causal: bool, dtype: torch.dtype) -> None:
    check(Case(causal=causal, dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 2, "heads": 3, "keys": 130, "queries": 40, "rows": 40, "first_row": 0, "above": 0, "owned": 40},
        {"keys": 700, "queries": 700, "first_row": 500, "rows": 120, "above": 10, "owned": 100},
        {"keys": 300, "queries": 300, "first_row": 200, "rows": 130, "above": 10, "owned": 90},
        {"keys": 1, "queries": 1, "first_row": -10, "rows": 21, "above": 10, "owned": 1},
        {"delta": False},
    ],
    ids=str,
)
def test_where_a_chunk_is(gpu, shape: dict) -> None:
    """Queries later than keys, far from the diagonal, beyond the last query, of one key."""
    for causal in (True, False):
        check(Case(causal=causal, **shape))


@pytest.mark.parametrize(
    "taps",
    [conv(1, 1, 0), conv(2, 9, 4), conv(7, 12, 11), conv(8, 17, 0), conv(5, 17, 16), conv(4, 1, 0)],
    ids=lambda x: f"{x}-{x.pad}",
)
def test_taps(gpu, taps: Convolution) -> None:
    check(Case(conv=taps))
    check(Case(conv=taps, keys=140, queries=140, bounds=(1, 40, 43), causal=False))


@pytest.mark.parametrize(
    ("bounds", "causal"),
    [((1,), True), ((30, 31, 34, 90), True), ((30, 31, 34, 90), False), ((125, 131), True), ((190,), False)],
)
def test_documents(gpu, causal: bool, bounds: tuple[int, ...]) -> None:
    check(Case(bounds=bounds, causal=causal))
    check(Case(bounds=bounds, causal=causal, queries=120, first_row=-20, above=30, owned=100))


@pytest.mark.parametrize("bounds", [(), (30, 31, 34, 90)])
def test_each_sequence_and_document_has_a_loss_scale(gpu, bounds: tuple[int, ...]) -> None:
    check(Case(batch=1 if bounds else 3, bounds=bounds, dtype=FP16, scaled=True))


@pytest.mark.parametrize("sizes", [plan.Sizes(20, 2, 1), plan.Sizes(104, 3, 1), plan.Sizes(300, 4, 1)], ids=str)
def test_any_sizes(gpu, sizes: plan.Sizes) -> None:
    check(Case(keys=400, queries=400, first_row=240, bounds=(250,)), sizes)
    check(Case(keys=400, queries=400, first_row=240), sizes)


def test_the_order_of_threads_changes_nothing(gpu) -> None:
    case, results = Case(bounds=(40,)), []
    for gpu.seed in (0, 1, 2):
        results.append(check(case))
    for name, want in results[0].items():
        assert all(torch.equal(other[name].nan_to_num(9), want.nan_to_num(9)) for other in results[1:])


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("convolve.cu", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        ("gradients.cu", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        ("gradients.cu", "task.visible(args, HALO)", "task.visible(args, 0)"),
        ("gradients.cu", "const bool owned = read >= args.above &&", "const bool owned ="),
        ("gradients.cu", "task, of_x, args.x", "task, segment, args.x"),
        ("layout.cuh", "row < segment.highest", "row < args.rows"),
        ("layout.cuh", "pairs[0] = visible_pair(pairs[0], seen, key), pairs[1]", "pairs[1]"),
        ("layout.cuh", "if (first < segment.begin || last >= segment.stop) return false;", ""),
        ("layout.cuh", "key < stored_end(args, row);", "key < args.pitch;"),
    ],
    ids=["no wait", "no wait of gradients", "grad below", "not owned", "rows twice", "documents", "unseen",
         "others' rows", "unstored"],
)  # fmt: skip
def test_faults_are_found(gpu, monkeypatch, tmp_path, name: str, line: str, instead: str) -> None:
    plant(monkeypatch, plan, tmp_path / "bands", name, line, instead)

    def check_orders() -> None:
        for gpu.seed in range(4):
            check(Case(keys=300, queries=300, first_row=100, bounds=(187, 190)))
            # A run of 103 rows ends where keys of a warp begin, and a row is not stored beside these.
            check(Case(keys=300, queries=300, first_row=25, rows=250, owned=200))

    with pytest.raises(AssertionError):
        check_orders()


def test_what_cannot_be_is_told() -> None:
    assert shape_unsupported(BF16, TAPS) is None
    assert "dtype torch.float32 is not float16 or bfloat16" in shape_unsupported(torch.float32, TAPS)
    assert "9x11 taps are more than the 8x17" in shape_unsupported(BF16, conv(9, 11, 5))
    assert "2x18 taps are more than the 8x17" in shape_unsupported(BF16, conv(2, 18, 8))


@pytest.mark.parametrize("gradients", [False, True])
def test_it_compiles_with_hardly_a_spill(gradients: bool) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    sizes = plan.GRADIENTS if gradients else plan.CONVOLVE
    constants = plan.BandConstants(gradients, BF16, TAPS, gradients, True, False, sizes)
    code, words = compiler.compile_source(constants.source("sm_90"))
    assert code.startswith(b"\x7fELF")
    if "ptxas info" not in words:
        pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
    spills = [int(part.split()[-1]) for part in words.split(" bytes spill stores")[:-1]]
    assert max(spills) <= 48, words


@pytest.mark.gpu
def test_a_long_chunk(gpu) -> None:
    case = Case(batch=2, heads=16, keys=1500, queries=1500, first_row=500, rows=800, above=10, owned=780)
    check(case)
    check(dataclasses.replace(case, bounds=(613, 614, 900), dtype=FP16))
