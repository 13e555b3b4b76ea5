"""Implementations on a CPU: what they compute, and why they cannot."""

from dataclasses import replace

import pytest
import torch
from changed_cases import with_changes

from mta_kernels import torch_compile
from mta_kernels.operation import Operation
from mtabench.implementations import compile
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.registry import find

CONV = Case("fwd", "eager", Operation.of((4, 3), 16), "fp32", 2, 4, 2, 33, 16, None, "cpu")
PLAIN = with_changes(CONV, impl="sdpa-math", taps=None)


def build(case, inputs):
    return find(case.impl).build(case, inputs)


def test_conv_attention_needs_a_weight():
    with pytest.raises(ValueError, match="weight"):
        build(CONV, make_inputs(PLAIN))


def test_compiled_functions_are_of_one_case_each():
    """torch.compile stops compiling one code object after eight shapes."""
    first, second = (compile.compiled(replace(CONV, impl="compile", seq=seq)) for seq in (33, 34))
    assert first is compile.compiled(replace(CONV, impl="compile"))
    assert first is not second


def test_rungs_in_triton_are_checked_on_a_cpu_and_not_timed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = replace(PLAIN, impl="triton-fmha")
    assert "mtabench verify" in find(case.impl).why_not(case)
    assert find(case.impl).interpreted(case) is None


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
