"""Implementations: names and groups that are found, defaults for pass and device, why one cannot run; the ladder."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from changed_cases import with_changes
from command_line import printed, refused
from planted_cells import changed

from mta_kernels import torch_compile
from mta_kernels.operation import Operation
from mta_ladder import RUNGS, attention_reference, rung_unsupported
from mtabench import registry
from mtabench.checking.verify import CheckedShape, run_checks
from mtabench.errors import UsageError
from mtabench.problem.case import PASSES, Case
from mtabench.problem.inputs import make_inputs
from mtabench.problem.operations import OPS
from mtabench.registry import BASELINE, GROUPS, IMPLEMENTATIONS, chosen, default_names, every, find, names
from mtabench.results.results_file import read_file


def test_a_name_stands_for_one_entry_an_operation_and_the_baseline_for_one_of_each():
    assert len({(entry.name, entry.op, entry.of_models) for entry in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
    assert len(set(names())) == len(names())
    assert find(BASELINE).op == "conv-attention"
    assert {entry.op for entry in every(BASELINE)} == set(OPS) - {"attention"}
    assert all(entry.op != "attention" or len(every(entry.name)) == 1 for entry in IMPLEMENTATIONS)


@pytest.mark.parametrize("typed", ["xyzzy", "foo", "mine", "", "cub"])
def test_a_name_like_no_other_gets_all(typed):
    with pytest.raises(UsageError, match=", ".join(names())):
        find(typed)


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("sdpa", "sdpa-flash or sdpa-cudnn or sdpa-math"),
        ("tirton", "triton"),
        ("Hoper", "hopper"),
        ("lader", "ladder"),
    ],
)
def test_only_names_that_are_near_are_suggested(typed, near):
    with pytest.raises(UsageError) as caught:
        find(typed)
    assert f"did you mean {near}?" in str(caught.value)


def test_defaults_support_pass_and_device():
    usual = ["eager", "compile", "triton", "hopper", "sdpa-flash", "sdpa-cudnn"]
    assert [name for name in default_names("fwd", "cuda") if name in usual] == usual
    assert [name for name in default_names("fwd", "cpu") if name in usual] == ["eager", "compile", "sdpa-flash"]
    for device in ("cuda", "cpu"):
        for pass_ in PASSES:
            entries = [
                [i for i in every(name) if pass_ in i.passes and device in i.devices and not i.by_name]
                for name in default_names(pass_, device)
            ]
            assert all(entries)


CONV = Case("fwd", "eager", Operation.of((4, 3), 16), "fp32", 2, 4, 2, 33, 16, None, "cpu")


def build(case, inputs):
    return find(case.impl).build(case, inputs)


@pytest.mark.parametrize("splits", ["auto", 3])
def test_the_published_approach_gets_what_a_case_asks_for(splits, monkeypatch):
    from mta_ladder import cuda_conv

    calls = []
    monkeypatch.setattr(cuda_conv, "conv_attention", lambda *args, **options: calls.append(options))
    monkeypatch.setattr(cuda_conv, "conv_attention_decode", lambda *args, **options: calls.append(options))
    case = with_changes(CONV, impl="cuda-conv", causal=False)
    build(case, make_inputs(case))()
    decode = replace(case, pass_="decode", splits=splits)
    x = make_inputs(decode)
    build(decode, x)()
    common = {"scale": 0.25, "pad_key": "both"}
    assert calls == [{"causal": False, **common}, {"lengths": x.lengths, "splits": splits, **common}]


@pytest.mark.long
@pytest.mark.parametrize("pass_", ["bwd", "decode"])
def test_compiled_computes_the_reference(pass_):
    case = replace(CONV, impl="compile", pass_=pass_)
    reason = find("compile").why_not(case)
    if reason:
        pytest.skip(reason)
    x = make_inputs(case)
    out, expected = build(case, x)(), build(replace(case, impl="eager"), x)()
    torch.testing.assert_close(out, expected)
    if pass_ == "bwd":
        leaves = list(x.differentiable.values())
        gradients, exact = (torch.autograd.grad(result, leaves, x.dout) for result in (out, expected))
        for ours, theirs in zip(gradients, exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_compile_needs_a_compiler(monkeypatch):
    monkeypatch.setattr(torch_compile.shutil, "which", lambda name: None)
    assert "C++ compiler" in find("compile").why_not(replace(CONV, impl="compile"))


def test_triton_is_not_timed_on_a_cpu_or_interpreted(monkeypatch):
    case = replace(CONV, impl="triton")
    assert "mtabench verify" in find("triton").why_not(case)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in find("triton").why_not(replace(case, device="cuda"))


ROOT = Path(__file__).parents[2]
C_RUNGS = {  # none without a C compiler
    name
    for name in ("c-loops", "c-tiled")
    if rung_unsupported(name, device="cpu", dtype=torch.float32, head_dim=16) is None
}
TINY = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--rounds", "2", "--seq", "24")


def test_a_group_stands_for_its_members_once_each_where_it_is_named():
    assert [one.name for one in chosen(["sdpa-math", "c-tiled", "ladder"])] == [
        "sdpa-math", "c-tiled", *(name for name in RUNGS if name != "c-tiled"),
    ]  # fmt: skip


def test_no_sweep_measures_a_rung_that_it_was_not_asked_for():
    for pass_ in ("fwd", "bwd", "decode"):
        for device in ("cuda", "cpu"):
            assert set(registry.default_names(pass_, device)) & set(RUNGS) <= {"sdpa-flash", "sdpa-cudnn"}


def test_rungs_that_run_are_timed_the_others_say_why_not_and_all_are_drawn(mtabench, tmp_path, monkeypatch):
    monkeypatch.setitem(GROUPS, "ladder", tuple(name for name in RUNGS if name != "flex"))  # compiles for seconds
    out = printed(mtabench("fwd", "--op", "attention", "--impl", "ladder", *TINY, "--no-plot", "--out", "a.csv"))
    rows = {row["impl"]: row for row in read_file(tmp_path / "a.csv").rows()}
    assert set(rows) == set(RUNGS) - {"flex"}
    assert {row["op"] for row in rows.values()} == {"attention"}
    timed = [name for name, row in rows.items() if row["status"] == "ok"]
    assert set(timed) == {"sdpa-flash", *C_RUNGS}
    for name in set(rows) - set(timed):
        assert rows[name]["status"] == "unsupported"
        assert rows[name]["reason"]
    assert "NVIDIA GPU" in rows["cuda-naive"]["reason"]
    assert "mtabench verify" in rows["triton-fmha"]["reason"]
    assert rows["flash-attn"]["reason"] == "flash-attn needs a CUDA GPU"
    assert "conv" not in out.split("cells")[0]  # the plan names no convolution, which none of these has
    if len(timed) == 3:
        code, drawn, _ = mtabench("plot", "a.csv", "--kind", "ladder", "--formats", "svg")
        assert (code, drawn.split()) == (0, ["a-charts/fwd-ladder.svg"])
        shown = re.findall("<!-- (.*?) -->", (tmp_path / "a-charts" / "fwd-ladder.svg").read_text())
        assert set(timed) <= set(shown)
        note = " ".join(shown).partition("no valid time: ")[2]
        assert all(f"{name} (unsupported: " in note for name in set(rows) - set(timed))


@pytest.mark.skipif(not C_RUNGS, reason="no C compiler")
def test_verify_takes_groups_and_checks_rungs_without_a_gpu(mtabench, monkeypatch):
    monkeypatch.setitem(GROUPS, "ladder", ("c-loops", "triton-pointer", "sdpa-cudnn"))
    monkeypatch.setattr("mtabench.checking.verify.SHAPES", {"cpu": (CheckedShape(1, 2, 1, 17, 16, 2, 2),)})
    monkeypatch.setattr("mtabench.checking.verify.LONG_SHAPES", {"cpu": (), "interpreter": ()})
    monkeypatch.setattr("mtabench.checking.verify.DTYPES_CHECKED", {"cpu": ("fp32",)})
    out = printed(mtabench("verify", "--impl", "ladder", "--device", "cpu"))
    lines = out.splitlines()
    for name in ("c-loops", "triton-pointer"):
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{name}, "))
        assert lines[at + 1].startswith("  error fwd ")
        assert lines[at + 1].endswith("  ok")
    assert any(line.startswith("sdpa-cudnn") and "not checked" in line for line in lines)


def test_verify_leaves_out_a_pass_that_a_rung_has_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr("mtabench.checking.verify.SHAPES", {"cpu": (CheckedShape(1, 2, 1, 17, 16, 2, 2),)})
    monkeypatch.setattr("mtabench.checking.verify.LONG_SHAPES", {"cpu": (), "interpreter": ()})
    monkeypatch.setattr("mta_kernels.torch_compile.missing", lambda device: None)
    planted = changed(
        "flex", build=lambda case, x: lambda: attention_reference(x.q, x.k, x.v, **case.operation.options)
    )
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted)
    rows = list(run_checks(["flex"], "cpu"))
    checks = {row.check for row in rows}
    assert "error fwd" in checks
    assert "error bwd" not in checks
    assert all(row.ok for row in rows)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--impl", "eager,sdpa-flash", "--baseline", "ladder"), ("'ladder' stands for several", "c-loops")),
        (("--op", "attenton"), ("--op 'attenton'", "conv-attention, attention")),
        (("--op", "attention", "--impl", "eager"), ("--op attention excludes eager",)),
        (("--op", "conv-attention", "--impl", "ladder"), ("excludes c-loops",)),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_sentence(mtabench, typed, words):
    refused(mtabench("fwd", *TINY, *typed, "--dry-run"), *words)


def rows_by_shape(path: str) -> dict[tuple[int, int, str], dict[str, str]]:
    rows = (row for row in read_file(ROOT / path).rows() if row["status"] == "ok")
    return {(int(row["seq"]), int(row["head_dim"]), row["impl"]): row for row in rows}


def test_the_fused_rungs_are_as_fast_on_an_h200_as_they_must_be():
    timed = rows_by_shape("results/nvidia-h200/ladder.csv")
    flash = float(timed[8192, 128, "sdpa-flash"]["median_ms"])
    assert flash / float(timed[8192, 128, "cuda-flash"]["median_ms"]) >= 0.5
    assert flash / float(timed[8192, 128, "triton-fmha"]["median_ms"]) >= 0.8
