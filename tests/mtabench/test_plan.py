"""From options to cells: defaults, presets, order, and refusals that name what to change."""

import dataclasses

import pytest
from typer.main import get_command

from mtabench import environment
from mtabench.cli import app
from mtabench.errors import UsageError
from mtabench.measuring.timing import Settings
from mtabench.registry import default_names, find
from mtabench.sweeps import readiness
from mtabench.sweeps.estimate import PROCESS_S, RATES, estimate_seconds, shown
from mtabench.sweeps.plan import Options, make_plan


def plan(pass_="fwd", **options):
    return make_plan(Options(pass_, **({"device": "cpu"} | options)))


def values(plan, name):
    return list(dict.fromkeys(getattr(case, name) for case in plan.cases))


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU is only asked for by name."""
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


def test_the_repro_line_of_a_cell_plans_that_cell():
    decode = plan("decode", seq="64", kv_heads="2", impl="eager,triton,sdpa-math", splits="auto,1,24")
    for case in (*plan("fwd", seq="64", causal=False).cases, *decode.cases):
        name, *words = case.repro().split()[1:]
        parsed = get_command(app).commands[name].make_context(name, words).params
        fields = {field.name for field in dataclasses.fields(Options)}
        options = {key: value for key, value in parsed.items() if key in fields}
        assert make_plan(Options(name, **options)).cases == (case,)


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
        readiness, "unsupported_reason", lambda case: "not installed" if case.impl == "sdpa-flash" else None
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
        ({"seq": ""}, "--seq is empty"),
        ({"batch": "0"}, "--batch is 0"),
        ({"batch": "1", "tokens": "16k"}, "exclude each other"),
        ({"tokens": "1k,2k"}, "--tokens takes one number"),
        ({"head_dim": "8"}, "--head-dim 8 is out of range"),
        ({"head_dim": "64,257"}, "--head-dim 257 is out of range"),
        ({"heads": "6", "kv_heads": "4"}, "6 heads cannot share 4 KV heads"),
        ({"heads": "4,6", "kv_heads": "4"}, "6 heads cannot share 4 KV heads"),
        ({"kv_heads": "3"}, "4 heads cannot share 3"),
        ({"conv": "17x3"}, "--conv 17x3 is out of range"),
        ({"dtype": "fp64"}, "'fp64' is not known; expected one or more of fp16, bf16, fp32"),
        ({"preset": "mta-7b"}, "no preset 'mta-7b'"),
        ({"impl": "tritn"}, "triton"),
        ({"impl": ""}, "--impl is empty"),
        ({"baseline": "nothing"}, "nothing"),
        ({"impl": "eager", "baseline": "sdpa-flash"}, "not measured in this sweep"),
        ({"baseline": "triton"}, "not measured in this sweep"),
        ({"device": "tpu"}, "tpu"),
        ({"timer": "stopwatch"}, "--timer 'stopwatch' is not known"),
        ({"timer": "events"}, "--timer events measures on a GPU"),
        ({"cache": "lukewarm"}, "--cache 'lukewarm' is not known"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"time_limit": -1.0}, "--time-limit is -1"),
        ({"time_limit": float("nan")}, "--time-limit is nan"),
        ({"splits": "many"}, "--splits"),
        ({"splits": "auto,256"}, "--splits 256 is out of range"),
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


def test_estimates_grow_with_work_up_to_the_time_limit():
    def seconds(seq, limit=10.0):
        return estimate_seconds(plan(seq=seq).cases, Settings(time_limit_s=limit))

    assert 1 < seconds("64") < seconds("1k") < seconds("4k") < 600
    assert seconds("1k", limit=1.0) < seconds("1k")
    one, four = (plan("decode", seq="1k", impl="triton", splits=splits).cases for splits in ("1", "1..8"))
    assert len(four) == 4
    once, rest = (estimate_seconds(cases, Settings()) for cases in (one, four[1:]))
    together = estimate_seconds(four, Settings())
    assert once + rest - together > RATES["cpu"].compile_s  # compiled once, and checked against one reference
    isolated = estimate_seconds(four, Settings(), isolated=True)
    assert isolated > together + 4 * PROCESS_S
    assert [shown(s) for s in (0.01, 45, 200, 8000)] == ["1 s", "45 s", "3 min", "2.2 h"]
