"""Wrong calls of the public API are refused in one sentence of ours: what was given and what is expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    conv_attention_decode,
    conv_attention_reference,
    identity_weight,
)
from mta_kernels.conv_attention import explain as explain_conv_attention
from mta_kernels.multi_token_attention import (
    DecodeState,
    MultiTokenAttention,
    explain,
    layer_entries,
    multi_token_attention,
    multi_token_attention_decode,
    multi_token_attention_reference,
    prefill_state,
)

Q = torch.randn(1, 4, 8, 16)
QKV = {"q": Q, "k": Q, "v": Q}
MIX, TAPS, LENGTHS = torch.eye(4), torch.randn(4, 3, 3), torch.tensor([8], dtype=torch.int32)
NORM, ONE = torch.ones(16), torch.ones(())
STEP = {"q_window": Q[:, :, -3:], "k_cache": Q, "v_cache": Q, "lengths": LENGTHS}
HUGE = 10**5000  # more digits than Python prints


class Function:
    """A public function with arguments that fit; `names` are the ones that it takes."""

    def __init__(self, function: Callable[..., Any], **given: Any) -> None:
        self.lacks = given.pop("lacks", ())
        self.function, self.given = function, given
        self.names = {*inspect.signature(function).parameters} - {*self.lacks}

    def __call__(self, **changes: Any) -> Any:
        return self.function(**self.given | changes)


FUNCTIONS = {
    "conv_attention": Function(conv_attention, **QKV, weight=TAPS),
    "conv_attention explain": Function(explain_conv_attention, **QKV, weight=TAPS),
    "conv_attention_reference": Function(
        conv_attention_reference, **QKV, weight=TAPS, lacks=("q", "v", "weight", "cu_seqlens")
    ),
    "conv_attention_decode": Function(conv_attention_decode, **STEP, weight=TAPS),
    "multi_token_attention": Function(multi_token_attention, **QKV, pre_mix=MIX),
    "explain": Function(explain, **QKV, pre_mix=MIX, lacks=("cu_seqlens",)),
    "explain decode": Function(
        partial(explain, decode=True), **QKV, pre_mix=MIX, lacks=("cu_seqlens", "backend", "dropout")
    ),
    "multi_token_attention_reference": Function(multi_token_attention_reference, **QKV, pre_mix=MIX),
    "multi_token_attention_decode": Function(multi_token_attention_decode, **STEP, pre_mix=MIX),
    "prefill_state": Function(prefill_state, q_window=Q, k_cache=Q, lengths=LENGTHS, post_conv=TAPS),
    "ConvAttention": Function(ConvAttention, heads=4),
    "MultiTokenAttention": Function(
        MultiTokenAttention, heads=4, head_dim=16, lacks=("pre_conv", "post_conv", "pre_mix", "post_mix", "depth")
    ),
}
Wrong = tuple[dict[str, Any], type[Exception], str]
# Each is refused by all functions that take what it changes.
WRONG: dict[str, Wrong] = {
    "scale of a letter": ({"scale": "a"}, TypeError, "scale is 'a'; expected"),
    "scale of NaN": ({"scale": float("nan")}, ValueError, "scale is nan; expected a"),
    "scale of infinity": ({"scale": -float("inf")}, ValueError, "scale is -inf; expected a"),
    "scale of 400 digits": ({"scale": -(10**400)}, ValueError, "scale is about -1e400; expected"),
    "scale of two numbers": ({"scale": np.ones(2)}, TypeError, r"scale is array\(.* expected one number"),
    "learned scale": ({"scale": ONE.clone().requires_grad_()}, TypeError, "multiply q by it"),
    "causal": ({"causal": "no"}, TypeError, "causal is 'no'; expected True or False"),
    "causal of two": ({"causal": torch.ones(2)}, TypeError, r"causal is tensor\(.* expected True or False"),
    "pad_key": ({"pad_key": "up"}, ValueError, "pad_key is 'up'; expected one of 'both', 'left', 'right'"),
    "backend": ({"backend": "hooper"}, ValueError, "backend is 'hooper'; expected 'auto' or one of 'reference', 'tr"),
    "rows": ({"rows": 3}, ValueError, "rows is 3; expected"),
    "rows of words": ({"rows": ("a", "b")}, ValueError, r"rows is \('a', 'b'\); expected"),
    "rows that are not there": ({"rows": (3, 9)}, ValueError, r"rows is \(3, 9\); .* 0 <= start < stop <= 8"),
    "rows of documents": (
        {"rows": (0, 3), "cu_seqlens": torch.tensor([0, 8])}, ValueError, "rows and cu_seqlens are both given"
    ),
    "head_chunk of True": ({"head_chunk": True}, ValueError, "head_chunk is True; expected"),
    "head_chunk of 0": ({"head_chunk": 0}, ValueError, "head_chunk is 0; expected"),
    "head_chunk of 5000 digits": ({"head_chunk": -HUGE}, ValueError, "head_chunk is about -1e5000; expected"),
    "splits of True": ({"splits": True}, ValueError, "splits is True; expected"),
    "splits of 5000 digits": ({"splits": HUGE}, ValueError, "splits is about 1e5000"),
    "splits of the reference": ({"splits": 2, "backend": "reference"}, ValueError, "does not split"),
    "dropout": ({"dropout": "x"}, ValueError, "dropout is 'x'; expected"),
    "everything dropped": ({"dropout": 1.0}, ValueError, "dropout is 1.0; expected a number from 0 to below 1"),
    "dropout of 5000 digits": ({"dropout": HUGE}, ValueError, "dropout is about 1e5000; expected"),
    "a seed below 0": ({"dropout": 0.5, "seed": -1}, ValueError, "seed is -1; expected a whole number"),
    "a seed in float": ({"dropout": 0.5, "seed": ONE}, ValueError, "expected a whole number, or a torch.int64"),
    "a seed of 5000 digits": ({"dropout": 0.5, "seed": HUGE}, ValueError, "seed is about 1e5000"),
    "depth": ({"norm_weight": NORM, "depth": -1}, ValueError, "depth is -1; expected the layer's index"),
    "depth of 2**63": ({"norm_weight": NORM, "depth": 2**63}, ValueError, r"depth is 9.* from 0 to 2\*\*63 - 1"),
    "depth of 400 digits": ({"norm_weight": NORM, "depth": 10**400}, ValueError, "depth is about 1e400; expected"),
    "depth without a norm": ({"depth": 2}, ValueError, "depth is 2 and norm(_weight)? is (missing|False)"),
    "norm_eps below 0": (
        {"norm_weight": NORM, "norm_eps": -1.0}, ValueError, "norm_eps is -1.0; expected a finite number from 0 on"
    ),
    "norm_eps of 400 digits": ({"norm_weight": NORM, "norm_eps": 10**400}, ValueError, "norm_eps is about 1e400"),
    "a norm of other numbers": (
        {"norm_weight": torch.ones(4)}, ValueError, r"norm_weight has shape \(4,\); expected \[16\]"
    ),
    "a norm in float64": (
        {"norm_weight": NORM.double()}, TypeError, r"norm_weight has dtype torch.float64; expected torch.float32, as q"
    ),
    "a norm that is no tensor": ({"norm_weight": 1.0}, TypeError, "norm_weight is a float; expected a tensor"),
    "a gate of other numbers": ({"gate_weight": torch.ones(2, 16)}, ValueError, r"expected \[1, 16\] or \[16, 16\]"),
    "a bias without a gate": ({"gate_bias": torch.ones(1)}, ValueError, "gate_bias is given without gate_weight"),
    "a bias of other numbers": (
        {"gate_weight": torch.ones(1, 16), "gate_bias": torch.ones(16)}, ValueError,
        r"gate_bias has shape \(16,\); expected \[1\], as many numbers as gate_weight has rows",
    ),
    **{
        f"{name} {what}": ({name: value}, error, sentence)
        for name in ("weight", "pre_conv", "post_conv")
        for what, value, error, sentence in (
            ("as a list", [1], TypeError, f"{name} is a list; expected a tensor"),
            ("of 2 dims", TAPS[0], ValueError, rf"{name} has shape \(3, 3\)"),
            ("of 4 dims", TAPS[:, None], ValueError, rf"{name} has shape \(4, 1, 3, 3\); expected .*key taps"),
            ("of 3 heads", TAPS[1:], ValueError, rf"{name} has shape \(3, 3, 3\); expected .* 4 query heads"),
            ("without taps", TAPS[:, :0], ValueError, "at least one tap"),
            ("in float64", TAPS.double(), TypeError, rf"{name} .*float64; expected torch.float32, as q(_window)?$"),
            ("on another device", TAPS.to("meta"), ValueError, f"{name} is on meta"),
            ("that is sparse", TAPS.to_sparse(), TypeError, rf"{name} is a sparse tensor; expected .* to_dense\(\)"),
        )
    },
    "a weight in bfloat16 beside float16": (
        dict.fromkeys("qkv", Q.half()) | {"weight": TAPS.bfloat16()}, TypeError,
        r"expected torch\.float16, as q, or torch\.float32$",
    ),
    "nested taps": (
        {"post_conv": torch.nested.nested_tensor(list(TAPS), layout=torch.jagged)}, TypeError,
        "post_conv is a nested tensor; expected a dense one, as torch.nested.to_padded_tensor makes",
    ),
    **{
        f"{name} {what}": ({name: value}, error, sentence)
        for name, order in (("pre_mix", "out, in"), ("post_mix", "in, out"))
        for what, value, error, sentence in (
            ("as a list", [[1.0]], TypeError, f"{name} is a list; expected a tensor"),
            ("of 1 dim", MIX[0], ValueError, rf"{name} has shape \(4,\); expected \[4, 4\]"),
            ("that is not square", MIX[:, :2], ValueError, rf"expected \[4, 4\] \({order}\), or"),
            (
                "of 3 heads", MIX[1:, 1:], ValueError,
                rf"mixes 3 heads, and q(_window)? has 4; give \[4, 4\] \({order}\), or \[groups, c, c\] with",
            ),
            ("in groups that do not divide", torch.ones(2, 3, 3), ValueError, "mixes 6 heads, and q(_window)? has 4"),
            ("in float64", MIX.double(), TypeError, f"{name} has dtype torch.float64; expected torch.float32, as q"),
            ("on another device", MIX.to("meta"), ValueError, f"{name} is on meta and q(_window)? on cpu"),
            ("that is sparse", MIX.to_sparse_csr(), TypeError, f"{name} is a sparse tensor"),
        )
    },
    "q is an int": ({"q": 3}, TypeError, "q is an int; expected a tensor"),
    "v is a list": ({"v": Q.tolist()}, TypeError, "v is a list; expected a tensor"),
    "q of 3 dims": ({"q": Q[0]}, ValueError, "q has shape .* four"),
    "no rows": ({"q": Q[:, :, :0], "k": Q[:, :, :0]}, ValueError, "at least 1"),
    "k of 3 heads": ({"k": Q[:, 1:], "v": Q[:, 1:]}, ValueError, "4 query heads cannot share 3 key heads"),
    "k of other head dims": ({"k": Q[..., 1:], "v": Q[..., 1:]}, ValueError, "head_dim must be the same"),
    "k of another batch": ({"k": torch.cat([Q, Q]), "v": torch.cat([Q, Q])}, ValueError, "must be the same"),
    "v of another shape": ({"v": Q[:, 1:]}, ValueError, "v .* must be the same"),
    "k of another dtype": ({"k": Q.half()}, TypeError, "k has dtype torch.float16 and q torch.float32"),
    "fewer keys": ({"k": Q[:, :, 2:], "v": Q[:, :, 2:]}, ValueError, "as many rows as k, or fewer"),
    "whole numbers": ({"q": Q.int()}, TypeError, r"q has dtype torch\.int32; expected torch\.float16"),
    "fp8": (
        dict.fromkeys("qkv", Q.to(torch.float8_e4m3fn)), TypeError,
        "q has dtype torch.float8_e4m3fn; expected torch.float16, torch.bfloat16, torch.float32 or torch.float64",
    ),
    "cu_seqlens is a list": ({"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens is a list; expected"),
    "bounds in float": (
        {"cu_seqlens": torch.tensor([0.0, 8])}, ValueError, r"expected \[documents \+ 1\], torch.int32 or torch.int64"
    ),
    "bounds of one number": ({"cu_seqlens": LENGTHS}, ValueError, r"expected \[documents \+ 1\]"),
    "bounds from 1": ({"cu_seqlens": torch.tensor([1, 8])}, ValueError, "from 1 to 8; expected .* from 0 to the 8 ro"),
    "bounds out of order": ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, ValueError, "not in order"),
    "documents with a history": (
        {"cu_seqlens": torch.tensor([0, 8]), "q_history": Q}, ValueError, "leave out q_history|are both given"
    ),
    "documents of a chunk": (
        {"q": Q[:, :, 3:], "cu_seqlens": torch.tensor([0, 8])}, ValueError, "q has 5 rows and k 8"
    ),
    "documents of a batch": (
        dict.fromkeys("qkv", torch.cat([Q, Q])) | {"cu_seqlens": torch.tensor([0, 8])}, ValueError, "q has batch 2"
    ),
    "q_window in fp8": (
        dict.fromkeys(("q_window", "k_cache", "v_cache"), Q.to(torch.float8_e5m2)), TypeError,
        "q_window has dtype torch.float8_e5m2; expected torch.float16",
    ),
    "q_window of other head dims": ({"q_window": Q[:, :, -3:, 1:]}, ValueError, "head_dim must be the same"),
    "k_cache of 3 heads": (
        {"k_cache": Q[:, 1:], "v_cache": Q[:, 1:]}, ValueError, "4 query heads cannot share 3 key heads|multiple of"
    ),
    "lengths is a list": ({"lengths": [8]}, TypeError, "lengths is a list; expected a tensor, as"),
    "block_table is a list": ({"block_table": [[0]]}, TypeError, "block_table is a list"),
    **{
        f"lengths in {dtype}": (
            {"lengths": LENGTHS.to(dtype)}, ValueError, f"dtype {dtype}, on cpu; expected .1., torch.int32 or torch.in"
        )
        for dtype in (torch.uint8, torch.int16, torch.bool, torch.float32)  # some would wrap, some count wrongly
    },
    "lengths below 0": ({"lengths": LENGTHS - 9}, ValueError, "lengths has -1; expected the tokens of each sequence"),
    "lengths beyond the cache": (
        {"lengths": LENGTHS + 1, "backend": "reference"}, ValueError, "lengths has 9 and the cache holds 8 keys"
    ),
    "dtype is a name": ({"dtype": "bf16"}, TypeError, "dtype is 'bf16'; expected torch.float16"),
    "dtype of whole numbers": ({"dtype": torch.int32}, TypeError, "dtype is torch.int32; expected"),
    "dtype fp8": ({"dtype": torch.float8_e4m3fn}, TypeError, "dtype is torch.float8_e4m3fn; expected"),
    **{
        f"{name} of {value!r}": ({name: value}, ValueError, f"{name} is {value!r}; expected a whole number from 1 on")
        for name in ("heads", "head_dim", "query_taps", "key_taps")
        for value in (0, -1, 4.0, "4", True)
    },
}  # fmt: skip
PAGED = {("explain decode", "k of another batch"), ("explain decode", "fewer keys")}  # as a cache of pages has them
CASES = [
    pytest.param(function, wrong, id=f"{name}: {what}")
    for name, function in FUNCTIONS.items()
    for what, wrong in WRONG.items()
    if {*wrong[0]} <= function.names and (name, what) not in PAGED
]


@pytest.mark.parametrize(("function", "wrong"), CASES)
def test_each_function_refuses_in_one_sentence(function: Function, wrong: Wrong) -> None:
    changes, error, sentence = wrong
    for under_autocast in {False, "expected a tensor" in sentence}:
        with torch.autocast("cpu", torch.bfloat16, under_autocast), pytest.raises(error, match=sentence) as found:
            function(**changes)
        assert "\n" not in str(found.value)


def module(*sizes, **options):
    return MultiTokenAttention(*(sizes or (4, 16)), **options)


def with_dual(function):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(ONE, ONE))


def preset(layer, name="mta-1b"):
    return MultiTokenAttention.preset(name, layer=layer, device="meta")


TAPS_OF_3 = r"pre_conv is 3; expected query taps and key taps such as \(6, 11\), or None"
CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "module's explain: heads": (lambda: module(2, 16).explain(**QKV), ValueError, "q has shape .* as the module"),
    "module's heads": (
        lambda: module(2, 16)(**QKV), ValueError,
        r"q has shape \(1, 4, 8, 16\); expected \[batch, 2, rows, 16\], as the module is MultiTokenAttention\(2, 16\)",
    ),
    "module's head dim": (lambda: module(4, 32, norm=False)(**QKV), ValueError, r"expected \[batch, 4, rows, 32\]"),
    "module's decode": (
        lambda: module(2, 16).decode(**STEP), ValueError, "q_window has shape .* expected .batch, 2",
    ),
    "conv scale: with a tangent": (
        lambda: torch.func.jvp(lambda x: conv_attention(**QKV, weight=TAPS, scale=x), (ONE,), (ONE,)), RuntimeError,
        "scale has no forward-mode derivatives .* multiply q by it instead",
    ),
    "scale: a dual tensor": (
        lambda: with_dual(lambda scale: multi_token_attention(**QKV, pre_mix=MIX, scale=scale)), RuntimeError,
        "scale has no forward-mode derivatives .* multiply q by it instead",
    ),
    "decode: state of a layer that needs none": (
        lambda: multi_token_attention_decode(**STEP, pre_mix=MIX, state="x"), TypeError,
        "state is a str; expected None, as these steps look back on no other row",
    ),
    "decode: state as a tuple": (
        lambda: multi_token_attention_decode(**STEP, post_conv=TAPS, state=(Q, Q)), TypeError,
        "state is a tuple and post_conv looks back on 3 queries; give the DecodeState of prefill_state, or Dec",
    ),
    "module: post_mix of 5000 digits": (lambda: module(post_mix=10**5000 + 1), ValueError, "post_mix is about 1e5000"),
    "preset: layer of 5000 digits": (lambda: preset(10**5000), ValueError, "layer is about 1e5000; mta-1b has the"),
    "module: depth of 400 digits": (lambda: module(depth=10**400), ValueError, "depth is about 1e400"),
    "module: taps": (lambda: module(pre_conv=3), ValueError, TAPS_OF_3),
    "module: taps as typed": (lambda: module(post_conv="6x11"), ValueError, "post_conv is '6x11'; expected"),
    "module: three taps": (lambda: module(pre_conv=(3, 3, 3)), ValueError, "expected query taps and key taps"),
    "module: no taps": (lambda: module(pre_conv=False), ValueError, "pre_conv is False; .* or None"),
    "module: taps of 0": (lambda: module(pre_conv=(0, 3)), ValueError, r"\(0, 3\): a number of taps is 0; expected"),
    "module: norm": (lambda: module(norm="rms"), ValueError, "norm is 'rms'; expected True or False"),
    "module: depth": (lambda: module(depth=-1), ValueError, "depth is -1; expected the layer's index"),
    "preset: layer": (lambda: preset("a"), ValueError, "layer is 'a'; mta-1b has the layers 0 to 23"),
    "preset: a layer too many": (lambda: preset(24), ValueError, "layer is 24; mta-1b has the layers 0 to 23"),
    "preset: list": (lambda: preset(2, ["mta-1b"]), ValueError, r"preset is \['mta-1b'\]; expected one of"),
    "entries of a list": (lambda: layer_entries([1], 2), TypeError, "state_dict is a list; expected a mapping"),
    "entries of numbers": (lambda: layer_entries({1: 2}, 2), TypeError, "expected a mapping from names to tensors"),
    "identity_weight: dtype": (lambda: identity_weight(4, 3, 3, dtype=torch.int64), TypeError, "dtype is torch.int64"),
    "module: backend of conv_attention": (
        lambda: module(post_mix=False, backend="hopper"), ValueError,
        "backend 'hopper' runs conv_attention alone, which has no pre_mix and no post_conv; expected 'auto' or one of "
        "'reference', 'triton'",
    ),
    "dropout of a backend of conv_attention": (
        lambda: multi_token_attention(**QKV, pre_conv=TAPS, dropout=0.1, backend="cuda"), ValueError,
        "backend 'cuda' runs conv_attention alone, which has no dropout; expected 'auto' or one of 'reference', 'tri",
    ),
    "explain: dropout of a backend of conv_attention": (
        lambda: explain(**QKV, dropout=0.1, backend="hopper"), ValueError, "which has no dropout; expected 'auto'",
    ),
    "decode: backend of conv_attention": (
        lambda: multi_token_attention_decode(**STEP, pre_mix=MIX, backend="cuda"), ValueError,
        "backend 'cuda' runs conv_attention alone, which has no pre_mix; expected 'auto'",
    ),
    "state of all": (
        lambda: module(causal=False).prefill_state(Q, Q, lengths=LENGTHS), ValueError, "causal is False, and a decode",
    ),
    "decode of all": (lambda: module(causal=False).decode(**STEP), ValueError, "causal is False, and"),
    "state: batch": (lambda: DecodeState.empty(-1, 4, 3, 8, dtype=Q.dtype), ValueError, "batch is -1; expected"),
    "state: heads": (lambda: DecodeState.empty(1, 4.0, 3, 8, dtype=Q.dtype), ValueError, "heads is 4.0"),
    "state: taps": (lambda: DecodeState.empty(1, 4, 0, 8, dtype=Q.dtype), ValueError, "query_taps is 0"),
    "state: dtype": (lambda: DecodeState.empty(1, 4, 3, 8, dtype="fp32"), TypeError, "dtype is 'fp32'"),
    "module: post_mix": (lambda: module(post_mix=3), ValueError, "post_mix is 3; expected True, False, 'linear' or"),
    "module: no post_mix": (lambda: module(post_mix=0), ValueError, "post_mix is 0"),
    "module: pre_mix": (lambda: module(pre_mix=2), ValueError, "pre_mix is 2; expected True, for all 4 heads, or"),
    "module: a post_mix of words": (lambda: module(post_mix="heads"), ValueError, "post_mix is 'heads'"),
    "module: gate": (lambda: module(gate="half"), ValueError, "gate is 'half'; expected True, False or 'full'"),
    "module: depth and no norm": (lambda: module(norm=False, depth=1), ValueError, "depth is 1 and norm is False"),
    "decode: q_window of 2 rows": (
        lambda: conv_attention_decode(**STEP | {"q_window": Q[:, :, -2:]}, weight=TAPS), ValueError, "give the last 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_in_one_sentence(name: str) -> None:
    call, error, sentence = CALLS[name]
    with pytest.raises(error, match=sentence) as found:
        call()
    assert "\n" not in str(found.value)


def test_an_option_of_a_preset_replaces_the_presets_own() -> None:
    attention = MultiTokenAttention.preset("mta-1b", layer=2, heads=4, head_dim=8, pre_conv=None)
    assert (attention.heads, attention.head_dim, attention.mta_kernel) == (4, 8, None)
