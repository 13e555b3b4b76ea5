"""Decode steps of multi-token attention beside tests/conformance: what is refused, and whose kernels run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from emulators import emulated_mta_decode  # noqa: F401
from kernel_inputs import DEVICE, relative_error
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from mta_kernels.multi_token_attention import (
    DecodeState,
    MultiTokenAttention,
    explain,
    multi_token_attention_decode,
    multi_token_attention_decode_reference,
    prefill_state,
)
from mta_kernels.multi_token_attention.decode.plan import choose_splits
from mta_kernels.multi_token_attention.decode.plan import plan as plan_step
from mta_kernels.multi_token_attention.decode_cuda import step as cuda_step
from mta_kernels.operation import Convolution, Operation
from mta_kernels.plan import A100, H200, PlannedGpu, plan

BF16 = torch.bfloat16
MIXERS = ("pre_conv", "pre_mix", "post_conv", "post_mix")
of_a_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for lengths on a GPU")


class Inputs:
    """Tokens and mixers, convolutions of 3 x 5 and 4 x 3 taps; `step` and `state` are of their first tokens."""

    def __init__(self, *parts: str, heads=4, kv_heads=2, tokens=40, head_dim=16, dtype=torch.float64, batch=1) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, by: float = 1.0) -> Tensor:
            return (by * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)

        self.q, self.k, self.v = (normal(batch, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads))
        shapes = {"pre_conv": (3, 5), "pre_mix": (heads,), "post_conv": (4, 3), "post_mix": (heads,)}
        self.mixers = {name: normal(heads, *shapes[name], by=0.4) for name in parts}

    def window(self, lengths: list[int], queries: int) -> Tensor:
        whole = torch.cat([torch.full_like(self.q[:, :, :1], torch.nan).expand(-1, -1, queries, -1), self.q], 2)
        return torch.stack([whole[b, :, length : length + queries] for b, length in enumerate(lengths)])

    def step(self, lengths: list[int]) -> dict[str, Any]:
        """The arguments of a step after which sequences have these lengths, without its state."""
        window = self.window(lengths, 3 if "pre_conv" in self.mixers else 1)
        caches = {"k_cache": self.k, "v_cache": self.v, "lengths": torch.tensor(lengths, device=DEVICE)}
        return {"q_window": window, **caches, **self.mixers}

    def state(self, lengths: list[int]) -> DecodeState:
        """Of prompts of these lengths."""
        mixers = {name: x for name, x in self.mixers.items() if name != "post_mix"}
        return prefill_state(
            self.window(lengths, 6), self.k, lengths=torch.tensor(lengths, device=DEVICE), **mixers
        )  # fmt: skip


VMAP = r"cannot run within torch\.func\.vmap; give all sequences as one batch instead$"


@pytest.mark.parametrize("name", ["q_window", "state"])
def test_vmap_over_steps_with_a_state_is_refused(name: str) -> None:
    """PyTorch's own words are of an index_put_, or of a fallback path."""
    inputs = Inputs(*MIXERS)
    step, state = inputs.step([8]), inputs.state([7])

    def of(*mapped: Tensor) -> Tensor:
        other = {"state": DecodeState(*mapped)} if name == "state" else {name: mapped[0], "state": state}
        return multi_token_attention_decode(**(step | other))

    mapped = (state.logits, state.logsumexp, state.lengths) if name == "state" else (step[name],)
    with pytest.raises(RuntimeError, match=f"^multi_token_attention_decode with a state {VMAP}"):
        torch.func.vmap(of)(*(x[None] for x in mapped))
    with pytest.raises(RuntimeError, match=f"^prefill_state {VMAP}"):
        torch.func.vmap(partial(prefill_state, lengths=step["lengths"], post_conv=step["post_conv"]), (0, None))(
            torch.stack([inputs.q] * 2), inputs.k
        )


def test_vmap_over_steps_without_a_state() -> None:
    step = Inputs("pre_conv", "pre_mix", "post_mix", dtype=torch.float32).step([8])
    lengths = torch.stack([step["lengths"], step["lengths"] - 3])

    def of(lengths: Tensor, backend: str = "reference") -> Tensor:
        return multi_token_attention_decode(**(step | {"lengths": lengths}), backend=backend)

    torch.testing.assert_close(torch.func.vmap(of)(lengths), torch.stack([of(x) for x in lengths]))
    with pytest.raises(RuntimeError, match=f"^multi_token_attention_decode through backend 'triton' {VMAP}"):
        torch.func.vmap(partial(of, backend="triton"))(lengths)


