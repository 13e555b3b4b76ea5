"""Wrong calls of the public API that are refused in one sentence of ours, not in words of Python or PyTorch."""

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
QKV = (Q, Q, Q)
MIX, TAPS, LENGTHS = torch.eye(4), torch.randn(4, 3, 3), torch.tensor([8], dtype=torch.int32)
ONE = torch.ones(())
STEP = (Q[:, :, -3:], Q, Q)


def module(*sizes, **options):
    return MultiTokenAttention(*(sizes or (4, 16)), **options)


def with_dual(function):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(ONE, ONE))


def preset(layer, name="mta-1b"):
    return MultiTokenAttention.preset(name, layer=layer, device="meta")


TAPS_OF_3 = r"pre_conv is 3; expected query taps and key taps such as \(6, 11\), or None"
CALLS = {
    "explain: taps of 2 dims": (lambda: explain(*QKV, pre_conv=TAPS[0]), ValueError, r"pre_conv has shape \(3, 3\)"),
    "explain: post_conv": (lambda: explain(*QKV, post_conv=TAPS[None]), ValueError, "post_conv has shape"),
    "explain: pre_mix of 3 heads": (lambda: explain(*QKV, pre_mix=MIX[1:, 1:]), ValueError, "mixes 3 heads, and q has"),
    "explain: post_mix of 1 dim": (lambda: explain(*QKV, post_mix=MIX[0]), ValueError, r"post_mix has shape \(4,\)"),
    "explain: q of 3 dims": (lambda: explain(Q[0], Q, Q, pre_mix=MIX), ValueError, "q has shape .* four"),
    "explain: dropout": (lambda: explain(*QKV, pre_mix=MIX, dropout="x"), ValueError, "dropout is 'x'; expected"),
    "explain: causal": (lambda: explain(*QKV, pre_mix=MIX, causal="no"), TypeError, "causal is 'no'; expected"),
    "explain: k of 3 heads": (
        lambda: explain(Q, Q[:, 1:], Q[:, 1:], pre_mix=MIX), ValueError, "4 query heads cannot share 3 key heads",
    ),
    "explain: v of another shape": (lambda: explain(Q, Q, Q[:, 1:], pre_mix=MIX), ValueError, "v .* must be the same"),
    "explain: k of another dtype": (
        lambda: explain(Q, Q.half(), Q.half(), pre_mix=MIX), TypeError, "k has dtype torch.float16 and q torch.float32",
    ),
    "explain: fewer keys": (lambda: explain(Q, *[Q[:, :, 2:]] * 2, pre_mix=MIX), ValueError, "as many rows as k, or"),
    "explain: a mixing in float64": (
        lambda: explain(*QKV, pre_mix=MIX.double()), TypeError, "pre_mix has dtype torch.float64; expected",
    ),
    "explain: a mixing without numbers": (
        lambda: explain(*QKV, post_mix=MIX.to("meta")), ValueError, "post_mix is on meta and q on cpu",
    ),
    "explain decode: head dim": (
        lambda: explain(Q[..., 1:], Q, Q, pre_mix=MIX, decode=True), ValueError, "head_dim must be the same",
    ),
    "explain decode: k of 3 heads": (
        lambda: explain(Q, Q[:, 1:], Q[:, 1:], pre_mix=MIX, decode=True), ValueError, "cannot share 3 key heads",
    ),
    "conv explain: k of 3 heads": (
        lambda: explain_conv_attention(Q, Q[:, 1:], Q[:, 1:], TAPS), ValueError, "cannot share 3 key heads",
    ),
    "conv explain: weight in float64": (
        lambda: explain_conv_attention(*QKV, TAPS.double()), TypeError, "weight has dtype torch.float64; expected",
    ),
    "module's explain: heads": (lambda: module(2, 16).explain(*QKV), ValueError, "q has shape .* as the module"),
    "conv explain: 2 dims": (lambda: explain_conv_attention(*QKV, TAPS[0]), ValueError, r"weight has shape \(3, 3\)"),
    "conv explain: 4 dims": (lambda: explain_conv_attention(*QKV, TAPS[None]), ValueError, "weight has shape"),
    "conv explain: heads": (lambda: explain_conv_attention(*QKV, TAPS[1:]), ValueError, "with 4 query heads"),
    "conv explain: q": (lambda: explain_conv_attention(Q[0], Q, Q, TAPS), ValueError, "q has shape .* four"),
    "scale": (lambda: multi_token_attention(*QKV, pre_mix=MIX, scale="a"), TypeError, "scale is 'a'; expected"),
    "conv scale": (lambda: conv_attention(*QKV, TAPS, scale="a"), TypeError, "scale is 'a'; expected"),
    "decode: scale": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_mix=MIX, scale="a"), TypeError, "scale is 'a'",
    ),
    "conv decode: scale": (
        lambda: conv_attention_decode(*STEP, TAPS, lengths=LENGTHS, scale="a"), TypeError, "scale is 'a'",
    ),
    "prefill_state: scale": (
        lambda: prefill_state(Q, Q, lengths=LENGTHS, post_conv=TAPS, scale="a"), TypeError, "scale is 'a'",
    ),
    "scale of NaN": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, scale=float("nan")), ValueError, "scale is nan; expected a",
    ),
    "conv scale: infinity": (lambda: conv_attention(*QKV, TAPS, scale=float("inf")), ValueError, "scale is inf; expec"),
    "conv decode: scale of infinity": (
        lambda: conv_attention_decode(*STEP, TAPS, lengths=LENGTHS, scale=-float("inf")), ValueError, "scale is -inf;",
    ),
    "scale of 400 digits": (lambda: multi_token_attention(*QKV, pre_mix=MIX, scale=10**400), ValueError, "about 1e400"),
    "conv scale: 400 digits": (lambda: conv_attention(*QKV, TAPS, scale=-(10**400)), ValueError, "about -1e400; expe"),
    "conv scale of two numbers": (
        lambda: conv_attention(*QKV, TAPS, scale=torch.ones(2)), TypeError, r"scale is tensor\(.* expected one number",
    ),
    "scale of two of numpy's": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, scale=np.ones(2)), TypeError, r"scale is array\(.* one number",
    ),
    "q is an int": (lambda: conv_attention(3, Q, Q, TAPS), TypeError, "q is an int; expected a tensor"),
    "head_chunk of True": (lambda: conv_attention(*QKV, TAPS, head_chunk=True), ValueError, "head_chunk is True; exp"),
    "splits of True": (
        lambda: conv_attention_decode(*STEP, TAPS, lengths=LENGTHS, splits=True, backend="reference"), ValueError,
        "splits is True; expected",
    ),
    "decode: splits of True": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_mix=MIX, splits=True), ValueError, "splits is",
    ),
    "heads of True": (lambda: module(True, 16), ValueError, "heads is True; expected a whole number"),
    "module's heads": (
        lambda: module(2, 16)(*QKV), ValueError,
        r"q has shape \(1, 4, 8, 16\); expected \[batch, 2, rows, 16\], as the module is MultiTokenAttention\(2, 16\)",
    ),
    "module's head dim": (lambda: module(4, 32, norm=False)(*QKV), ValueError, r"expected \[batch, 4, rows, 32\]"),
    "module's decode": (
        lambda: module(2, 16).decode(*STEP, lengths=LENGTHS), ValueError, "q_window has shape .* expected .batch, 2",
    ),
    "conv scale: learned": (
        lambda: conv_attention(*QKV, TAPS, scale=torch.ones((), requires_grad=True)), TypeError, "multiply q by it",
    ),
    "conv scale: with a tangent": (
        lambda: torch.func.jvp(lambda scale: conv_attention(*QKV, TAPS, scale=scale), (ONE,), (ONE,)), RuntimeError,
        "scale has no forward-mode derivatives .* multiply q by it instead",
    ),
    "scale: a dual tensor": (
        lambda: with_dual(lambda scale: multi_token_attention(*QKV, pre_mix=MIX, scale=scale)), RuntimeError,
        "scale has no forward-mode derivatives .* multiply q by it instead",
    ),
    "decode: pre_conv": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_conv=[1]), TypeError, "pre_conv is a list; ex",
    ),
    "decode: pre_mix": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_mix="x"), TypeError, "pre_mix is a str; expec",
    ),
    "decode: gate_bias": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, gate_bias=1), TypeError, "gate_bias is an int; ex",
    ),
    "decode: norm": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, norm_weight=1.0), TypeError, "norm_weight is a fl",
    ),
    "decode: state of a layer that needs none": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_mix=MIX, state="x"), TypeError,
        "state is a str; expected None, as these steps look back on no other row",
    ),
    "decode: state as a tuple": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, post_conv=TAPS, state=(Q, Q)), TypeError,
        "state is a tuple and post_conv looks back on 3 queries; give the DecodeState of prefill_state, or Dec",
    ),
    "decode: taps of 3 heads": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_conv=TAPS[1:], pre_mix=MIX), ValueError,
        r"pre_conv has shape \(3, 3, 3\); expected",
    ),
    "prefill_state: taps of 3 heads": (
        lambda: prefill_state(Q, Q, lengths=LENGTHS, pre_conv=TAPS[1:], post_conv=TAPS), ValueError, "pre_conv has sha",
    ),
    "decode: taps in float64": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, post_conv=TAPS.double()), TypeError,
        "post_conv has dtype torch.float64; expected torch.float32, as q_window",
    ),
    "decode: taps on another device": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_conv=TAPS.to("meta"), pre_mix=MIX), ValueError,
        "pre_conv is on meta and q_window on cpu",
    ),
    "conv decode: weight in float64": (
        lambda: conv_attention_decode(*STEP, TAPS.double(), lengths=LENGTHS), TypeError, "expected .*, as q_window",
    ),
    "decode: a mixing of 3 heads": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_mix=MIX[1:, 1:]), ValueError,
        "mixes 3 heads, and q_window has 4",
    ),
    "decode: a mixing in float64": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, post_mix=MIX.double()), TypeError,
        "post_mix has dtype torch.float64; expected torch.float32, as q_window",
    ),
    "decode: a norm in float64": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, norm_weight=Q[0, 0, 0].double()), TypeError,
        "norm_weight has dtype torch.float64; expected torch.float32, as q_window",
    ),
    "depth of 400 digits": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, norm_weight=Q[0, 0, 0], depth=10**400), ValueError,
        r"depth is about 1e400; expected the layer's index, a whole number from 0 to 2\*\*63 - 1, or None",
    ),
    "depth of 2**63": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, norm_weight=Q[0, 0, 0], depth=2**63), ValueError, "depth is 9",
    ),
    "norm_eps of 400 digits": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, norm_weight=Q[0, 0, 0], norm_eps=10**400), ValueError,
        "norm_eps is about 1e400; expected a finite number from 0 on",
    ),
    "decode: norm_eps of 400 digits": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, norm_weight=Q[0, 0, 0], norm_eps=10**400),
        ValueError, "norm_eps is about 1e400",
    ),
    "dropout of 5000 digits": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, dropout=10**5000), ValueError, "dropout is about 1e5000; exp",
    ),
    "seed of 5000 digits": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, dropout=0.5, seed=10**5000), ValueError, "seed is about 1e50",
    ),
    "head_chunk of 5000 digits": (
        lambda: conv_attention(*QKV, TAPS, head_chunk=-(10**5000)), ValueError, "head_chunk is about -1e5000; expected",
    ),
    "splits of 5000 digits": (
        lambda: conv_attention_decode(*STEP, TAPS, lengths=LENGTHS, splits=10**5000), ValueError, "splits is about 1e5",
    ),
    "module: dropout of 5000 digits": (lambda: module(dropout=10**5000), ValueError, "dropout is about 1e5000"),
    "module: post_mix of 5000 digits": (lambda: module(post_mix=10**5000 + 1), ValueError, "post_mix is about 1e5000"),
    "preset: layer of 5000 digits": (lambda: preset(10**5000), ValueError, "layer is about 1e5000; mta-1b has the"),
    "module: depth of 400 digits": (lambda: module(depth=10**400), ValueError, "depth is about 1e400"),
    "sparse mixing": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX.to_sparse()), TypeError,
        r"pre_mix is a sparse tensor; expected a dense one, as to_dense\(\) makes it",
    ),
    "sparse mixing, compressed": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, post_mix=MIX.to_sparse_csr()), TypeError,
        "post_mix is a sparse tensor",
    ),
    "nested taps": (
        lambda: multi_token_attention(*QKV, post_conv=torch.nested.nested_tensor(list(TAPS), layout=torch.jagged)),
        TypeError, "post_conv is a nested tensor; expected a dense one, as torch.nested.to_padded_tensor makes",
    ),
    "conv: sparse weight": (lambda: conv_attention(*QKV, TAPS.to_sparse()), TypeError, "weight is a sparse tensor"),
    "q in fp8": (
        lambda: multi_token_attention(*[Q.to(torch.float8_e4m3fn)] * 3, pre_mix=MIX), TypeError,
        "q has dtype torch.float8_e4m3fn; expected torch.float16, torch.bfloat16, torch.float32 or torch.float64",
    ),
    "decode: q_window in fp8": (
        lambda: multi_token_attention_decode(*[Q.to(torch.float8_e5m2)] * 3, lengths=LENGTHS, pre_mix=MIX), TypeError,
        "q_window has dtype torch.float8_e5m2; expected torch.float16",
    ),
    "conv decode: whole numbers": (
        lambda: conv_attention_decode(*[Q.int()] * 3, TAPS, lengths=LENGTHS), TypeError, "q_window has dtype torch.int",
    ),
    "module: fp8": (lambda: module(dtype=torch.float8_e4m3fn), TypeError, "dtype is torch.float8_e4m3fn; expected"),
    "causal": (lambda: multi_token_attention(*QKV, pre_mix=MIX, causal="no"), TypeError, "causal is 'no'"),
    "conv causal": (lambda: conv_attention(*QKV, TAPS, causal="no"), TypeError, "causal is 'no'"),
    "causal of two": (
        lambda: multi_token_attention(*QKV, pre_mix=MIX, causal=np.ones(2)), TypeError, r"causal is array\(.* expect",
    ),
    "conv causal of two": (
        lambda: conv_attention(*QKV, TAPS, causal=torch.ones(2)), TypeError, r"causal is tensor\(.* expected True or",
    ),
    "rows": (lambda: multi_token_attention_reference(*QKV, pre_mix=MIX, rows=3), ValueError, "rows is 3; expected"),
    "rows of words": (
        lambda: multi_token_attention_reference(*QKV, pre_mix=MIX, rows=("a", "b")), ValueError, r"rows is \('a', ",
    ),
    "conv rows": (lambda: conv_attention_reference(*QKV, TAPS, rows=(1, 2, 3)), ValueError, r"rows is \(1, 2, 3\)"),
    "module: taps": (lambda: module(pre_conv=3), ValueError, TAPS_OF_3),
    "module: taps as typed": (lambda: module(post_conv="6x11"), ValueError, "post_conv is '6x11'; expected"),
    "module: three taps": (lambda: module(pre_conv=(3, 3, 3)), ValueError, "expected query taps and key taps"),
    "module: no taps": (lambda: module(pre_conv=False), ValueError, "pre_conv is False; .* or None"),
    "module: taps of 0": (lambda: module(pre_conv=(0, 3)), ValueError, r"\(0, 3\): a number of taps is 0; expected"),
    "module: head_dim 0": (lambda: module(4, 0), ValueError, "head_dim is 0; expected a whole number from 1 on"),
    "module: head_dim": (lambda: module(4, "a"), ValueError, "head_dim is 'a'; expected a whole number"),
    "module: heads": (lambda: module("4", 16, pre_conv=None), ValueError, "heads is '4'; expected a whole number"),
    "module: norm": (lambda: module(norm="rms"), ValueError, "norm is 'rms'; expected True or False"),
    "module: depth": (lambda: module(depth=-1), ValueError, "depth is -1; expected the layer's index"),
    "module: dropout": (lambda: module(dropout=1.0), ValueError, "dropout is 1.0; expected a number from 0 to"),
    "module: pad_key": (lambda: module(pre_conv=None, post_conv=None, pad_key="x"), ValueError, "pad_key is 'x'"),
    "module: dtype": (lambda: module(dtype="bf16"), TypeError, "dtype is 'bf16'; expected torch.float16"),
    "module: whole numbers": (lambda: module(dtype=torch.int32), TypeError, "dtype is torch.int32; expected"),
    "preset: layer": (lambda: preset("a"), ValueError, "layer is 'a'; mta-1b has the layers 0 to 23"),
    "preset: layer of no kind": (lambda: preset(None), ValueError, "layer is None; mta-1b has the layers"),
    "preset: layer 2.0": (lambda: preset(2.0), ValueError, "layer is 2.0"),
    "preset: layer 24": (lambda: preset(24), ValueError, "layer is 24; mta-1b has"),
    "preset: list": (lambda: preset(2, ["mta-1b"]), ValueError, r"preset is \['mta-1b'\]; expected one of"),
    "entries of a list": (lambda: layer_entries([1], 2), TypeError, "state_dict is a list; expected a mapping"),
    "entries of numbers": (lambda: layer_entries({1: 2}, 2), TypeError, "expected a mapping from names to tensors"),
    "ConvAttention: dtype": (lambda: ConvAttention(4, dtype="bf16"), TypeError, "dtype is 'bf16'"),
    "ConvAttention: backend": (lambda: ConvAttention(4, backend="hooper"), ValueError, "backend is 'hooper'; expected"),
    "ConvAttention: scale": (lambda: ConvAttention(4, scale="x"), TypeError, "scale is 'x'"),
    "ConvAttention: causal": (lambda: ConvAttention(4, causal="no"), TypeError, "causal is 'no'"),
    "ConvAttention: head_chunk": (lambda: ConvAttention(4, head_chunk=0), ValueError, "head_chunk is 0; expected"),
    "identity_weight: dtype": (lambda: identity_weight(4, 3, 3, dtype=torch.int64), TypeError, "dtype is torch.int64"),
    "module: causal": (lambda: module(causal="x"), TypeError, "causal is 'x'; expected True or False"),
    "module: scale": (lambda: module(scale="x"), TypeError, "scale is 'x'; expected a number"),
    "module: backend": (lambda: module(backend="x"), ValueError, "backend is 'x'; expected 'auto' or one of 'ref"),
    "module: backend of conv_attention": (
        lambda: module(post_mix=False, backend="hopper"), ValueError,
        "backend 'hopper' runs conv_attention alone, which has no pre_mix and no post_conv; expected 'auto' or one of "
        "'reference', 'triton'",
    ),
    "dropout of a backend of conv_attention": (
        lambda: multi_token_attention(*QKV, pre_conv=TAPS, dropout=0.1, backend="cuda"), ValueError,
        "backend 'cuda' runs conv_attention alone, which has no dropout; expected 'auto' or one of 'reference', 'tri",
    ),
    "explain: dropout of a backend of conv_attention": (
        lambda: explain(*QKV, dropout=0.1, backend="hopper"), ValueError, "which has no dropout; expected 'auto'",
    ),
    "decode: backend of conv_attention": (
        lambda: multi_token_attention_decode(*STEP, lengths=LENGTHS, pre_mix=MIX, backend="cuda"), ValueError,
        "backend 'cuda' runs conv_attention alone, which has no pre_mix; expected 'auto'",
    ),
    "state of all": (
        lambda: module(causal=False).prefill_state(Q, Q, lengths=LENGTHS), ValueError, "causal is False, and a decode",
    ),
    "decode of all": (lambda: module(causal=False).decode(*STEP, lengths=LENGTHS), ValueError, "causal is False, and"),
    "state: batch": (lambda: DecodeState.empty(-1, 4, 3, 8, dtype=Q.dtype), ValueError, "batch is -1; expected"),
    "state: heads": (lambda: DecodeState.empty(1, 4.0, 3, 8, dtype=Q.dtype), ValueError, "heads is 4.0"),
    "state: taps": (lambda: DecodeState.empty(1, 4, 0, 8, dtype=Q.dtype), ValueError, "query_taps is 0"),
    "state: dtype": (lambda: DecodeState.empty(1, 4, 3, 8, dtype="fp32"), TypeError, "dtype is 'fp32'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_in_one_sentence(name):
    call, error, sentence = CALLS[name]
    with pytest.raises(error, match=sentence) as found:
        call()
    assert "\n" not in str(found.value)


def test_an_option_of_a_preset_replaces_the_presets_own():
    attention = MultiTokenAttention.preset("mta-1b", layer=2, heads=4, head_dim=8, pre_conv=None)
    assert (attention.heads, attention.head_dim, attention.mta_kernel) == (4, 8, None)
