"""`--impl ladder` and `--op`: plain attention from loops in C to the fastest kernels, by the command line."""

import re
from pathlib import Path

import pytest
import torch
from command_line import refused
from planted_cells import changed

from mta_ladder import RUNGS, attention_reference, rung_unsupported
from mtabench import registry
from mtabench.checking.verify import CheckedShape, run_checks
from mtabench.registry import GROUPS, chosen, find
from mtabench.results.results_file import read_file

ROOT = Path(__file__).parents[2]
C_RUNGS = {  # none without a C compiler
    name
    for name in ("c-loops", "c-tiled")
    if rung_unsupported(name, device="cpu", dtype=torch.float32, head_dim=16) is None
}
TINY = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--rounds", "2", "--seq", "24")


def test_the_group_is_the_kernels_ladder_in_its_order():
    assert GROUPS["ladder"] == RUNGS
    assert all(find(name).op == "attention" for name in RUNGS)
    assert not set(GROUPS) & set(registry.names())


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
    code, out, _ = mtabench("fwd", "--op", "attention", "--impl", "ladder", *TINY, "--no-plot", "--out", "a.csv")
    assert code == 0
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
    code, out, _ = mtabench("verify", "--impl", "ladder", "--device", "cpu")
    assert code == 0
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


def test_an_operation_alone_takes_the_usual_implementations_of_it(mtabench):
    for op, one in (("attention", "sdpa-flash"), ("conv-attention", "eager")):
        _, out, _ = mtabench("fwd", "--op", op, *TINY, "--dry-run")
        (shown,) = [line.split(maxsplit=1)[1].split(", ") for line in out.splitlines() if "impl" in line]
        assert one in shown
        assert shown == [name for name in registry.default_names("fwd", "cpu") if find(name).op == op]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--impl", "lader"), ("did you mean ladder",)),
        (("--impl", "c-lops"), ("did you mean c-loops",)),
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