@of_a_cpu
def test_a_state_that_does_not_fit_is_refused() -> None:
    inputs = Inputs(*MIXERS, batch=2)
    step, state = inputs.step([9, 5]), inputs.state([8, 4])
    with pytest.raises(TypeError, match="state is None and post_conv looks back on 4 queries; give the DecodeState"):
        multi_token_attention_decode_reference(**step)
    for lengths in ([7, 4], [8, 3], [9, 6]):
        with pytest.raises(ValueError, match=r"lengths says \d tokens of sequence \d, the new one included, and state"):
            multi_token_attention_decode_reference(**step, state=inputs.state(lengths))
    for changes, error, words in (
        ({"logits": state.logits[..., :30]}, ValueError, r"of shape \(2, 4, 4, 30\); expected \[2, 4, 4, 40 or more\]"),
        ({"logits": state.logits.half()}, TypeError, r"state\.logits has dtype torch\.float16 and q_window"),
        (
            {"logsumexp": state.logsumexp[:, :, 1:]},
            ValueError,
            r"logsumexp of shape \(2, 4, 3\) and lengths \(2,\); ex",
        ),
        ({"lengths": state.lengths[:1]}, ValueError, r"lengths \(1,\); expected \[2, 4, 4\] and \[2\]"),
        (
            {"logsumexp": state.logsumexp.half()},
            TypeError,
            "logsumexp in torch.float16 and lengths in torch.int32; exp",
        ),
        (
            {"lengths": state.lengths.long()},
            TypeError,
            "lengths in torch.int64; expected torch.float64 and torch.int32",
        ),
        ({"lengths": None}, TypeError, "state.lengths is a NoneType; expected a tensor"),
        ({"logsumexp": state.logsumexp.to("meta")}, ValueError, "state.logsumexp is on meta and q_window on cpu"),
    ):
        with pytest.raises(error, match=words):
            multi_token_attention_decode_reference(**step, state=replace(state, **changes))
    step["q_window"].requires_grad_()
    with pytest.raises(RuntimeError, match="not differentiable"):
        multi_token_attention_decode_reference(**step, state=state)


@pytest.mark.parametrize("name", ["logits", "logsumexp", "lengths"])
def test_a_state_whose_sequences_share_memory_is_refused_before_it_is_written(name: str) -> None:
    inputs = Inputs(*MIXERS, batch=2)
    step, state = inputs.step([9, 9]), inputs.state([8, 8])
    shared = replace(state, **{name: getattr(state, name)[:1].expand_as(getattr(state, name))})
    before = shared.clone()
    for function in (multi_token_attention_decode, multi_token_attention_decode_reference):
        with pytest.raises(ValueError, match=rf"state\.{name} has .* places overlap, .*; give state\.clone\(\)"):
            function(**step, state=shared)
    for x, y in zip(vars(shared).values(), vars(before).values(), strict=True):
        assert torch.equal(x, y)
    multi_token_attention_decode_reference(**step, state=before)  # what the sentence says to type


@of_a_cpu
def test_a_short_window_and_long_lengths_are_refused() -> None:
    inputs = Inputs(*MIXERS)
    step, state = inputs.step([9]), inputs.state([8])
    with pytest.raises(ValueError, match="q_window holds 2 queries"):
        multi_token_attention_decode_reference(**step | {"q_window": step["q_window"][:, :, 1:]}, state=state)
    with pytest.raises(ValueError, match="the cache holds 40 keys a sequence"):
        multi_token_attention_decode_reference(**step | {"lengths": step["lengths"] + 40}, state=state)
    mixers = {"post_conv": inputs.mixers["post_conv"], "pre_conv": inputs.mixers["pre_conv"]}
    with pytest.raises(ValueError, match="rows that steps look back on need 5: give the last 5"):
        prefill_state(inputs.q[:, :, -4:], inputs.k, lengths=torch.tensor([9]), **mixers)
    with pytest.raises(ValueError, match="lengths has 41 and the cache holds 40 keys"):
        prefill_state(inputs.q, inputs.k, lengths=torch.tensor([41]), **mixers)
    with pytest.raises(TypeError, match="post_conv is None; only a layer with a convolution of probabilities"):
        prefill_state(inputs.q, inputs.k, lengths=torch.tensor([9]), post_conv=None)


