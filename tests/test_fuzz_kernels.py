"""A short fuzz of the kernels without a GPU: Triton's in its interpreter, the CUDA ones in the emulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from emulated_decode import emulated_decode  # noqa: F401
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from emulated_kernels import Emulator
from fuzz.cases import FuzzCase, Kind, Parts, Target, draw, draw_for
from fuzz.inputs import Wanted, make_inputs
from fuzz.trial import Outcome, try_case
from kernel_inputs import DEVICE

SEED = 1
MTA_CASES = (2, 3, 7, 12, 15, 17)  # of few scores


def kind(dtype: str, head_dim: int, taps: tuple[int, int], pad_key: str, causal: bool) -> Kind:
    """Of conv attention."""
    return Kind(dtype, head_dim, 1, 1, taps, 0, None, 0, False, "", False, pad_key, causal, ("weight",))


# Each is a program that g++ builds; other tests have them built as well.
BANDED = kind("fp16", 64, (6, 11), "both", causal=True), kind("fp16", 40, (3, 4), "left", causal=False)
DECODE = kind("bf16", 64, (6, 11), "both", causal=True)


def assert_passes(case: FuzzCase) -> Outcome:
    outcome = try_case(case)
    assert not outcome.wrong, f"{outcome.wrong}\n{case.described()}"
    return outcome


def assert_most_ran(outcomes: Iterable[Outcome]) -> None:
    refused = [outcome.refused for outcome in outcomes]
    assert sum(refused) < len(refused) / 4


def assert_emulated(emulated: Emulator, kind: Kind, count: int, target: Target) -> None:
    outcomes = []
    for emulated.seed in range(count):
        outcomes.append(assert_passes(draw_for(kind, "emulated", SEED, emulated.seed, target, "cpu")))
    assert_most_ran(outcomes)


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton has a GPU to run on")
def test_triton() -> None:
    target = Target("conv-attention", "triton")
    assert_most_ran(assert_passes(draw(SEED, number, (target,), "cpu")) for number in range(2, 12))


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton has a GPU to run on")
def test_triton_of_all_parts() -> None:
    target = Target("mta", "triton")
    assert_most_ran(assert_passes(draw(SEED, number, (target,), "cpu")) for number in MTA_CASES)


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton has a GPU to run on")
@pytest.mark.parametrize("seed", [47, 89, 379])
def test_triton_folds_taps_into_queries(seed: int) -> None:
    """A decode rounds these queries, each key tap's apart: a huge key shows that where its products nearly cancel."""
    drawn = draw(seed, 27, (Target("mta", "triton", True),), "cpu")
    parts = Parts(True, (), None, (2, 2), "random", None, None, (), False, 0.0, ())
    case = replace(
        drawn, form="contiguous", dtype="fp16", batch=1, heads=2, kv_heads=1, seq_len=32, query_rows=1, history=0,
        head_dim=64, query_taps=1, key_taps=7, pad_key="both", scale=None, weight="random", weight_dtype="fp16",
        values="huge key", way="plain", twice=False, probe="none", lengths=(32,), page_size=None, splits="auto",
        layouts=(), parts=parts, replaced=None,
    )  # fmt: skip
    assert Wanted(make_inputs(case)).variance["out"].isfinite().all()
    assert_passes(case)


@pytest.mark.parametrize("kind", BANDED, ids=str)
@pytest.mark.parametrize(("backend", "fixture"), [("hopper", "emulator"), ("cuda", "emulated_forward")])
def test_forward_and_backward(
    request: pytest.FixtureRequest, backend: str, fixture: str, kind: Kind
) -> None:  # fmt: skip
    assert_emulated(request.getfixturevalue(fixture), kind, 10, Target("conv-attention", backend))


def test_decode(request: pytest.FixtureRequest) -> None:
    assert_emulated(
        request.getfixturevalue("emulated_decode"), DECODE, 20, Target("conv-attention", "cuda", decode=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    "target", [Target("conv-attention", "triton"), Target("conv-attention", "cuda"), Target("mta", "triton")]
)
def test_on_a_gpu(target: Target, decode: bool) -> None:
    target = target._replace(decode=decode)
    assert_most_ran(assert_passes(draw(SEED, number, (target,), "cuda")) for number in range(20))
