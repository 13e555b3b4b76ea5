"""Whose kernels do a decode step of multi-token attention, how it is shared out, and what is refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from decode_inputs import PARTS, Inputs
from emulated_mta_decode import emulated_mta_decode  # noqa: F401
from kernel_inputs import DEVICE, relative_error
from torch import Tensor
from torch.autograd import forward_ad

from mta_kernels.backend import Request
from mta_kernels.multi_token_attention import (
    MultiTokenAttention,
    explain,
    multi_token_attention_decode,
    multi_token_attention_decode_reference,
)
from mta_kernels.multi_token_attention.decode import api as decode_api
from mta_kernels.multi_token_attention.decode import triton as decode_triton
from mta_kernels.multi_token_attention.decode.plan import choose_splits
from mta_kernels.multi_token_attention.decode.plan import plan as plan_step
from mta_kernels.multi_token_attention.decode_cuda import plan
from mta_kernels.multi_token_attention.decode_cuda.plan import heads_unsupported, shape_unsupported, unsupported
from mta_kernels.multi_token_attention.triton.backend import why_not
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution, Operation

MIXING = dict.fromkeys(PARTS, False) | {"pre_mix": True, "post_mix": True}


def test_splits_fill_the_gpu_in_whole_waves() -> None:
    assert choose_splits(1, 65536, 128, 396) == 396  # 512 would take two waves for as many tiles one after another
    assert choose_splits(8, 65536, 128, 396) == 49
    assert choose_splits(1, 4096, 32, 396) == 128
    assert choose_splits(1, 100, 118, 264) == 2
    assert choose_splits(500, 4096, 64, 396) == 64  # whole tiles: 81 rounds, and 128 with one program a sequence


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("taps", [None, (6, 11), (16, 31)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (10, 10), (12, 4), (64, 8)])
def test_programs_fill_the_gpu(heads: int, kv_heads: int, taps: tuple[int, int] | None, head_dim: int) -> None:
    """One of 132 SMs, whatever the shape; and none is without keys."""
    convolution = None if taps is None else Convolution(*taps, taps[1] // 2)
    operation = Operation(convolution, 1.0, True, None, convolution, None)
    for batch, capacity in itertools.product((1, 8, 300), (1, 4096, 65536, 1 << 20)):
        chosen = plan_step(torch.bfloat16, head_dim, heads, kv_heads, operation, batch, capacity, torch.device("cpu"))
        logits, of_v, early = chosen.of_logits, chosen.of_v, chosen.early
        for programs, keys in ((logits.programs, logits.block_n), (of_v.programs, 16 * of_v.blocks)):
            tiles = -(-capacity // keys)
            assert programs <= min(tiles, 512)
            assert (-(-tiles // programs) - 1) * programs < tiles  # the last round is not empty
        assert of_v.kv_heads * (of_v.parts - 1) < kv_heads <= of_v.kv_heads * of_v.parts
        assert early.programs <= -(-capacity // (16 * early.blocks))
        if capacity > 1:
            assert batch * of_v.programs * of_v.parts >= min(132, 16 * kv_heads)
            assert batch * logits.programs >= (16 if taps else 64)


def test_what_kernels_cannot_run_is_refused_or_left_to_the_reference() -> None:
    inputs = Inputs(MIXING, dtype=torch.float16)
    step = inputs.step([30])
    apart = step["k_cache"].mT.contiguous().mT
    with pytest.raises(ValueError, match=r"numbers of a key side by side \(stride 1\); backend='auto' picks one"):
        multi_token_attention_decode(**step | {"k_cache": apart}, backend="triton")
    got = multi_token_attention_decode(**step | {"k_cache": apart})
    assert torch.equal(got, multi_token_attention_decode_reference(**step))
    with pytest.raises(ValueError, match="backend is 'fast'; expected 'auto' or one of 'reference', 'triton'"):
        multi_token_attention_decode(**step, backend="fast")
    with pytest.raises(ValueError, match="the reference backend does not split the keys"):
        multi_token_attention_decode(**step, backend="reference", splits=2)
    many = torch.empty(1, 65, 1, 16, device=DEVICE)
    request = Request(Operation(None, 1.0), many.device, many.dtype, 16, heads=65, decode=(many, many, many))
    assert "65 query heads are more than 64" in (why_not(request) or "")
    wide = Operation(None, 1.0, post_conv=Convolution(16, 31, 15))
    request = Request(wide, many.device, many.dtype, 256, heads=64, decode=(many, many, many))
    assert "64 heads of 31 key taps after the softmax in torch.float32 need more than" in (why_not(request) or "")
    q, k, v = (step[name] for name in ("q_window", "k_cache", "v_cache"))
    assert explain(q, k, v, **inputs.mixers, decode=True).backend == "triton"
    choice = explain(q, apart, v, **inputs.mixers, decode=True)
    assert choice.backend == "reference"
    assert "numbers of a key side by side" in choice.reason


def test_forward_mode_is_refused() -> None:
    """Kernels would leave the tangents out, without a word. The reference has them."""
    inputs = Inputs({**dict.fromkeys(PARTS, False), "pre_mix": True}, dtype=torch.float32)
    step = inputs.step([9]) | {"norm_weight": torch.linspace(0.5, 1.5, 16, device=DEVICE)}
    words = "multi_token_attention_decode through backend 'triton' has no forward-mode derivatives"
    for name in ("q_window", "k_cache", "v_cache", "norm_weight", "pre_mix"):

        def token(x: Tensor, name: str = name, backend: str = "triton") -> Tensor:
            return multi_token_attention_decode(**step | {name: x}, backend=backend)

        x = step[name].nan_to_num(0.0)
        with pytest.raises(RuntimeError, match=words):
            torch.func.jvp(token, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=words):
            token(forward_ad.make_dual(x, x))
    want = token(x + 1e-2 * x, backend="reference") - token(x - 1e-2 * x, backend="reference")
    got = torch.func.jvp(lambda x: token(x, backend="reference"), (x,), (x,))[1]
    torch.testing.assert_close(got, want / 2e-2, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "taps", "reason"),
    [
        (8, 8, 64, (16, 16), None), (16, 16, 128, (6, 11), None), (8, 4, 64, (6, 11), "each with a KV head"),
        (4, 4, 64, (6, 11), "not 8 to 16"), (17, 17, 64, (6, 11), "not 8 to 16"), (8, 8, 72, (6, 11), "head_dim 72"),
        (8, 8, 256, (6, 11), "head_dim 256"), (8, 8, 64, (6, 17), "17 key taps"), (8, 8, 64, (17, 11), "17 query taps"),
        (16, 16, 128, (16, 11), "no room for two tiles"),
    ],
)  # fmt: skip
def test_what_is_left_to_triton(
    heads: int, kv_heads: int, head_dim: int, taps: tuple[int, int], reason: str | None
) -> None:
    q, cache = (torch.empty(1, count, 1, head_dim, dtype=torch.bfloat16) for count in (heads, kv_heads))
    operation = Operation(Convolution(*taps, 0), 1.0)
    found = shape_unsupported(operation, q, cache, cache)
    assert found is None if reason is None else reason in (found or "")
    if reason is None:
        assert "whole chunks" in (shape_unsupported(operation, q, cache, cache[..., 1:]) or "")


@pytest.mark.parametrize(
    ("capability", "kilobytes", "reason"),
    [((9, 0), 227, None), ((8, 0), 163, "227 KB of shared memory"), ((12, 0), 99, "227 KB"), ((7, 5), 64, "sm_80")],
)
def test_gpus_whose_blocks_have_no_room_keep_triton(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kilobytes: int, reason: str | None
) -> None:
    limits = {"capability": capability, "shared_memory_limit": kilobytes * 1024, "missing_package": None}
    for name, value in limits.items():
        monkeypatch.setattr(plan, name, lambda *_, value=value: value)
    operation = Operation.of((6, 11), 64)
    q, cache = (torch.empty(8, 8, rows, 64, dtype=torch.bfloat16) for rows in (6, 32))
    on_gpu = SimpleNamespace(is_cuda=True, device=q.device, shape=q.shape, dtype=q.dtype)
    found = unsupported(operation, on_gpu, cache, cache)
    assert found is None if reason is None else reason in (found or "")


def test_heads_that_mix_a_head_of_nan_are_nan(request) -> None:
    if DEVICE == "cpu":
        request.getfixturevalue("emulated_mta_decode")
    inputs = Inputs(MIXING, heads=8, kv_heads=8, dtype=torch.float16)
    inputs.q[:, 0] = torch.nan
    assert multi_token_attention_decode(**inputs.step([30]), backend="triton").isnan().all()


def test_a_step_has_more_programs_than_are_added_at_once(request) -> None:
    if DEVICE == "cpu":
        request.getfixturevalue("emulated_mta_decode").multiprocessors = 150
    step = Inputs(MIXING, heads=8, kv_heads=8, tokens=9600, head_dim=80, dtype=torch.float16).step([9600])
    exact = {name: x if name == "lengths" else x.double() for name, x in step.items()}
    want = multi_token_attention_decode_reference(**exact)
    assert relative_error(multi_token_attention_decode(**step, backend="triton"), want) < 2e-3


def test_norm_and_gate_are_in_the_last_cuda_kernel(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        request.getfixturevalue("emulated_mta_decode")
    for module in (decode_api, decode_triton):
        monkeypatch.setattr(module, "norm_and_gate", None)  # nobody calls a kernel for them
    after = {"norm_weight": torch.ones(16), "gate_weight": torch.ones(1, 16), "gate_bias": torch.ones(1)}
    after = {name: x.to(DEVICE, torch.float16) for name, x in after.items()}
    inputs = Inputs(MIXING, heads=8, kv_heads=8, dtype=torch.float16, **after)
    multi_token_attention_decode(**inputs.step([30]), backend="triton")


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("heads", range(plan.FEWEST_HEADS, plan.MOST_HEADS + 1))
def test_no_step_needs_more_than_that_room(heads: int, paged: bool) -> None:
    for head_dim in range(16, plan.MOST_HEAD_DIM + 1, 16):
        for taps in ((1, 1), (6, 11), (16, 16)):
            conv = Convolution(*taps, 0)
            if not heads_unsupported(Operation(conv, 1.0, post_conv=conv), torch.bfloat16, heads, heads, head_dim):
                constants = plan.StepConstants(torch.bfloat16, heads, head_dim, paged, conv, True, conv, True)
                assert max(map(constants.bytes_of, ("keys", "values", "merge"))) <= plan.SHARED_BYTES
                assert min(map(constants.stages, ("keys", "values"))) >= 2


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ["keys", "values", "merge"])
def test_the_compiler_takes_them(name: str, paged: bool) -> None:
    """What the emulator's twins of instructions hide: names that are there twice, and constants that differ."""
    if reason := compiler.missing_package():
        pytest.skip(reason)
    conv = Convolution(6, 11, 5)
    constants = plan.StepConstants(torch.bfloat16, 16, 128, paged, conv, True, conv, True, norm=paged, gate=2)
    code, _ = compiler.compile_source(constants.source(name, "sm_90"))
    assert code.startswith(b"\x7fELF")


def test_a_module_explains_its_steps() -> None:
    attention = MultiTokenAttention(16, 64, pre_conv=None, post_conv=None, device=DEVICE)
    q_window, k, v = torch.randn(3, 1, 16, 64, 64, device=DEVICE, dtype=torch.float16)
    q_window = q_window[:, :, :6]
    assert attention.explain(q_window, k, v, decode=True).backend == "triton"
    lengths = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    assert attention.decode(q_window, k, v, lengths=lengths).isfinite().all()
    with pytest.raises(ValueError, match="a decode step is causal"):
        MultiTokenAttention(16, 64, causal=False).explain(q_window, k, v, decode=True)
