"""`run_checks`: right kernels pass every check, and each check finds the fault that it is there for."""

from dataclasses import replace

import planted_cells
import pytest

from mta_kernels import gpu_limits, score_chunks
from mta_kernels.conv_attention import conv_attention_reference
from mtabench import registry
from mtabench.checking import verify
from mtabench.checking.verify import CheckedShape, run_checks

LONG = (CheckedShape(2, 1, 1, 41, 16, 2, 2),)
MTA = (
    CheckedShape(1, 4, 2, 29, 16, 4, 3, convolved=False, mix="heads"),
    CheckedShape(1, 2, 1, 29, 16, 4, 3, mix="heads+none", post_conv=(3, 5)),
    CheckedShape(2, 4, 2, 11, 16, 3, 3, causal=False, mix="none+2", post_conv=(2, 2)),
)
MTA_LONG = (CheckedShape(1, 2, 1, 41, 16, 3, 2, mix="heads", post_conv=(2, 3)),)  # beyond a chunk of `small`
SHAPES = {"cpu": (CheckedShape(1, 4, 2, 17, 16, 4, 3), CheckedShape(2, 1, 1, 5, 16, 2, 2, causal=False))}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(verify, "SHAPES", SHAPES)
    monkeypatch.setattr(verify, "LONG_SHAPES", {"cpu": LONG, "interpreter": LONG})
    for name, shapes in (("MTA_SHAPES", MTA), ("MTA_LONG_SHAPES", MTA_LONG)):
        monkeypatch.setattr(verify, name, dict.fromkeys(("cpu", "interpreter"), shapes))
    monkeypatch.setattr(score_chunks, "CHUNK_ROWS", 32)
    monkeypatch.setattr(gpu_limits, "INTERPRETED_SM_COUNT", 2)
    monkeypatch.setattr(verify, "DTYPES_CHECKED", {"cpu": ("fp32",)})
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def plant(monkeypatch, kernel):
    """Eager becomes `kernel(q, k, v, weight, causal)`."""

    def build(case, x):
        return lambda: kernel(x.q, x.k, x.v, x.weight, case.operation.causal)

    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_cells.changed("eager", build=build))
    return {row.check for row in run_checks(["eager"], "cpu") if not row.ok}


@pytest.mark.parametrize("name", ["eager", pytest.param("triton", marks=pytest.mark.long), "sdpa-flash", "sdpa-math"])
def test_right_kernels_pass_every_check(name):
    rows = list(run_checks([name], "cpu"))
    assert [row for row in rows if not row.ok] == []
    checks = {row.check for row in rows}
    of_passes = {f"{check} {one}" for check in ("error", "strided", "long") for one in ("fwd", "bwd", "decode")}
    assert of_passes <= checks
    assert {"decode is forward's row", "batch and heads apart", "another scale fwd"} <= checks
    assert ("decode in pages" in checks) == (not name.startswith("sdpa"))
    for row in rows:
        assert row.implementation == name
        assert row.rel_error is None or row.rel_error <= row.tolerance


@pytest.mark.parametrize("fault", [0, 1e-3])
def test_decode_alone_is_checked_as_decode(monkeypatch, fault):
    """No check runs a forward of an implementation that has none."""
    build = registry.find("eager").build

    def only_decode(case, inputs):
        assert case.pass_ == "decode"
        step = build(case, inputs)
        return lambda: step() * (1 + fault)

    planted = planted_cells.changed("eager", passes=("decode",), build=only_decode)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted)
    rows = list(run_checks(["eager"], "cpu"))
    decode = {f"{check} decode" for check in ("error", "strided", "long", "another scale")}
    decode |= {"decode is forward's row", "decode in pages"}
    assert {row.check for row in rows} == decode
    assert all(row.ok == (not fault) for row in rows)


@pytest.mark.parametrize("fault", [lambda scale, usual: usual, lambda scale, usual: abs(scale)], ids=["usual", "abs"])
def test_a_scale_that_is_ignored_is_found(monkeypatch, fault):
    build = registry.find("eager").build

    def faulty(case, inputs):
        scale = fault(case.operation.scale, case.head_dim**-0.5)
        return build(replace(case, operation=replace(case.operation, scale=scale)), inputs)

    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_cells.changed("eager", build=faulty))
    wrong = {row.check for row in run_checks(["eager"], "cpu") if not row.ok}
    assert wrong == {"another scale fwd", "another scale decode"}


def test_dtypes_apart_are_all_of_them(monkeypatch):
    """Processes that check a dtype each do what one process does, on the same inputs."""
    monkeypatch.setattr(verify, "DTYPES_CHECKED", {"cpu": ("fp32", "fp16")})
    monkeypatch.setattr(verify, "LONG_SHAPES", {"cpu": ()})
    whole = list(run_checks(["sdpa-math"], "cpu", 3))
    apart = [row for dtype in ("fp32", "fp16") for row in run_checks(["sdpa-math"], "cpu", 3, [dtype])]
    assert len({row.shape.split()[0] for row in whole}) == 2
    assert sorted(map(repr, whole)) == sorted(map(repr, apart))


def test_a_dout_that_a_library_cannot_take_is_said_and_not_given(monkeypatch):
    right = registry.find("eager")
    seen = []

    def build(case, inputs):
        if inputs.dout is not None:
            seen.append(0 in inputs.dout.stride())
        return right.build(case, inputs)

    planted = planted_cells.changed("eager", build=build, no_expanded_dout="why not")
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted)
    *rows, last = run_checks(["eager"], "cpu")
    assert last.reason == "dout of one row expanded over all: why not"
    assert {"strided bwd", "strided fwd"} <= {row.check for row in rows}
    assert seen
    assert not any(seen)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_cells.changed("eager", no_expanded_dout=""))
    assert not [row for row in run_checks(["eager"], "cpu") if "dout of one row" in row.reason]
    assert any(seen)


@pytest.mark.parametrize(
    ("leaked", "check"),
    [
        (lambda q, v, out: 1e-9 * v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1), "error fwd"),
        (lambda q, v, out: 1e-7 * out.mean(1, keepdim=True), "batch and heads apart"),
    ],
    ids=["from the future", "between heads"],
)
def test_a_leak_is_found_however_small_it_is(monkeypatch, leaked, check):
    def leak(q, k, v, weight, causal):
        out = conv_attention_reference(q, k, v, weight, causal=causal)
        return out + leaked(q, v, out)

    assert check in plant(monkeypatch, leak)


def test_another_shape_is_the_reason_of_every_check(monkeypatch):
    """Tokens before heads: some checks compared the wrong parts and passed, others raised an error of their own."""

    build = registry.find("sdpa-math").build

    def tokens_first(case, x):
        call = build(case, x)
        return call if case.pass_ == "decode" else lambda: call().transpose(1, 2)

    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_cells.changed("sdpa-math", build=tokens_first))
    rows = list(run_checks(["sdpa-math"], "cpu"))
    rows = [row for row in rows if "decode" not in row.check]
    assert len(rows) > 5
    assert [row.check for row in rows if not row.reason.startswith("out is ")] == []


def test_what_raises_is_wrong(monkeypatch):
    def broken(*args):
        raise RuntimeError("no\nkernel image")

    planted = planted_cells.changed("eager", build=lambda case, x: broken)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted)
    rows = list(run_checks(["eager"], "cpu"))
    assert not any(row.ok for row in rows)
    assert rows[0].reason == "RuntimeError: no kernel image"
