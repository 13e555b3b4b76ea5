"""What calls store and move: against measured peaks, and what `mtabench memory` says of it."""

from dataclasses import replace
from pathlib import Path

import pytest
from changed_cases import with_changes
from command_line import contents, make_runner, printed, refused

from mta_kernels.operation import Operation
from mtabench.commands import memory as memory_command
from mtabench.prediction.memory import expected_memory_bytes, input_bytes, longest_seq
from mtabench.prediction.roofline import storage_of
from mtabench.problem.case import Case
from mtabench.problem.operations import make_operation
from mtabench.problem.work import bytes_moved
from mtabench.registry import GROUPS, implementation_of
from mtabench.results.results_file import read_file

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
ON_H200 = ("memory", "--device-name", "h200")
CONV = Case("fwd", "triton", Operation.of((6, 11), 64), "bf16", 1, 16, 16, 4096, 64, None, "cuda")
PLAIN = with_changes(CONV, impl="sdpa-flash", taps=None)
MIXED = replace(CONV, operation=make_operation(None, "heads", None, heads=16, head_dim=64))
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


@pytest.mark.parametrize("impl", ["eager", "triton", "hopper", "sdpa-flash", "mta"])
def test_the_longest_sequence_is_exact(impl):
    """Of all parts of multi-token attention, without all of the chunks of 2^30 tokens."""
    case = replace(MIXED, pass_="bwd") if impl == "mta" else replace(CONV, impl=impl)
    work = implementation_of(case).work

    def needed(seq):
        return storage_of(replace(case, seq=seq)).needed

    longest = longest_seq(case, work, 80e9, multiple=1)
    if impl == "mta":
        assert longest > 2**20
    else:
        assert needed(longest) <= 80e9 < needed(longest + 1)
    assert longest_seq(case, work, 80e9) == longest // 1024 * 1024
    assert longest_seq(case, work, 1.0) == 0


def test_caches_and_states_of_decode_are_inputs():
    step = replace(CONV, pass_="decode", impl="eager", device="cpu")
    assert input_bytes(step) == 2 * 16 * 4096 * 64 * 2
    assert input_bytes(replace(step, seq=40, page_size=128)) == 2 * 16 * 128 * 64 * 2
    operation = make_operation((3, 2), "heads", (6, 11), heads=16, head_dim=64)
    assert input_bytes(replace(step, operation=operation)) - input_bytes(step) == 6 * 16 * 4096 * 2


def test_traffic_of_a_fused_kernel_is_its_inputs_and_outputs_and_what_is_unknown_stays_so():
    one = storage_of(PLAIN)
    assert one.score_matrix == 16 * 4096 * 4096 * 2
    assert one.traffic == bytes_moved(PLAIN) == 4 * 16 * 4096 * 64 * 2
    assert one.intensity == pytest.approx(one.flops / one.traffic)
    naive, flash = (storage_of(replace(PLAIN, impl=f"cuda-{name}")) for name in ("naive", "flash"))
    assert naive.beyond - flash.beyond == 2 * one.score_matrix  # float32
    assert (naive.traffic, flash.traffic) == (None, one.traffic)
    unknown = storage_of(replace(CONV, impl="compile"))
    assert (unknown.traffic, unknown.intensity) == (None, None)


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return make_runner(monkeypatch, capsys, tmp_path, columns=120)


def line_of(out, name, title="bytes that a call takes"):
    """The cells of the line called `name` below a title."""
    lines = iter(out.splitlines())
    next(line for line in lines if line.startswith(title))
    return next(line for line in lines if line.startswith(name)).removeprefix(name).split()


def test_without_options_it_says_what_it_took_and_touches_no_file(mtabench, tmp_path):
    code, out, err = mtabench(*ON_H200)
    assert (code, err, contents(tmp_path)) == (0, "", {})
    assert out.startswith("fwd on NVIDIA H200; memory: 141 GB")
    assert "bf16, batch 1, 16 heads of 64, conv 6x11" in out
    assert line_of(out, "(score matrix)")[:2] == ["33.6M", "134M"]
    assert line_of(out, "eager")[5:] == ["103G", "413G!", "1.65T!", "64k", "38,281"]
    assert len(line_of(out, "triton")) == 9  # it never runs out here
    assert "compile" not in out.partition("bytes through memory")[2]  # which is not modelled


def test_the_ladder_is_one_table(mtabench):
    out = printed(mtabench(*ON_H200, "--op", "attention", "--impl", "ladder", "--seq", "1k..128k", "--dtype", "bf16"))
    assert "c-loops: runs on the CPU alone" in out
    for name in GROUPS["ladder"]:
        assert name.startswith("c-") or f"\n{name} " in out


@pytest.mark.parametrize(
    ("text", "count"), [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("1.5tb", 1.5e12), ("141e9", 141e9), ("512MB", 512e6)]
)
def test_sizes_are_read(text, count):
    assert memory_command.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "-1GB", "1e99GB", "0GB", "1KB", "nan", "8\u0660GB"])
def test_other_sizes_are_refused(mtabench, text):
    refused(mtabench(*ON_H200, f"--memory={text}"), "--memory")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["memory"], "PyTorch finds none here; name one: --device-name h200"),
        (["memory", "--device-name", "h300"], "h200"),
        (["memory", "--pass", "sideways"], "fwd, bwd, decode"),
        (["memory", "--impl", "hopper", "--device-name", "a100"], "no Hopper GPU"),
        ([*ON_H200, "--impl", "hopper", "--pass", "decode"], "hopper: has no decode pass"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(mtabench, words, expected):
    refused(mtabench(*words), expected)


def test_shapes_have_tables_of_their_own_and_what_a_device_does_not_run_is_said(mtabench):
    words = ("memory", "--device-name", "a100", "--impl", "eager,hopper", "--seq", "1k..4k", "--conv", "6x11,3x3")
    _, out, _ = mtabench(*words, "--head-dim", "64,128", "--tokens", "4k", "--pass", "bwd", "--no-causal")
    assert "bf16, batch 4 to 1, 16 heads of 64, conv 6x11, 3x3, not causal" in out
    assert "16 heads of 128" in out
    cells = line_of(out, "eager 3x3")
    assert (len(cells), cells[-1]) == (4, f"{longest_seq(replace(CONV, pass_='bwd'), 'dense', 80e9, multiple=1):,}")
    assert "too long" not in out  # where all fit
    assert "\nhopper: NVIDIA A100-SXM4-80GB is no Hopper GPU" in out