def test_fake_tensors() -> None:
    """Their lengths are no numbers that could be checked."""
    inputs, lengths = Inputs(*MIXERS, dtype=torch.float32), torch.tensor([20], device=DEVICE)
    options = {name: x for name, x in inputs.mixers.items() if name != "post_mix"}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v, lengths = map(mode.from_tensor, (inputs.q, inputs.k, inputs.v, lengths))
        state = prefill_state(q, k, lengths=lengths, **options)
        step = {"lengths": lengths + 1, "state": state, **inputs.mixers}
        got = multi_token_attention_decode(q, k, v, **step, backend="reference")
    assert got.shape == q[:, :, :1].shape


def test_forward_mode_is_refused() -> None:
    """Kernels would leave the tangents out, without a word. The reference has them."""
    step = Inputs("pre_mix", dtype=torch.float32).step([9])
    step["norm_weight"] = torch.linspace(0.5, 1.5, 16, device=DEVICE)
    words = "multi_token_attention_decode through backend 'triton' has no forward-mode derivatives"
    for name in ("q_window", "k_cache", "v_cache", "norm_weight", "pre_mix"):

        def token(x: Tensor, name: str = name, backend: str = "triton") -> Tensor:
            return multi_token_attention_decode(**step | {name: x}, backend=backend)

        x = step[name]
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=words):
            token(forward_ad.make_dual(x, x))
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(token, (x,), (x,))
    want = token(x + 1e-2 * x, backend="reference") - token(x - 1e-2 * x, backend="reference")
    got = torch.func.jvp(lambda x: token(x, backend="reference"), (x,), (x,))[1]
    torch.testing.assert_close(got, want / 2e-2, rtol=1e-2, atol=1e-3)


def test_what_kernels_cannot_run_is_refused_or_left_to_the_reference() -> None:
    inputs = Inputs("pre_mix", "post_mix", dtype=torch.float16)
    step = inputs.step([30])
    apart = step["k_cache"].mT.contiguous().mT
    with pytest.raises(ValueError, match=r"numbers of a key side by side \(stride 1\); backend='auto' picks one"):
        multi_token_attention_decode(**step | {"k_cache": apart}, backend="triton")
    got = multi_token_attention_decode(**step | {"k_cache": apart})
    assert torch.equal(got, multi_token_attention_decode_reference(**step))
    q, v = step["q_window"], step["v_cache"]
    choice = explain(q, apart, v, **inputs.mixers, decode=True)
    assert choice.backend == "reference"
    assert "numbers of a key side by side" in choice.reason
    for heads, taps, words in (
        (65, (1, 1), "65 query heads are more than 64"), (64, (16, 31), "64 heads of 31 key taps after the softmax in"),
    ):  # fmt: skip
        x = torch.empty(1, heads, 32, 256)
        with pytest.raises(ValueError, match=words):
            explain(x, x, x, post_conv=torch.empty(heads, *taps), decode=True, backend="triton")


def test_heads_that_mix_a_head_of_nan_are_nan(request) -> None:
    if DEVICE == "cpu":
        request.getfixturevalue("emulated_mta_decode")
    inputs = Inputs("pre_mix", "post_mix", heads=8, kv_heads=8, dtype=torch.float16)
    inputs.q[:, 0] = torch.nan
    assert multi_token_attention_decode(**inputs.step([30]), backend="triton").isnan().all()


def test_a_step_has_more_programs_than_are_added_at_once(request) -> None:
    if DEVICE == "cpu":
        request.getfixturevalue("emulated_mta_decode").multiprocessors = 150
    mixed = Inputs("pre_mix", "post_mix", heads=8, kv_heads=8, tokens=9600, head_dim=80, dtype=torch.float16)
    step = mixed.step([9600])
    exact = {name: x if name == "lengths" else x.double() for name, x in step.items()}
    want = multi_token_attention_decode_reference(**exact)
    assert relative_error(multi_token_attention_decode(**step, backend="triton"), want) < 2e-3


