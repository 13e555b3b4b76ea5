"""The kernel of kept logits against its definition in float64, in the emulator or on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from emulated_mix import emulated_mix  # noqa: F401
from kernel_inputs import DEVICE
from mta_logits import Case, make_case
from planted_faults import plant

from mta_kernels.multi_token_attention.mix_cuda import logits

ON_GPU = DEVICE == "cuda"


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The kernel runs, in the emulator where there is no GPU, whose seed and multiprocessors may be changed."""
    return SimpleNamespace() if ON_GPU else request.getfixturevalue("emulated_mix")


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "head_dim"), [(16, 64, 64, 64), (10, 70, 150, 64), (3, 1, 1, 16), (16, 63, 200, 48)]
)
def test_a_chunk_matches_float64(gpu, heads: int, rows: int, keys: int, head_dim: int) -> None:
    make_case(heads=heads, rows=rows, keys=keys, head_dim=head_dim).check()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_threads_order(gpu, seed: int) -> None:
    """Later rows of a chunk, two sequences, grouped heads, tiles shared by several blocks."""
    gpu.seed, gpu.multiprocessors = seed, 5
    make_case(heads=4, rows=100, keys=270, batch=2, queries=250, first_row=128, kv_heads=2, head_dim=32).check()


def test_keys_that_all_rows_see(gpu) -> None:
    make_case(heads=5, rows=70, keys=90, causal=False).check()
    make_case(heads=5, rows=70, keys=90, causal=False, mixed=False).check()


@pytest.mark.parametrize("late", [40, 100, 170])
@pytest.mark.parametrize("large", [60000.0, -60000.0, 300.0])
def test_logits_that_grow(gpu, large: float, late: int) -> None:
    """References are raised where later keys have much larger logits; all blocks of a row end up with one."""
    case = make_case(heads=9, rows=64, keys=200, size=0.1)
    case.q[:, :3, :, 0] = large / 100
    case.k[:, :3, :, 0] = torch.where(torch.arange(200) >= late, 100.0, -100.0)
    case = Case(case.q, case.k, None, 1.0, 0, 64, True)
    case.check(workers=1)
    case.check(workers=4)


def test_logits_whose_rounding_exponentials_cannot_hold(gpu) -> None:
    """The greatest of a row's huge logits has probability one."""
    case = make_case(heads=4, rows=64, keys=200, size=1e12, mixed=False)
    kept, scales, logsumexp = case.run()
    logits = case.logits(rounded=True)[0]
    greatest = logits.amax(2, keepdim=True)
    equal = (logits == greatest).double()
    probabilities = (kept * scales[..., None])[0, :, :, :200].double()
    torch.testing.assert_close(probabilities, equal / equal.sum(2, keepdim=True), rtol=1e-2, atol=0)
    torch.testing.assert_close(logsumexp[0].double(), greatest[..., 0], rtol=1e-2, atol=0)


def test_equal_logits(gpu) -> None:
    case = make_case(heads=2, rows=64, keys=200)
    case.q.zero_()
    case.check()


@pytest.mark.parametrize(("heads", "head_dim", "rows"), [(16, 128, 90), (10, 128, 150), (3, 96, 60), (1, 80, 130)])
def test_blocks_that_share_tiles_and_keys(gpu, heads: int, head_dim: int, rows: int) -> None:
    """Clusters whose second tile has rows, some or none."""
    gpu.multiprocessors, gpu.seed = 8, heads
    make_case(heads=heads, rows=rows, keys=170, head_dim=head_dim).check()


def test_a_row_with_one_key_has_one(gpu) -> None:
    """Exactly, whatever its logit: its reference is that, and what is added is what is stored."""
    case = make_case(heads=4, rows=3, keys=3, size=30.0, mixed=False)
    kept, scales, _ = case.run()
    assert (kept[:, :, 0, 0] * scales[:, :, 0] == 1).all()


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated sources")
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("logits_scores.cuh", "barrier_wait(block.used(group, i), round & 1 ^ 1);", ""),
        ("logits_scores.cuh", "own.wait_until_empty(buffer, count / BUFFERS & 1 ^ 1);", ""),
        ("logits_scores.cuh", "                wait(i);\n                if (warp / 2", "                if (warp / 2"),
        ("logits_scores.cuh", "arrive_in_block(block.rank(lane,", "arrive_in_block(block.rank(0,"),
        ("logits_mix.cuh", "            own.wait(count);", ""),
        ("logits_mix.cuh", "if (Masked) hide(x[i], key, row);", ""),
        ("logits_mix.cuh", "        __syncwarp();  // the next piece begins with other sums", ""),
        ("logits_mix.cuh", "if (first) scale_kept(row, 0, key, factors[0]);", ""),
        ("logits.cu", "if (!__any_sync(~0u, one.x != greatest)) continue;", "continue;"),
    ],
    ids=["keys over keys", "scores over scores", "no wait for queries", "keys over those of another tile",
         "no wait for scores", "hidden keys", "sums of the next piece", "kept as they were", "pieces of their own"],
)  # fmt: skip
def test_the_emulator_finds_what_a_gpu_may_hide(gpu, monkeypatch, tmp_path, name, line, instead) -> None:
    plant(monkeypatch, logits, tmp_path / "mix_cuda", name, line, instead)
    case = make_case(heads=4, rows=100, keys=270, queries=250, first_row=128, head_dim=80, batch=2)
    grown = make_case(heads=2, rows=64, keys=300, queries=200, first_row=100, size=0.1, head_dim=16)
    grown.q[..., 0], grown.k[..., 0] = 6.0, torch.where(torch.arange(300) >= 200, 100.0, -100.0)
    grown = Case(grown.q, grown.k, None, 1.0, 100, 64, True)

    def check_orders() -> None:
        for gpu.seed in range(4):
            grown.check(workers=1 + gpu.seed)
            case.check()

    with pytest.raises(AssertionError):
        check_orders()
