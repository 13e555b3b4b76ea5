"""The tile kernels of the multi-token attention against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from emulated_tiles import H200, emulated_tiles  # noqa: F401
from kernel_inputs import DEVICE, poison_memory
from mta_tiles_case import Case, check, definition, forward_chunk
from planted_faults import plant

from mta_kernels.gpu_limits import Gpu, gpu_of
from mta_kernels.multi_token_attention.tiles_cuda import plan as planning
from mta_kernels.multi_token_attention.tiles_cuda import post_tiles, pre_tiles
from mta_kernels.multi_token_attention.tiles_cuda.plan import plan_on
from mta_kernels.multi_token_attention.tiles_cuda.tiles import shape_unsupported
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution

ON_GPU = DEVICE == "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
RTX_4090 = 101376  # bytes of shared memory a block


def conv(query_taps: int, key_taps: int, pad: int) -> Convolution:
    return Convolution(query_taps, key_taps, pad)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels run, in the emulator where there is no GPU; with NaN in whatever nobody writes.

    Without a GPU its fields may be changed: the seed of threads and copies, multiprocessors, shared memory.
    """
    poison_memory(monkeypatch)
    return SimpleNamespace() if ON_GPU else request.getfixturevalue("emulated_tiles")


@pytest.mark.parametrize("multiprocessors", [1, 2, 7])
def test_any_number_of_blocks_share_a_chunk(gpu, multiprocessors: int) -> None:
    gpu.multiprocessors = multiprocessors
    check(Case(batch=2, keys=150, queries=150, rows=150), DEVICE)
    check(Case(keys=200, queries=170, first_row=70, rows=45, spare=72), DEVICE)
    check(Case(keys=60, queries=50, first_row=2, rows=45, blank=8), DEVICE)


def test_rows_above_all_queries_have_no_sum(gpu) -> None:
    """A whole block of them, and some more."""
    scores = torch.zeros(1, 2, 50, 24, dtype=BF16, device=DEVICE)
    sums, where = torch.zeros(1, 2, 50, device=DEVICE), {"first_position": -40, "keys": 10, "causal": True}
    pre_tiles(scores, None, 0, None, torch.zeros_like(scores), sums, above=0, **where)
    assert (sums[:, :, :40] == -float("inf")).all()
    torch.testing.assert_close(sums[0, 1, 40:].cpu().exp(), torch.arange(1.0, 11.0))


@pytest.mark.parametrize(
    ("bounds", "causal"), [((), True), ((), False), ((1,), False), ((30, 31, 34, 90), True), ((30, 31, 34, 90), False)]
)
def test_documents(gpu, causal: bool, bounds: tuple[int, ...]) -> None:
    check(Case(keys=100, queries=100, rows=100, causal=causal, bounds=bounds), DEVICE)
    check(Case(keys=100, queries=80, first_row=15, rows=40, causal=causal, bounds=bounds), DEVICE)


@pytest.mark.parametrize(
    ("heads", "pre", "post", "options"),
    [
        (1, conv(1, 1, 0), conv(2, 9, 4), {}),
        (10, conv(6, 11, 5), conv(6, 11, 5), {"dtype": FP16}),
        (16, conv(6, 11, 5), conv(6, 11, 5), {}),
        (20, conv(2, 9, 8), conv(6, 11, 5), {"causal": False}),
        (3, conv(8, 17, 8), conv(8, 17, 0), {"pre_mix": False, "bounds": (20,)}),
        (3, conv(7, 12, 11), conv(3, 16, 7), {"post_mix": False, "causal": False}),
        (3, None, conv(8, 17, 16), {}),
        (1, conv(5, 2, 1), None, {"pre_mix": False, "post_mix": False}),
    ],
    ids=str,
)
def test_shapes(gpu, heads: int, pre, post, options) -> None:
    for keys, queries in ((1, 1), (5, 5), (70, 60)):
        bounds = tuple(x for x in options.get("bounds", ()) if x < keys)
        case = Case(heads=heads, keys=keys, queries=queries, rows=queries, pre=pre, post=post)
        check(dataclasses.replace(case, **options | {"bounds": bounds}), DEVICE)


