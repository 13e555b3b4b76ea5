"""FlopCounterMode counts our operators, by hand counts of small shapes."""

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mta_kernels import flop_formulas
from mta_kernels.conv_attention import operators as conv_operators
from mta_kernels.multi_token_attention import norm_gate
from mta_kernels.multi_token_attention import operators as mta_operators
from mta_kernels.multi_token_attention.decode import operators as decode_operators

B, H, G, M, N, D = 2, 6, 3, 5, 7, 8  # batch, query heads, KV heads, queries, keys, head dim
SCORES = B * H * M * N


def x(*shape: int) -> torch.Tensor:
    return torch.empty(shape, requires_grad=True)


def counted(operator: Any, *arguments: Any) -> tuple[int, int]:
    """FLOPs of a call and of its backward, with tensors that hold no numbers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FlopCounterMode(display=False) as forward:
        found = operator(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    out = found if isinstance(found, torch.Tensor) else found[0]
    with FlopCounterMode(display=False) as backward:
        if out.requires_grad:
            out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_conv_attention() -> None:
    inputs = x(B, H, M, D), x(B, G, N, D), x(B, G, N, D), x(H, 3, 4)
    got = counted(conv_operators.CONV_ATTENTION, *inputs, True, 0.3, 1, 0, None, "triton")
    assert got == (SCORES * (2 * 2 * D + 2 * 12), SCORES * (5 * 2 * D + 2 * 2 * 12))


@pytest.mark.parametrize("paged", [False, True])
def test_conv_attention_decode(paged: bool) -> None:
    caches = [x(9, G, 16, D) if paged else x(B, G, 48, D) for _ in range(2)]
    table = torch.zeros(B, 3, dtype=torch.int32) if paged else None  # three pages of 16 keys
    tensors = x(B, H, 4, D), *caches, x(H, 3, 4), torch.zeros(B, dtype=torch.int32), table
    with torch.no_grad():
        got = counted(conv_operators.CONV_ATTENTION_DECODE, *tensors, 0.3, "both", 0, "triton")
    # Three rows of logits make one row of the output.
    assert got == (B * H * 48 * (3 * 2 * D + 2 * D + 2 * 12), 0)


def test_multi_token_attention() -> None:
    inputs = x(B, H, M, D), x(B, G, N, D), x(B, G, N, D)
    numbers = True, 0.3, 1, 1, 1, 3, None, "triton"  # mixes all heads before the softmax, and pairs after it
    mixers = x(H, 3, 4), x(H, H), x(H, 2, 5), x(H, H)
    steps = 2 * 12 + 2 * 6 + 2 * 10 + 2 * 2
    got = counted(mta_operators.MULTI_TOKEN_ATTENTION, *inputs, *mixers, *numbers)
    assert got == (SCORES * (2 * 2 * D + steps), SCORES * (5 * 2 * D + 2 * steps))
    plain = counted(mta_operators.MULTI_TOKEN_ATTENTION, *inputs, None, None, None, None, *numbers)
    assert plain == (SCORES * 2 * 2 * D, SCORES * 5 * 2 * D)


def test_multi_token_attention_decode() -> None:
    tensors = x(B, H, 3, D), x(B, G, N, D), x(B, G, N, D), x(H, 3, 4), x(H, H), None, x(H, H)
    after = None, None, None, x(D), x(D, D), x(D), torch.zeros(B, dtype=torch.int32), None
    with torch.no_grad():
        got = counted(decode_operators.DECODE, *tensors, *after, 1e-5, None, 0.3, 1, 0, 0, "triton")
    assert got == (B * H * N * (3 * 2 * D + 2 * D + 2 * 12 + 2 * 6 + 2 * 6) + B * H * 2 * D * D, 0)


def test_norm_gate() -> None:
    got = counted(norm_gate.NORM_GATE, x(B, H, M, D), x(D), 1e-5, 1.0, x(1, D), x(1))
    assert got == (B * H * M * 2 * D, B * H * M * 4 * D)
    assert counted(norm_gate.NORM_GATE, x(B, H, M, D), x(D), 1e-5, 1.0, None, None) == (0, 0)


def test_formulas_wait_for_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils, "flop_counter", sys.modules[flop_formulas.COUNTER])
    monkeypatch.delitem(sys.modules, flop_formulas.COUNTER)
    monkeypatch.setattr(sys, "meta_path", [entry for entry in sys.meta_path if entry is not flop_formulas._AtImport])
    monkeypatch.setattr(flop_formulas, "_formulas", [])
    flop_formulas.count_flops(flop_formulas.conv_attention)
    flop_formulas.count_flops(flop_formulas.norm_gate)
    importlib.util.find_spec(flop_formulas.COUNTER)  # a look alone
    counter = importlib.import_module(flop_formulas.COUNTER)
    assert {torch.ops.mta.conv_attention, torch.ops.mta.norm_gate} <= counter.flop_registry.keys()
    assert torch.ops.mta.conv_attention_backward not in counter.flop_registry
