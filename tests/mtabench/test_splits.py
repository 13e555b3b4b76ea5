"""How good auto's splits are, from rows as a sweep has them and as a file gives them back."""

import pytest
import torch

from mta_kernels.operation import Operation
from mtabench.charts.kinds.splits import choices
from mtabench.prediction import plans
from mtabench.problem.case import Case
from mtabench.results.rows import RunFacts, cell_row
from mtabench.sweeps.table import line


def row(splits, ms, *, used=None, status="ok", run="first", seq=65536, head_dim=64, impl="triton"):
    case = Case("decode", impl, Operation.of((6, 11), head_dim), "bf16", 1, 16, 16, seq, head_dim, splits, "cpu")
    measured = {"median_ms": ms, "ci95_low_ms": 0.999 * ms, "ci95_high_ms": 1.001 * ms} if ms else {}
    return cell_row(case, RunFacts(run, "", {}), status) | {"splits_used": used or splits} | measured


AUTO = row("auto", 0.0841, used=16)
NUMBERS = [row(8, 0.095), row(24, 0.0829), row(64, 0.0901)]


def test_auto_is_set_against_the_fastest_number():
    (found,) = choices([NUMBERS[0], AUTO, *NUMBERS[1:]])
    assert (found.auto, found.best) == (AUTO, NUMBERS[1])
    assert found.slowdown == pytest.approx(0.0841 / 0.0829 - 1)


@pytest.mark.parametrize("status", ["wrong", "invalid", "oom", "error", "timeout", "unsupported"])
def test_only_valid_times_count(status):
    failed = row(24, 0.01, status=status)
    (found,) = choices([AUTO, failed, *NUMBERS[::2]])
    assert found.best == NUMBERS[2]
    assert list(choices([AUTO, failed])) == []


def test_nothing_is_said_without_auto_or_without_numbers():
    other_shape = row("auto", 0.05, used=16, seq=4096)
    other_impl = AUTO | {"impl": "another"}
    for rows in ([], [AUTO], NUMBERS, [other_shape, other_impl, *NUMBERS], [row(None, 1, impl="eager"), AUTO]):
        assert list(choices(rows)) == []


def test_lines_name_the_splits():
    assert "triton, splits auto (16): 0.0841 ms" in line(AUTO)
    assert "triton, splits 24: 0.0829 ms" in line(NUMBERS[1])
    assert "eager: 1 ms" in line(row(None, 1.0, impl="eager"))


@pytest.mark.parametrize(
    ("pass_", "impl", "kernels"),
    [
        ("fwd", "auto", "hopper_prepare hopper_forward"),
        ("bwd", "auto", "hopper_prepare hopper_backward backward_exact"),
        ("decode", "cuda", "cuda_decode"),
        ("fwd", "triton", "_near_scores_kernel _band_kernel _prepare_kernel _conv_attention_fwd_kernel"),
        ("fwd", "eager", None),
    ],
)
def test_a_row_names_the_kernels_of_its_plan(monkeypatch, pass_, impl, kernels):
    monkeypatch.setattr(plans, "gpu_like", lambda device: plans.H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case = Case(pass_, impl, Operation.of((6, 11), 64), "bf16", 1, 16, 16, 4096, 64, None, "cuda")
    rows = [cell_row(case, RunFacts("first", "", {}), status) for status in ("ok", "oom")]
    assert [row["kernels"] for row in rows] == [kernels, None]