def meta(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


KEYS, OF_TRITON = "mta_decode_keys", "_mta_decode_logits_kernel"


@pytest.mark.parametrize(
    ("gpu", "heads", "kv_heads", "head_dim", "taps", "kernel"),
    [
        (H200, 8, 8, 64, (16, 16), KEYS), (H200, 16, 16, 128, (6, 11), KEYS), (H200, 8, 4, 64, (6, 11), OF_TRITON),
        (H200, 4, 4, 64, (6, 11), OF_TRITON), (H200, 17, 17, 64, (6, 11), OF_TRITON),
        (H200, 8, 8, 72, (6, 11), OF_TRITON), (H200, 8, 8, 256, (6, 11), OF_TRITON),
        (H200, 8, 8, 64, (6, 17), OF_TRITON), (H200, 16, 16, 128, (16, 11), OF_TRITON),  # no room for two tiles
        (A100, 16, 16, 128, (6, 11), OF_TRITON), (replace(A100, capability=(12, 0)), 16, 16, 64, (6, 11), OF_TRITON),
    ],
)  # fmt: skip
def test_steps_that_are_left_to_triton(gpu: PlannedGpu, heads, kv_heads, head_dim, taps, kernel) -> None:
    """Norm and gate are in the last CUDA kernel."""
    cache, lengths = meta(1, kv_heads, 4096, head_dim), meta(1, dtype=torch.int32)
    after = {"norm_weight": meta(head_dim), "gate_weight": meta(1, head_dim), "gate_bias": meta(1)}
    mixers = {"pre_conv": meta(heads, *taps), "pre_mix": meta(heads, heads), **after}
    step = partial(multi_token_attention_decode, backend="triton")
    found = plan(gpu, step, meta(1, heads, 32, head_dim), cache, cache, lengths=lengths, **mixers)
    names = found.names("cuda", "triton")
    assert kernel in names
    assert kernel != KEYS or names == (KEYS, "mta_decode_values", "mta_decode_merge")


def test_no_step_needs_more_than_a_block_has() -> None:
    sizes = itertools.product((8, 12, 16), range(16, cuda_step.MOST_HEAD_DIM + 1, 16), (False, True))
    for (heads, head_dim, paged), taps in itertools.product(sizes, ((1, 1), (6, 11), (16, 16))):
        conv = Convolution(*taps, 0)
        if not cuda_step.heads_unsupported(Operation(conv, 1.0, post_conv=conv), BF16, heads, heads, head_dim):
            constants = cuda_step.StepConstants(BF16, heads, head_dim, paged, conv, True, conv, True)
            for name in ("keys", "values", "merge"):
                assert cuda_step.StepKernel(name, constants).shared_memory <= cuda_step.SHARED_BYTES
            assert min(map(constants.stages, ("keys", "values"))) >= 2


def test_splits_fill_the_gpu_in_whole_waves() -> None:
    assert choose_splits(1, 65536, 128, 396) == 396  # 512 would take two waves for as many tiles one after another
    assert choose_splits(8, 65536, 128, 396) == 49
    assert choose_splits(1, 4096, 32, 396) == 128
    assert choose_splits(1, 100, 118, 264) == 2
    assert choose_splits(500, 4096, 64, 396) == 64  # whole tiles: 81 rounds, and 128 with one program a sequence


@pytest.mark.parametrize("taps", [None, (6, 11), (16, 31)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (12, 4), (64, 8)])
def test_programs_fill_the_gpu(heads: int, kv_heads: int, taps: tuple[int, int] | None) -> None:
    """One of 132 SMs, whatever the shape; and none is without keys."""
    convolution = None if taps is None else Convolution(*taps, taps[1] // 2)
    operation = Operation(convolution, 1.0, True, None, convolution, None)
    for head_dim, batch, capacity in itertools.product((64, 256), (1, 8, 300), (1, 4096, 1 << 20)):
        chosen = plan_step(BF16, head_dim, heads, kv_heads, operation, batch, capacity, torch.device("cpu"))
        logits, of_v, early = chosen.of_logits, chosen.of_v, chosen.early
        for programs, keys in ((logits.programs, logits.tiles["BLOCK_N"]), (of_v.programs, 16 * of_v.tiles["BLOCK_M"])):
            tiles = -(-capacity // keys)
            assert programs <= min(tiles, 512)
            assert (-(-tiles // programs) - 1) * programs < tiles  # the last round is not empty
        parts = -(-kv_heads // of_v.tiles["KV_HEADS"])
        assert early.programs <= -(-capacity // (16 * early.tiles["BLOCK_M"]))
        if capacity > 1:
            assert batch * of_v.programs * parts >= min(132, 16 * kv_heads)
            assert batch * logits.programs >= (16 if taps else 64)


def test_a_module_explains_its_steps() -> None:
    attention = MultiTokenAttention(16, 64, pre_conv=None, post_conv=None, device=DEVICE)
    q_window, k, v = torch.randn(3, 1, 16, 64, 64, device=DEVICE, dtype=torch.float16)
    q_window = q_window[:, :, :6]
    assert attention.explain(q_window, k, v, decode=True).backend == "triton"
    lengths = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    assert attention.decode(q_window, k, v, lengths=lengths).isfinite().all()
    with pytest.raises(ValueError, match="a decode step is causal"):
        MultiTokenAttention(16, 64, causal=False).explain(q_window, k, v, decode=True)
