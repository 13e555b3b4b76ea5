"""A short fuzz of the kernels without a GPU: Triton's in its interpreter, the CUDA ones in the emulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from emulated_decode import emulated_decode  # noqa: F401
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from emulated_kernels import Emulator
from kernel_inputs import DEVICE

from fuzz.cases import Constants, FuzzCase, draw_for
from fuzz.draws import Target, draw
from fuzz.inputs import expected, make_inputs
from fuzz.mta_cases import draw_mta
from fuzz.trial import Outcome, try_case

SEED = 1
MTA_CASES = (2, 3, 7, 12, 15, 17)  # of few scores
# Each is a program that g++ builds; other tests have them built as well.
BANDED = (
    Constants(decode=False, dtype="fp16", head_dim=64, taps=(6, 11), pad_key="both", causal=True),
    Constants(decode=False, dtype="fp16", head_dim=40, taps=(3, 4), pad_key="left", causal=False),
)
DECODE = Constants(decode=True, dtype="bf16", head_dim=64, taps=(6, 11), pad_key="both", causal=True)


def assert_passes(case: FuzzCase) -> Outcome:
    outcome = try_case(case)
    assert not outcome.wrong, f"{outcome.wrong}\n{case.described()}"
    return outcome


def assert_most_ran(outcomes: Iterable[Outcome]) -> None:
    refused = [outcome.refused for outcome in outcomes]
    assert sum(refused) < len(refused) / 4


def assert_emulated(emulated: Emulator, constants: Constants, count: int, backend: str) -> None:
    outcomes = []
    for emulated.seed in range(count):
        outcomes.append(assert_passes(draw_for(constants, SEED, emulated.seed, backend, "cpu")))
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
    drawn = draw_mta(1795805042, 27, "triton", "cuda")
    assert drawn.parts is not None
    assert drawn.values == "huge key"
    parts = replace(drawn.parts, post_mix=(2, 2), norm_eps=None, depth=None, gate=(), gate_bias=False, in_float32=())
    small = replace(drawn, heads=2, head_dim=64, batch=1, seq_len=32, lengths=(32,), query_rows=1, parts=parts)
    plain = replace(small, form="contiguous", page_size=None, twice=False, probe="none")
    case = replace(plain, device="cpu", seed=seed)
    assert expected(make_inputs(case))["out"].variance.isfinite().all()
    assert_passes(case)


@pytest.mark.parametrize("constants", BANDED, ids=str)
@pytest.mark.parametrize(("backend", "fixture"), [("hopper", "emulator"), ("cuda", "emulated_forward")])
def test_forward_and_backward(
    request: pytest.FixtureRequest, backend: str, fixture: str, constants: Constants
) -> None:  # fmt: skip
    assert_emulated(request.getfixturevalue(fixture), constants, 10, backend)


def test_decode(request: pytest.FixtureRequest) -> None:
    assert_emulated(request.getfixturevalue("emulated_decode"), DECODE, 20, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "target", [Target("conv-attention", backend) for backend in ("triton", "cuda", "auto")] + [Target("mta", "triton")]
)
def test_on_a_gpu(target: Target) -> None:
    assert_most_ran(assert_passes(draw(SEED, number, (target,), "cuda")) for number in range(20))
