"""FLOPs of our operators for `torch.utils.flop_counter`, from shapes alone, as PyTorch counts its own attention.

Every query counts with every key: neither a mask nor documents nor lengths make it less. A forward has 2 products of
the head dim, a backward 5. A convolution takes 2 FLOPs a tap, a mixing 2 a head that it reads, twice that backwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"  # not imported here: it imports Triton, a third of a second
_formulas: list[Callable[..., int]] = []  # for when the counter is imported

Shape = Sequence[int]


def count_flops(*formulas: Callable[..., int]) -> None:
    """Let FlopCounterMode count the operators with the formulas' names, from their arguments, tensors as shapes."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER], formulas)
        return
    _formulas.extend(formulas)
    if _AtImport not in sys.meta_path:
        sys.meta_path.insert(0, _AtImport)


class _AtImport:
    """Finds the counter as Python does, and registers the formulas when its code has run."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == COUNTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module, _formulas)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(counter: Any, formulas: Sequence[Callable[..., int]]) -> None:
    for formula in formulas:
        counter.register_flop_formula(getattr(torch.ops.mta, formula.__name__))(formula)


def conv_attention(q: Shape, k: Shape, v: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Forward."""
    return 2 * _scores(q, k) * (q[3] + v[3] + math.prod(weight[1:]))


def conv_attention_backward(q: Shape, k: Shape, v: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Backward, which computes the logits again."""
    return 2 * _scores(q, k) * (3 * q[3] + 2 * v[3] + 2 * math.prod(weight[1:]))


def conv_attention_decode(
    q_window: Shape, k_cache: Shape, v_cache: Shape, weight: Shape, lengths: Shape, block_table: Shape | None = None,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    """The newest row over the capacity of the caches: its taps read scores of as many queries as they have rows."""
    scores = math.prod(q_window[:2]) * _capacity(k_cache, block_table)
    return 2 * scores * (weight[1] * q_window[3] + v_cache[3] + math.prod(weight[1:]))


def multi_token_attention(
    q: Shape, k: Shape, v: Shape, pre_conv: Shape | None, pre_mix: Shape | None, post_conv: Shape | None,
    post_mix: Shape | None, causal: bool, scale: float, pre_pad: int, post_pad: int, pre_groups: int, post_groups: int,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Forward."""
    mixers = _mixers(pre_conv, pre_mix, post_conv, post_mix, pre_groups, post_groups)
    return 2 * _scores(q, k) * (q[3] + v[3] + mixers)


def multi_token_attention_backward(
    q: Shape, k: Shape, v: Shape, pre_conv: Shape | None, pre_mix: Shape | None, post_conv: Shape | None,
    post_mix: Shape | None, logsumexp: Shape, grad_out: Shape, causal: bool, scale: float, pre_pad: int, post_pad: int,
    pre_groups: int, post_groups: int, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Backward, which computes the logits again."""
    mixers = _mixers(pre_conv, pre_mix, post_conv, post_mix, pre_groups, post_groups)
    return 2 * _scores(q, k) * (3 * q[3] + 2 * v[3] + 2 * mixers)


def multi_token_attention_decode(
    q_window: Shape, k_cache: Shape, v_cache: Shape, pre_conv: Shape | None, pre_mix: Shape | None,
    post_conv: Shape | None, post_mix: Shape | None, logits: Shape | None, logsumexp: Shape | None, seen: Shape | None,
    norm_weight: Shape | None, gate_weight: Shape | None, gate_bias: Shape | None, lengths: Shape,
    block_table: Shape | None = None, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """As `conv_attention_decode`, and the gate of the row; a state keeps the logits of rows before."""
    rows = math.prod(q_window[:2])
    queries = 1 if pre_conv is None else pre_conv[1]
    mixers = _mixers(pre_conv, pre_mix, post_conv, post_mix)
    attention = 2 * rows * _capacity(k_cache, block_table) * (queries * q_window[3] + v_cache[3] + mixers)
    return attention + 2 * rows * _gate(gate_weight)


def norm_gate(
    x: Shape, norm_weight: Shape | None, norm_eps: float, factor: float, gate_weight: Shape | None, *_: Any, **__: Any
) -> int:
    """Forward: the product of the gate."""
    return 2 * math.prod(x[:3]) * _gate(gate_weight)


def norm_gate_backward(
    x: Shape, grad: Shape, norm_weight: Shape | None, norm_eps: float, factor: float, gate_weight: Shape | None,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Backward: the products for the gradients of its input and of its weight."""
    return 4 * math.prod(x[:3]) * _gate(gate_weight)


def _scores(q: Shape, k: Shape) -> int:
    return math.prod(q[:3]) * k[2]


def _capacity(k_cache: Shape, block_table: Shape | None) -> int:
    """Keys that a sequence has room for; with a block table the cache holds pages."""
    return k_cache[2] * (1 if block_table is None else block_table[1])


def _gate(weight: Shape | None) -> int:
    return 0 if weight is None else math.prod(weight)


def _mixers(
    pre_conv: Shape | None, pre_mix: Shape | None, post_conv: Shape | None, post_mix: Shape | None,
    pre_groups: int = 1, post_groups: int = 1,
) -> int:  # fmt: skip
    """Multiply-adds a score."""
    taps = sum(math.prod(conv[1:]) for conv in (pre_conv, post_conv) if conv is not None)
    heads = ((pre_mix, pre_groups), (post_mix, post_groups))
    return taps + sum(mix[0] // groups for mix, groups in heads if mix is not None)