def test_many_heads_with_little_shared_memory(gpu) -> None:
    """Smaller tiles; 64 heads need an H200."""
    for heads, shared_memory in ((32, RTX_4090), (40, H200)):
        gpu.shared_memory = shared_memory
        check(Case(heads=heads, keys=40, queries=40, rows=40), DEVICE)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("lead", [1, 2])
def test_every_tile(gpu, rows: int, columns: int, lead: int) -> None:
    """Each of two sizes, or of a size and a dtype, beside each of the other."""
    dtype = FP16 if rows == columns else BF16
    results = 1 if (rows == columns) == (lead == 1) else 2
    case = Case(keys=90, queries=90, rows=90, dtype=dtype, pre=conv(3, 11, 5))
    plans = {}
    for post in (False, True):
        found = plan_on(H200, post, dtype, 3, case.post if post else case.pre, True, True, False)
        plans["post_plan" if post else "pre_plan"] = dataclasses.replace(
            found, rows=rows, columns=columns, lead=lead, results=results
        )
    check(case, DEVICE, **plans)


@pytest.mark.parametrize(("dtype", "magnitude"), [(FP16, 8000.0), (BF16, 1e6), (BF16, 1e30)])
def test_huge_scores(gpu, dtype: torch.dtype, magnitude: float) -> None:
    """Up to 40000 in fp16, whose probabilities are those of few keys."""
    check(Case(heads=1, dtype=dtype, magnitude=magnitude, pre=None, pre_mix=False), DEVICE)
    case = Case(heads=2, dtype=dtype, pre=None, pre_mix=False)
    given = case.tensors()
    given["scores"] = (given["scores"] + 60000.0).to(dtype)
    got, logsumexp = (x.cpu() for x in forward_chunk(case, given, DEVICE))
    want, sums = definition(case, given, torch.float64, 50)
    assert (got[..., :50].nan_to_num(0) - want).norm() <= 0.02 * want.norm()
    assert (logsumexp - sums).abs().max() < 0.01


def test_the_order_of_threads_changes_nothing(gpu) -> None:
    case = Case(keys=120, queries=120, rows=120, bounds=(40,))
    results = []
    for gpu.seed in (0, 1, 2):
        results.append(check(case, DEVICE))
    for out, logsumexp in results[1:]:
        assert torch.equal(out.nan_to_num(7), results[0][0].nan_to_num(7))
        assert torch.equal(logsumexp, results[0][1])


def test_no_row_knows_what_comes_after(gpu) -> None:
    """Bit for bit, where scores of later rows and keys change."""
    case = Case(keys=100, queries=100, rows=100)
    given = case.tensors()
    out, logsumexp = forward_chunk(case, given, DEVICE)
    for row in (37, 64):
        scores = given["scores"].clone()
        scores[:, :, row:] = 50
        changed, changed_sums = forward_chunk(case, given | {"scores": scores}, DEVICE)
        assert torch.equal(out[:, :, :row, :row], changed[:, :, :row, :row])
        assert torch.equal(logsumexp[:, :, :row], changed_sums[:, :, :row])
        assert not torch.equal(out[:, :, row:, :row], changed[:, :, row:, :row])


