"""Decode of the whole multi-token attention against the forward in float64: the definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from decode_inputs import COMBINATIONS, PARTS, Inputs, name_of
from kernel_inputs import DEVICE, relative_error
from torch._subclasses import FakeTensorMode

from mta_kernels.conv_attention.arguments import check_no_overlap
from mta_kernels.multi_token_attention import (
    DecodeState,
    multi_token_attention_decode,
    multi_token_attention_decode_reference,
    prefill_state,
)


@pytest.mark.parametrize("parts", COMBINATIONS, ids=name_of)
def test_definition_gives_every_row_of_the_forward(parts: dict[str, bool]) -> None:
    """From the first token on, by one state, in steps of each token."""
    inputs = Inputs(parts, tokens=14)
    rows = inputs.rows()
    state = inputs.state([0])
    for row in range(14):
        got = multi_token_attention_decode_reference(**inputs.step([row + 1]), state=state)
        torch.testing.assert_close(got[:, :, 0], rows[:, :, row], msg=str(row))


VMAP = r"cannot run within torch\.func\.vmap; give all sequences as one batch instead$"


@pytest.mark.parametrize("name", ["q_window", "v_cache", "state"])
def test_vmap_over_steps_with_a_state_is_refused(name: str) -> None:
    """PyTorch's own words are of an index_put_, or of a fallback path."""
    inputs = Inputs(dict.fromkeys(PARTS, True))
    step, state = inputs.step([8]), inputs.state([7])

    def of(*mapped: torch.Tensor) -> torch.Tensor:
        other = {"state": DecodeState(*mapped)} if name == "state" else {name: mapped[0], "state": state}
        return multi_token_attention_decode(**(step | other))

    mapped = (state.logits, state.logsumexp, state.lengths) if name == "state" else (step[name],)
    with pytest.raises(RuntimeError, match=f"^multi_token_attention_decode with a state {VMAP}"):
        torch.func.vmap(of)(*(x[None] for x in mapped))


def test_vmap_over_prompts_is_refused() -> None:
    post_conv, lengths = torch.randn(4, 3, 3), torch.tensor([8])
    with pytest.raises(RuntimeError, match=f"^prefill_state {VMAP}"):
        torch.func.vmap(lambda q: prefill_state(q, q, lengths=lengths, post_conv=post_conv).logits)(
            torch.randn(2, 1, 4, 8, 16)
        )


def test_vmap_over_steps_without_a_state() -> None:
    inputs = Inputs({**dict.fromkeys(PARTS, True), "post_conv": False}, dtype=torch.float32)
    step = inputs.step([8])
    lengths = torch.stack([step["lengths"], step["lengths"] - 3])

    def of(lengths: torch.Tensor, backend: str = "reference") -> torch.Tensor:
        return multi_token_attention_decode(**(step | {"lengths": lengths}), backend=backend)

    torch.testing.assert_close(torch.func.vmap(of)(lengths), torch.stack([of(x) for x in lengths]))
    with pytest.raises(RuntimeError, match=f"^multi_token_attention_decode through backend 'triton' {VMAP}"):
        torch.func.vmap(partial(of, backend="triton"))(lengths)


@pytest.mark.parametrize("taps", [(1, 3), (3, 5)])
def test_a_prompts_last_token_may_be_decoded_again(taps: tuple[int, int]) -> None:
    """With a query more in the window of the state. Without, it is refused on a CPU, and NaN where nobody looks."""
    lengths = [1, 2, 4, 7, 33]
    inputs = Inputs(dict.fromkeys(PARTS, True), batch=5, taps=taps)
    rows = inputs.rows()
    got = multi_token_attention_decode_reference(**inputs.step(lengths), state=inputs.state(lengths, extra=1))
    for sequence, length in enumerate(lengths):
        torch.testing.assert_close(got[sequence, :, 0], rows[sequence, :, length - 1])
    step, state = inputs.step(lengths), inputs.state(lengths)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"state is of a prompt of \d+; give lengths that count the new token, or"):
            multi_token_attention_decode_reference(**step, state=state)
        state = replace(state, lengths=state.lengths - 1)
    got = multi_token_attention_decode_reference(**step, state=state)
    for sequence, length in enumerate(lengths):
        if length < taps[0] + 3:
            torch.testing.assert_close(got[sequence, :, 0], rows[sequence, :, length - 1])
        else:
            assert got[sequence].isnan().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for lengths on a GPU")
def test_state_that_does_not_fit_is_refused() -> None:
    inputs = Inputs(dict.fromkeys(PARTS, True), batch=2)
    step = inputs.step([9, 5])
    with pytest.raises(TypeError, match="state is None and post_conv looks back on 4 queries; give the DecodeState"):
        multi_token_attention_decode_reference(**step)
    for lengths in ([7, 4], [8, 3], [9, 6]):
        with pytest.raises(ValueError, match=r"lengths says \d tokens of sequence \d, the new one included, and state"):
            multi_token_attention_decode_reference(**step, state=inputs.state(lengths))
    state = inputs.state([8, 4])
    short = DecodeState(state.logits[..., :30], state.logsumexp, state.lengths)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 4, 4, 30\); expected \[2, 4, 4, 40 or more\]"):
        multi_token_attention_decode_reference(**step, state=short)
    half = DecodeState(state.logits.half(), state.logsumexp, state.lengths)
    with pytest.raises(TypeError, match=r"state\.logits has dtype torch\.float16 and q_window torch\.float64"):
        multi_token_attention_decode_reference(**step, state=half)
    numbers, sums = torch.tensor([8, 4], device=DEVICE), state.logsumexp
    for changes, error, words in (
        (
            {"logsumexp": sums[:, :, 1:]},
            ValueError,
            r"logsumexp of shape \(2, 4, 3\) and lengths \(2,\); expected \[2, 4",
        ),
        ({"lengths": state.lengths[:1]}, ValueError, r"lengths \(1,\); expected \[2, 4, 4\] and \[2\]"),
        ({"logsumexp": sums.half()}, TypeError, "logsumexp in torch.float16 and lengths in torch.int32; expected"),
        ({"lengths": numbers}, TypeError, "lengths in torch.int64; expected torch.float64 and torch.int32"),
        ({"lengths": None}, TypeError, "state.lengths is a NoneType; expected a tensor"),
        ({"logsumexp": sums.to("meta")}, ValueError, f"state.logsumexp is on meta and q_window on {DEVICE}"),
    ):
        with pytest.raises(error, match=words):
            multi_token_attention_decode_reference(**step, state=replace(state, **changes))
    step["q_window"].requires_grad_()
    with pytest.raises(RuntimeError, match="not differentiable"):
        multi_token_attention_decode_reference(**step, state=state)


