"""What cases need, against the peaks that were measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from mta_kernels import score_chunks
from mta_kernels.operation import Operation
from mtabench.prediction import memory
from mtabench.prediction.memory import expected_memory_bytes, input_bytes, longest_seq, stored_scores
from mtabench.problem.case import Case
from mtabench.problem.operations import make_operation
from mtabench.problem.work import chunk_of, chunks_of
from mtabench.registry import implementation_of
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


OF_CALLS = [path for path in RESULTS.glob("*.csv") if path.stem.endswith(("fwd", "bwd"))]
OF_CALLS += [RESULTS / name for name in ("ladder.csv", "mta-550m.csv", "mta-550m-all.csv")]


@pytest.mark.parametrize("path", OF_CALLS, ids=lambda x: x.stem)
def test_peaks_measured_on_a_gpu_are_within_5_percent(path):
    """With the exceptions of docs/profiling.md."""
    seen = 0
    for row in read_file(path).rows():
        case = Case.of_row(row, "cuda")
        if row["status"] != "ok" or (case.impl, case.pass_) == ("sdpa-flash", "bwd") or case.impl == "flex":
            continue
        if path.stem == "cuda-bwd" and case.impl in ("cuda", "hopper"):
            continue
        if (case.op, case.impl) == ("mta", "compile") or case.pass_ == "decode":
            continue
        expected = expected_memory_bytes(case, implementation_of(case).work) / 1e6
        assert expected == pytest.approx(float(row["peak_memory_mb"]), rel=0.05), case
        seen += 1
    assert seen


@pytest.mark.parametrize(("heads", "seq", "forward", "backward"), [
    (16, 16384, 4.0, 4.7), (16, 2**20, 5.0, 8.7), (32, 2**20, 5.6, 12),
])  # fmt: skip
def test_scores_of_all_parts_take_what_the_limits_say(heads, seq, forward, backward):
    operation = make_operation((6, 11), "heads", (6, 11), heads=heads, head_dim=64)
    for pass_, gigabytes in (("fwd", forward), ("bwd", backward)):
        case = replace(LONG, operation=operation, pass_=pass_, heads=heads, kv_heads=heads, seq=seq, head_dim=64)
        assert stored_scores(case, "staged") / 1e9 == pytest.approx(gigabytes, rel=0.01)
        if seq == 16384:  # on a GPU with less memory
            options = {"backward": pass_ == "bwd"}
            (_, small), (_, large) = (
                score_chunks.chunk_rows(operation, 1, heads, seq, 2, large=x, **options) for x in (False, True)
            )
            assert 2 * small == large
    mixed = replace(case, operation=make_operation(None, "heads", None, heads=heads, head_dim=64))
    assert stored_scores(mixed, "staged") / 1e9 == pytest.approx(2.1, rel=0.03)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_the_longest_sequence_of_all_parts_is_found_without_all_of_its_chunks(monkeypatch, pass_):
    """Of many, the largest has the scores it may have; to find all those of 2^30 tokens would take minutes."""
    operation = make_operation((6, 11), "heads", (6, 11), heads=16, head_dim=64)
    case = replace(LONG, operation=operation, pass_=pass_, head_dim=64)
    exact = stored_scores(case, "staged")

    def few(case):
        assert case.seq <= memory.MANY_CHUNKS * chunk_of(case)[1]
        return chunks_of(case)

    monkeypatch.setattr(memory, "chunks_of", few)
    assert longest_seq(case, "staged", 141e9) > 2**20
    monkeypatch.setattr(memory, "MANY_CHUNKS", 0)
    assert stored_scores(case, "staged") == pytest.approx(exact, rel=0.001)


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