def test_chunks_are_the_whole(gpu) -> None:
    """Bit for bit where chunks begin at multiples of a tile's rows, and nearly so elsewhere."""
    case = Case(keys=160, queries=160, rows=160)
    given = case.tensors()
    whole, sums = forward_chunk(case, given, DEVICE)
    for first, rows in ((64, 64), (37, 50), (159, 1)):
        part, part_sums = forward_chunk(dataclasses.replace(case, first_row=first, rows=rows), given, DEVICE)
        expected = whole[:, :, first : first + rows, : part.shape[3]].nan_to_num(0)
        assert (part.nan_to_num(0) - expected).abs().max() <= 0.01
        assert (part_sums - sums[:, :, first : first + rows]).abs().max() < 1e-4


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("pipeline.cuh", "        copies_wait<LEAD - 1>();", "        copies_wait<LEAD>();"),
        ("pipeline.cuh", "if (RESULTS == 1) __syncthreads();", ""),
        ("convolve.cuh", "tick.ring + RING - BESIDE)", "tick.ring + RING - BESIDE + 1)"),
        ("load.cuh", "if (!seen.all(chunks.column, 8)) hide", "if (false) hide"),
        ("steps.cuh", "const bool last = left == 1 ||", "const bool last ="),
        ("convolve.cuh", "BOUNDS && t > reach[j % 2]", "BOUNDS && t > reach[0]"),
        ("pre.cu", "start < end && block * args.run < end;", "start < end && block * args.run < end - 1;"),
    ],
    ids=["no wait", "no barrier", "next chunk", "nothing hidden", "sums left", "reach", "part forgotten"],
)  # fmt: skip
def test_faults_are_found(gpu, monkeypatch, tmp_path, name: str, line: str, instead: str) -> None:
    plant(monkeypatch, planning, tmp_path / "tiles", name, line, instead)
    case = Case(heads=2, keys=97, queries=97, rows=97, bounds=(40, 43), magnitude=2.0)
    plans = {}
    if "RESULTS" in line:
        plan = plan_on(H200, False, BF16, 2, case.pre, True, True, True)
        plans["pre_plan"] = dataclasses.replace(plan, results=1)

    def check_orders() -> None:
        for gpu.seed in range(4):
            for gpu.multiprocessors in (1, 4, 6):
                check(case, DEVICE, **plans)

    with pytest.raises(AssertionError):
        check_orders()


def test_what_cannot_be_is_told(gpu) -> None:
    device = torch.device(DEVICE)
    for words, arguments in {
        "dtype torch.float32 is not float16 or bfloat16": (torch.float32, 16, None, None),
        "65 heads are more than the 64": (BF16, 65, None, None),
        "9x11 taps are more than the 8x17": (BF16, 16, None, conv(9, 11, 5)),
        "2x18 taps are more than the 8x17": (BF16, 16, conv(2, 18, 8), None),
    }.items():
        assert words in shape_unsupported(gpu_of(device), *arguments)
    if not ON_GPU:
        small = Gpu((8, 9), RTX_4090)
        assert "64 heads with 6x11 taps do not fit" in shape_unsupported(small, BF16, 64, conv(6, 11, 5), None)
    scores = torch.zeros(1, 2, 20, 24, dtype=BF16, device=device)
    sums, where = torch.zeros(1, 2, 20, device=device), {"first_position": 0, "keys": 20, "causal": True}
    with pytest.raises(ValueError, match="expected as many rows"):
        pre_tiles(scores, None, 0, None, scores, sums, above=1, **where)
    with pytest.raises(ValueError, match="contiguous rows of a multiple of 8 columns"):
        pre_tiles(scores[..., :20], None, 0, None, scores, sums, above=0, **where)
    with pytest.raises(ValueError, match="rows of 16 columns; expected 20 or more"):
        pre_tiles(scores, None, 0, None, scores[..., :16], sums, above=0, **where)
    with pytest.raises(ValueError, match="statistics is"):
        post_tiles(scores, sums, None, 0, None, scores, above=0, **where)


@pytest.mark.parametrize(
    ("architecture", "limit", "heads", "post"),
    [
        ("sm_80", 166912, 10, True),
        ("sm_86", RTX_4090, 16, False),
        ("sm_90", H200, 16, False),
        ("sm_90", H200, 16, True),
    ],
)
def test_it_compiles_with_hardly_a_spill(architecture: str, limit: int, heads: int, post: bool) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    constants = plan_on(limit, post, BF16, heads, conv(6, 11, 5), True, True, False)
    code, words = compiler.compile_source(constants.source(architecture))
    assert code.startswith(b"\x7fELF")
    if "ptxas info" not in words:
        pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
    spills = [int(part.split()[-1]) for part in words.split(" bytes spill")[:-1]]
    assert max(spills) <= 16, words


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [10, 16])
def test_a_long_chunk(gpu, heads: int) -> None:
    """As many steps as blocks of a GPU share, with documents that end within a step."""
    case = Case(batch=2, heads=heads, keys=1500, queries=1400, first_row=500, rows=300)
    check(case, DEVICE)
    check(dataclasses.replace(case, bounds=(333, 334, 900)), DEVICE)
    check(dataclasses.replace(case, dtype=FP16, causal=False), DEVICE)