@pytest.mark.parametrize("name", ["logits", "logsumexp", "lengths"])
def test_state_whose_sequences_share_memory_is_refused_before_it_is_written(name: str) -> None:
    inputs = Inputs(dict.fromkeys(PARTS, True), batch=2)
    step, state = inputs.step([9, 9]), inputs.state([8, 8], extra=1)
    shared = replace(state, **{name: getattr(state, name)[:1].expand_as(getattr(state, name))})
    before = shared.clone()
    for function in (multi_token_attention_decode, multi_token_attention_decode_reference):
        with pytest.raises(ValueError, match=rf"state\.{name} has .* places overlap, .*; give state\.clone\(\)"):
            function(**step, state=shared)
    for x, y in zip(vars(shared).values(), vars(before).values(), strict=True):
        assert torch.equal(x, y)
    got = multi_token_attention_decode_reference(**step, state=before)  # what the sentence says to type
    torch.testing.assert_close(got[0, :, 0], inputs.rows()[0, :, 8])


def test_places_overlap() -> None:
    x = torch.zeros(4, 6)
    for apart in (x, x.mT, x[::2, 1::2], x[:1].expand(1, 6), x[:, :1].as_strided((4, 1), (6, 0)), x[1:].mT[None]):
        check_no_overlap("x", apart, "x.clone()")
    for shared in (x[:1].expand(4, 6), x.flatten().unfold(0, 3, 2), x.as_strided((3, 2), (1, 2))):
        with pytest.raises(ValueError, match=r"x has shape .*; give x\.clone\(\)"):
            check_no_overlap("x", shared, "x.clone()")


@pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for lengths on a GPU")
def test_short_window_and_long_lengths_are_refused() -> None:
    inputs = Inputs(dict.fromkeys(PARTS, True))
    step = inputs.step([9])
    short = step | {"q_window": step["q_window"][:, :, 1:]}
    with pytest.raises(ValueError, match="q_window holds 2 queries"):
        multi_token_attention_decode_reference(**short, state=inputs.state([8]))
    with pytest.raises(ValueError, match="the cache holds 40 keys a sequence"):
        multi_token_attention_decode_reference(**step | {"lengths": step["lengths"] + 40}, state=inputs.state([8]))
    mixers = {"post_conv": inputs.mixers["post_conv"], "pre_conv": inputs.mixers["pre_conv"]}
    with pytest.raises(ValueError, match="rows that steps look back on need 5: give the last 5"):
        prefill_state(inputs.q[:, :, -4:], inputs.k, lengths=torch.tensor([9], device=DEVICE), **mixers)
    with pytest.raises(ValueError, match="lengths has 41 and the cache holds 40 keys"):
        prefill_state(inputs.q, inputs.k, lengths=torch.tensor([41], device=DEVICE), **mixers)
    with pytest.raises(TypeError, match="post_conv is None; only a layer with a convolution of probabilities"):
        prefill_state(inputs.q, inputs.k, lengths=torch.tensor([9], device=DEVICE), post_conv=None)


def test_older_rows_of_large_scores() -> None:
    """A logit and a logsumexp are subtracted before either is multiplied: the difference alone is exact."""
    pytest.importorskip("triton")
    inputs = Inputs(dict.fromkeys(PARTS, True) | {"pre_conv": False}, tokens=30, dtype=torch.float32)
    inputs.q[:, :, :-1] *= 1e5
    inputs.k[:, :, 1::2] = inputs.k[:, :, ::2]
    step, states = inputs.step([30]), [inputs.state([29]) for _ in range(2)]
    got = multi_token_attention_decode(**step, state=states[0], backend="triton")
    assert relative_error(got, multi_token_attention_decode_reference(**step, state=states[1])) <= 1e-5


def test_under_autocast_the_state_is_of_its_dtype() -> None:
    inputs = Inputs(dict.fromkeys(PARTS, True), dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        state = inputs.state([20])
        got = multi_token_attention_decode(**inputs.step([21]), state=state, backend="reference")
    assert state.logits.dtype == got.dtype == torch.bfloat16
    assert relative_error(got, inputs.double().rows()[:, :, 20:21]) <= 0.03


def test_fake_tensors() -> None:
    """Their lengths are no numbers that could be checked."""
    inputs, lengths = Inputs(dict.fromkeys(PARTS, True), dtype=torch.float32), torch.tensor([20], device=DEVICE)
    options = {name: x for name, x in inputs.mixers.items() if name != "post_mix"}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v, lengths = map(mode.from_tensor, (inputs.q, inputs.k, inputs.v, lengths))
        state = prefill_state(q, k, lengths=lengths, **options)
        step = {"lengths": lengths + 1, "state": state, **inputs.mixers}
        got = multi_token_attention_decode(q, k, v, **step, backend="reference")
    assert got.shape == q[:, :, :1].shape
