"""What cases need, against the peaks that were measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from mta_kernels.operation import Operation
from mtabench.prediction.memory import expected_memory_bytes, input_bytes, longest_seq
from mtabench.problem.case import Case
from mtabench.registry import find
from mtabench.results.results_file import read_file

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
CONV = Case("fwd", "eager", Operation.of((4, 3), 16), "fp32", 1, 16, 16, 4096, 16, None, "cpu")
LONG = Case("bwd", "triton", Operation.of((6, 11), 128), "bf16", 1, 16, 16, 131072, 128, None, "cuda")


def test_score_matrices_are_what_dense_implementations_need():
    matrices = expected_memory_bytes(CONV, "dense") / (16 * 4096 * 4096 * 4)
    assert 3 < matrices < 6
    backward = replace(CONV, pass_="bwd")
    assert expected_memory_bytes(backward, "dense") > 1.5 * matrices * 16 * 4096 * 4096 * 4
    assert expected_memory_bytes(CONV, "tiled") == 16 * 4096 * 16 * 4
    decode = replace(CONV, pass_="decode")
    assert expected_memory_bytes(decode, "dense") < 10 * 32 * 4096 * 4 * 4


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_peaks_measured_on_a_gpu_are_within_5_percent(pass_):
    """FlashAttention's backward is left out: it takes a third more than its outputs and the sum of dq."""
    seen = set()
    for row in read_file(RESULTS / f"{pass_}.csv").rows():
        if (row["impl"], pass_) in (("compile", "fwd"), ("sdpa-flash", "bwd")):
            continue
        case = Case.of_row(row, "cuda")
        expected = expected_memory_bytes(case, find(case.impl).work) / 1e6
        assert expected == pytest.approx(float(row["peak_memory_mb"]), rel=0.05), case
        seen.add(case.impl)
    assert {"eager", "triton", "sdpa-cudnn"} <= seen


@pytest.mark.parametrize(("head_dim", "gib"), [(64, 24), (128, 32)])
def test_the_backward_of_131072_tokens_takes_what_was_measured(head_dim, gib):
    """Measured on an H200; results/nvidia-h200/long-bwd.csv has head dim 64."""
    case = replace(LONG, head_dim=head_dim)
    assert (input_bytes(case) + expected_memory_bytes(case, "expanded")) / 2**30 == pytest.approx(gib, rel=0.02)


def test_the_longest_sequence_is_the_last_that_fits():
    longest = longest_seq(LONG, "expanded", 141e9)
    assert longest % 1024 == 0

    def needed(seq):
        case = replace(LONG, seq=seq)
        return input_bytes(case) + expected_memory_bytes(case, "expanded")

    assert needed(longest) <= 141e9 < needed(longest + 1024)
    assert longest_seq(LONG, "dense", 141e9) < longest / 10
    assert longest_seq(LONG, "dense", 1.0) == 0
