"""From options to cells: defaults, presets, order, and refusals that name what to change."""

import csv
from pathlib import Path

import pytest
from command_line import printed, refused

from mtabench import environment
from mtabench.errors import UsageError
from mtabench.problem.case import MODES
from mtabench.registry import default_names, find
from mtabench.results.results_file import key_of, key_of_row, read_file
from mtabench.sweeps import estimate
from mtabench.sweeps.cells_plan import any_plan
from mtabench.sweeps.plan import Options, make_plan


def plan(pass_="fwd", **options):
    return make_plan(Options(pass_, **({"device": "cpu"} | options)))


def values(plan, name):
    return list(dict.fromkeys(getattr(case, name) for case in plan.cases))


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU is only looked up by name."""
    monkeypatch.setattr(environment, "resolve_device", lambda name: "cuda" if name == "auto" else name)


def yardsticks_last(names):
    return sorted(names, key=lambda name: find(name).op == "attention")


def test_defaults_on_a_gpu(gpu):
    fwd = plan(device="auto")
    assert values(fwd, "seq") == [1024, 2048, 4096, 8192, 16384]
    assert values(fwd, "batch") == [16, 8, 4, 2, 1]
    assert values(fwd, "dtype") == ["bf16"]
    assert values(fwd, "heads") == values(fwd, "kv_heads") == [16]
    assert values(fwd, "impl") == yardsticks_last(default_names("fwd", "cuda"))
    assert {case.taps for case in fwd.cases} == {"6x11", ""}
    decode = plan("decode", device="auto")
    assert values(decode, "seq") == [4096, 8192, 16384, 32768, 65536, 131072]
    assert values(decode, "batch") == [1]


def test_defaults_on_a_cpu():
    fwd = plan()
    assert values(fwd, "seq") == [256, 512, 1024]
    assert values(fwd, "dtype") == ["fp32"]
    assert values(fwd, "impl") == yardsticks_last(default_names("fwd", "cpu"))
    assert values(plan(seq="1k..16k"), "seq") == [1024, 2048, 4096, 8192, 16384]


def test_cells_of_one_shape_follow_each_other_and_yardsticks_come_once():
    cells = plan(seq="16,32", conv="3x3,6x11", impl="sdpa-math,eager", heads="2").cases
    assert [(case.seq, case.impl, case.taps) for case in cells] == [
        (16, "eager", "3x3"), (16, "eager", "6x11"), (16, "sdpa-math", ""),
        (32, "eager", "3x3"), (32, "eager", "6x11"), (32, "sdpa-math", ""),
    ]  # fmt: skip


def test_lists_multiply():
    cells = plan(
        seq="16", head_dim="16,32", heads="2,4", kv_heads="2", batch="1,3", dtype="fp32,fp16", impl="eager"
    ).cases
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2
    assert {(case.head_dim, case.heads, case.kv_heads, case.batch, case.dtype) for case in cells} == {
        (d, h, 2, b, t) for d in (16, 32) for h in (2, 4) for b in (1, 3) for t in ("fp32", "fp16")
    }


def test_a_preset_fills_what_is_not_given():
    cells = plan(preset="mta-550m", impl="eager").cases
    assert [(c.heads, c.head_dim, c.taps, c.seq) for c in cells] == [(10, 128, "6x11", 2048)]
    cells = plan(preset="mta-550m", impl="eager", seq="64", conv="3", heads="5").cases
    assert [(c.heads, c.head_dim, c.taps, c.seq) for c in cells] == [(5, 128, "3x3", 64)]


def test_tokens_set_the_batch():
    cells = plan(seq="1k,3000,32k", tokens="16k", impl="eager").cases
    assert [(case.seq, case.batch) for case in cells] == [(1024, 16), (3000, 5), (32768, 1)]


def test_splits_are_cells_of_what_splits_keys_alone():
    decode = plan("decode", splits="auto,1..4", seq="64,128", conv="3x3,6x11", impl="eager,triton,sdpa-math")
    assert [(case.impl, case.taps, case.splits) for case in decode.cases if case.seq == 64] == [
        *[("eager", "3x3", None)],
        *[("triton", "3x3", splits) for splits in ("auto", 1, 2, 4)],
        *[("eager", "6x11", None)],
        *[("triton", "6x11", splits) for splits in ("auto", 1, 2, 4)],
        *[("sdpa-math", "", None)],
    ]
    assert len(decode.cases) == len(set(decode.cases)) == 2 * (2 * 5 + 1)
    assert decode.axes["splits"] == "auto, 1, 2, 4"
    without = plan("decode", splits="auto,1..4", seq="64", impl="eager,sdpa-math")
    assert [case.splits for case in without.cases] == [None, None]


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_only_decode_has_splits(pass_):
    other = plan(pass_, seq="64", impl="triton")
    assert [case.splits for case in other.cases] == [None]
    assert "splits" not in other.axes
    assert "--splits" not in other.cases[0].repro()


def test_the_baseline():
    assert plan().baseline == "eager"
    assert plan(impl="eager,compile", baseline="compile").baseline == "compile"
    for baseline, splits, expected in (
        ("eager", "2,4", [("eager", None)]),
        ("triton", "2,auto,4", [("triton", "auto")]),
        ("triton", "4", [("triton", 4)]),
    ):
        decode = plan("decode", seq="64", impl="eager,triton", baseline=baseline, splits=splits)
        assert [(case.impl, case.splits) for case in decode.cases if decode.is_baseline(case)] == expected
    fwd = plan(seq="64", impl="triton", baseline="triton", splits="2,4")
    assert fwd.is_baseline(fwd.cases[0])
    without = plan(impl="compile,sdpa-math")
    assert not any(map(without.is_baseline, without.cases))
    assert without.baseline is None
    assert "no speedups" in without.notes[0]


def test_plain_attention_alone_is_compared_with_the_best_library_kernel_that_runs_here(monkeypatch):
    assert plan(impl="c-tiled,sdpa-math,sdpa-flash,flex").baseline == "sdpa-flash"
    assert plan(impl="c-tiled,sdpa-math").baseline == "sdpa-math"
    assert plan(impl="c-tiled,sdpa-flash", baseline="c-tiled").baseline == "c-tiled"
    names = "sdpa-flash,sdpa-cudnn,flash-attn-3"
    assert make_plan(Options("fwd", impl=names), "cuda").baseline == "sdpa-cudnn"  # for GPUs that are elsewhere
    monkeypatch.setattr(
        estimate, "unsupported_reason", lambda case: "not installed" if case.impl == "sdpa-flash" else None
    )
    assert plan(impl="sdpa-math,sdpa-flash").baseline == "sdpa-math"
    alone = plan(impl="c-tiled")
    assert alone.baseline is None
    assert alone.notes == ("no speedups: sdpa-flash is not among --impl, and no --baseline is given",)


def test_beside_other_operations_a_plain_baseline_is_one_of_plain_attention():
    found = plan(seq="64", impl="eager,sdpa-math,sdpa-flash", baseline="sdpa-flash")
    assert found.notes == ("no speedups of conv-attention, which sdpa-flash does not compute",)
    (base,) = filter(found.is_baseline, found.cases)
    assert [case.impl for case in found.cases if case.is_compared_with(base)] == ["sdpa-math", "sdpa-flash"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq": "4k..1k"}, "descends"),
        ({"batch": "1", "tokens": "16k"}, "exclude each other"),
        ({"tokens": "1k,2k"}, "--tokens takes one number"),
        ({"head_dim": "64,257"}, "--head-dim 257 is out of range"),
        ({"heads": "6", "kv_heads": "4"}, "6 heads cannot share 4 KV heads"),
        ({"heads": "4,6", "kv_heads": "4"}, "6 heads cannot share 4 KV heads"),
        ({"dtype": "fp64"}, "'fp64' is not known; expected one or more of fp16, bf16, fp32"),
        ({"preset": "mta-7b"}, "no preset 'mta-7b'"),
        ({"impl": ""}, "--impl is empty"),
        ({"baseline": "nothing"}, "nothing"),
        ({"impl": "eager", "baseline": "sdpa-flash"}, "not measured in this sweep"),
        ({"baseline": "triton"}, "not measured in this sweep"),
        ({"timer": "stopwatch"}, "--timer 'stopwatch' is not known"),
        ({"timer": "events"}, "--timer events measures on a GPU"),
        ({"cache": "lukewarm"}, "--cache 'lukewarm' is not known"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"time_limit": -1.0}, "--time-limit is -1"),
        ({"time_limit": float("nan")}, "--time-limit is nan"),
        (
            {"pass_": "decode", "impl": "eager,triton", "baseline": "triton", "splits": "2,4"},
            "--baseline triton has splits 2, 4 here; add auto to --splits",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(options, words):
    with pytest.raises(UsageError) as caught:
        plan(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kv_heads_are_held_against_the_heads_of_this_device(gpu):
    assert values(plan(device="auto", kv_heads="8"), "heads") == [16]


RESULTS = Path(__file__).parents[2] / "results"
SWEEPS = [path for path in sorted(RESULTS.glob("nvidia-h200/*.csv")) if path.open().read(14) == "schema_version"]
TINY = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--seq", "16,24", "--impl", "eager,sdpa-math")
MEASURED = ("--device", "cpu", "--rounds", "1", "--no-plot")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_cells_of_committed_files_are_theirs(path):
    rows = read_file(path).rows()
    for pass_ in {"model" if row["pass"] in MODES else row["pass"] for row in rows}:
        plan = any_plan(Options(pass_, cells=path, device="cuda"), "cuda")
        of_pass = [row for row in rows if row["pass"] == pass_ or row["pass"] in MODES]
        assert sorted(map(key_of, plan.cases)) == sorted(map(key_of_row, of_pass))
        shapes = [case.shape_key for case in plan.cases]
        assert len(set(shapes)) == sum(one != before for one, before in zip(shapes, [None, *shapes], strict=False))


def test_a_file_is_measured_again_and_compared(mtabench, tmp_path):
    assert mtabench("fwd", *TINY, *MEASURED, "--conv", "2x3,none", "--op", "mta", "--out", "a.csv")[0] == 0
    out = printed(mtabench("fwd", "--cells", "a.csv", *MEASURED, "--out", "b.csv"))
    assert "cells of  a.csv" in out
    a, b = (list(csv.DictReader((tmp_path / name).open())) for name in ("a.csv", "b.csv"))
    assert list(map(key_of_row, a)) == list(map(key_of_row, b))
    assert [row["baseline"] for row in a] == [row["baseline"] for row in b]
    assert mtabench("compare", "a.csv", "b.csv", "--threshold", "99%")[0] != 2
    mtabench("fwd", "--cells", "a.csv", "--impl", "eager", *MEASURED, "--out", "c.csv")
    assert {row["impl"] for row in read_file(tmp_path / "c.csv").rows()} == {"eager"}


def test_what_is_no_file_of_such_cells_is_refused(mtabench):
    fwd = RESULTS / "nvidia-h200" / "fwd.csv"
    refused(mtabench("bwd", "--cells", fwd), "has no cell of bwd, but of fwd; give mtabench fwd --cells")
    train = RESULTS / "nvidia-h200" / "model-1b-train.csv"
    refused(mtabench("fwd", "--cells", train), "but of train; give mtabench model --cells")
    refused(mtabench("fwd", "--cells", fwd, "--seq", "1k"), "leave out --seq, or --cells")
    refused(mtabench("fwd", "--cells", fwd, "--no-causal"), "leave out --no-causal")
    refused(mtabench("decode", "--cells", fwd, "--splits", "4"), "leave out --splits")
    refused(mtabench("fwd", "--cells", fwd, "--impl", "compile"), "no cell of --impl compile; its cells are of eager, ")
    refused(mtabench("fwd", "--cells", fwd, "--baseline", "compile"), "--baseline compile is not measured")
    refused(mtabench("fwd", "--cells", "none.csv"), "there is no file none.csv")


def test_a_group_stands_for_those_of_it_that_the_file_has():
    ladder = RESULTS / "nvidia-h200" / "ladder.csv"
    of_all, of_group = (
        any_plan(Options("fwd", cells=ladder, impl=impl, device="cuda"), "cuda") for impl in (None, "ladder")
    )
    assert of_group.cases == of_all.cases


def test_a_plan_shows_what_its_cells_have():
    train = any_plan(Options("model", cells=RESULTS / "nvidia-h200" / "model-300m-train.csv"), "cuda")
    assert (train.axes["mode"], train.axes["layers"], train.axes["heads"]) == ("train", "20", "16")
    assert train.axes["steps"].endswith("; conv 6x11, conv in all layers")
    decode = any_plan(Options("decode", cells=RESULTS / "nvidia-h200" / "decode-pages.csv"), "cuda")
    assert decode.axes["heads"] == "16 on 8, 32 on 8, 64 on 8, 64 on 4"
    assert (decode.axes["batch"], decode.axes["page size"]) == ("1, 16, 64", "none, 128")


def test_cells_of_no_implementation_here_name_those_that_are(mtabench, tmp_path):
    fwd = RESULTS / "nvidia-h200" / "fwd.csv"
    (tmp_path / "theirs.csv").write_text(fwd.read_text().replace(",hopper,", ",theirs,"))
    refused(
        mtabench("fwd", "--cells", "theirs.csv", "--device", "cpu"),
        "has cells of theirs, which is no implementation here; give --impl eager,cuda-conv,",
    )
    (tmp_path / "own.csv").write_text(fwd.read_text().replace(",hopper,", ",mine:theirs,"))
    refused(mtabench("fwd", "--cells", "own.csv", "--device", "cpu"), "name its file, as --impl ./mine.py:theirs")
    (tmp_path / "heads.csv").write_text(fwd.read_text().replace(",16,16,", ",16,3,"))
    refused(mtabench("fwd", "--cells", "heads.csv", "--device", "cpu"), "3 heads cannot share 16 KV heads")


def test_processes_of_ab_find_the_file_from_other_folders(monkeypatch, tmp_path):
    from mtabench.cli import _sweep_words

    monkeypatch.chdir(tmp_path)
    assert _sweep_words(["fwd", "--cells", "a.csv"]).words[-2:] == ("--cells", str(tmp_path / "a.csv"))
    assert "--cells" not in _sweep_words(["fwd", "--seq", "16"]).words
