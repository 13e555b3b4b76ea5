"""What the whole multi-token attention refuses: one sentence with what was given and what is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mta_kernels.conv_attention import conv_attention
from mta_kernels.multi_token_attention import (
    MultiTokenAttention,
    explain,
    multi_token_attention,
    multi_token_attention_reference,
    unsupported,
)
from mta_kernels.operation import HeadMix, Operation

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"pre_mix": [[1.0]]}, TypeError, "pre_mix is a list; expected a tensor"),
    "taps of other heads": (
        {"post_conv": torch.ones(3, 2, 2)}, ValueError,
        r"post_conv has shape \(3, 2, 2\); expected \[query heads, query taps, key taps\] with 4 query heads",
    ),
    "taps with the original's dimension": (
        {"pre_conv": torch.ones(4, 1, 2, 2)}, ValueError, r"pre_conv has shape \(4, 1, 2, 2\); expected"
    ),
    "a mixing of other heads": (
        {"pre_mix": torch.ones(3, 3)}, ValueError,
        r"pre_mix has shape \(3, 3\), which mixes 3 heads, and q has 4; give \[4, 4\] \(out, in\), "
        r"or \[groups, c, c\] with groups \* c = 4",
    ),
    "groups that do not divide": (
        {"post_mix": torch.ones(2, 3, 3)}, ValueError, r"mixes 6 heads, and q has 4; give \[4, 4\] \(in, out\)"
    ),
    "a mixing that is not square": ({"post_mix": torch.ones(4, 2)}, ValueError, r"expected \[4, 4\] \(in, out\), or"),
    "a mixing of numbers": ({"post_mix": torch.ones(4)}, ValueError, r"post_mix has shape \(4,\); expected \[4, 4\]"),
    "a mixing in float64": (
        {"pre_mix": torch.eye(4).double()}, TypeError, r"pre_mix has dtype torch.float64; expected torch.float32, as q"
    ),
    "a mixing on another device": (
        {"pre_mix": torch.eye(4, device="meta")}, ValueError, "pre_mix is on meta and q on cpu"
    ),
    "a norm of other numbers": (
        {"norm_weight": torch.ones(4)}, ValueError, r"norm_weight has shape \(4,\); expected \[8\]"
    ),
    "eps below 0": ({"norm_eps": -1.0}, ValueError, "norm_eps is -1.0; expected a finite number from 0 on"),
    "depth without a norm": ({"depth": 2}, ValueError, "depth is 2 and norm_weight is missing"),
    "a layer before the first": (
        {"depth": -1, "norm_weight": torch.ones(8)}, ValueError, "depth is -1; expected the layer's index"
    ),
    "a gate of other numbers": ({"gate_weight": torch.ones(2, 8)}, ValueError, r"expected \[1, 8\] or \[8, 8\]"),
    "a bias without a gate": ({"gate_bias": torch.ones(1)}, ValueError, "gate_bias is given without gate_weight"),
    "a bias of other numbers": (
        {"gate_weight": torch.ones(1, 8), "gate_bias": torch.ones(8)}, ValueError,
        r"gate_bias has shape \(8,\); expected \[1\], as many numbers as gate_weight has rows",
    ),
    "everything dropped": ({"dropout": 1.0}, ValueError, "dropout is 1.0; expected a number from 0 to below 1"),
    "a seed below 0": ({"dropout": 0.5, "seed": -1}, ValueError, "seed is -1; expected a whole number"),
    "a seed in float": (
        {"dropout": 0.5, "seed": torch.tensor(1.0)}, ValueError, "expected a whole number, or a torch.int64"
    ),
    "an unknown padding": ({"pad_key": "up"}, ValueError, "pad_key is 'up'; expected one of 'both', 'left', 'right'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("function", [multi_token_attention, multi_token_attention_reference])
def test_one_sentence_says_what_is_wrong(case, function) -> None:
    options, error, sentence = WRONG[case]
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(error, match=sentence) as raised:
        function(q, q, q, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("function", [multi_token_attention, multi_token_attention_reference])
def test_a_chunk_needs_the_queries_that_both_convolutions_read(function) -> None:
    q, taps = torch.randn(1, 4, 6, 8), torch.ones(4, 3, 2)
    with pytest.raises(ValueError, match=r"looks back on 4 queries: give q_history \[1, 4, 3 or more, 8\]"):
        function(q[:, :, 3:], q, q, pre_conv=taps, post_conv=taps)
    with pytest.raises(ValueError, match=r"looks back on 2 queries"):
        function(q[:, :, 3:], q, q, post_conv=taps)
    assert function(q[:, :, 3:], q, q, pre_mix=torch.eye(4)).shape == (1, 4, 3, 8)
    with pytest.raises(ValueError, match="cu_seqlens and q_history are both given"):
        function(q, q, q, pre_mix=torch.eye(4), q_history=q, cu_seqlens=torch.tensor([0, 6]))


def test_an_unknown_backend() -> None:
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match="backend is 'hooper'; expected 'auto' or one of 'reference'"):
        multi_token_attention(q, q, q, pre_mix=torch.eye(4), backend="hooper")
    with pytest.raises(ValueError, match="backend is 'hooper'; expected 'auto' or one of 'reference'"):
        multi_token_attention(q, q, q, backend="hooper")


def test_rows_that_are_not_there() -> None:
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match=r"rows is \(3, 7\); expected \(start, stop\) with 0 <= start < stop <= 6"):
        multi_token_attention_reference(q, q, q, rows=(3, 7))
    with pytest.raises(ValueError, match="rows and cu_seqlens are both given"):
        multi_token_attention_reference(q, q, q, rows=(0, 1), cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"post_mix": 3}, "post_mix is 3; expected True, False, 'linear' or the heads of a group, a number"),
        ({"post_mix": 0}, "post_mix is 0"),
        ({"pre_mix": 2}, "pre_mix is 2; expected True, for all 4 heads, or False"),
        ({"post_mix": "heads"}, "post_mix is 'heads'"),
        ({"gate": "half"}, "gate is 'half'; expected True, False or 'full'"),
        ({"norm": False, "depth": 1}, "depth is 1 and norm is False"),
        ({"pad_key": "up"}, "pad_key is 'up'"),
    ],
)  # fmt: skip
def test_parts_of_the_module_that_do_not_fit(options, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        MultiTokenAttention(4, 8, **options)


def test_what_conv_attention_computes_is_computed_by_it() -> None:
    q, taps = torch.randn(1, 4, 12, 16), torch.randn(4, 3, 2)
    assert torch.equal(multi_token_attention(q, q, q, pre_conv=taps), conv_attention(q, q, q, taps))
    plain = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(multi_token_attention(q, q, q, backend="reference"), plain)
    assert explain(q, q, q, pre_conv=taps).reason.startswith("conv_attention computes this")


def test_a_choice_says_why() -> None:
    q, mix = torch.randn(1, 4, 12, 16), {"pre_mix": torch.eye(4)}
    assert str(explain(q, q, q, **mix)).startswith("triton: the fastest backend for these arguments")
    assert str(explain(q, q, q, **mix, backend="reference")) == "reference: asked for"
    assert "dropout" in explain(q, q, q, **mix, dropout=0.1).reason
    with pytest.raises(ValueError, match=r"backend 'hopper' runs .*; expected 'auto' or one of 'reference', 'triton'"):
        explain(q, q, q, **mix, backend="hopper")
    cell: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "head_dim": 16, "heads": 4}
    operation = Operation(None, 1.0, True, pre_mix=HeadMix())
    assert unsupported("triton", operation=operation, **cell) is None
    assert "dropout" in unsupported("triton", operation=operation, **cell, dropout=0.1)
