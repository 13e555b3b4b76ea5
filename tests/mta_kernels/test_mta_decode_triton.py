"""The Triton kernels of decode against the forward in float64: on a GPU if there is one, else in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from checked_addresses import check_addresses
from decode_inputs import (
    COMBINATIONS,
    PARTS,
    Inputs,
    check_independence,
    check_replaced_sequence,
    check_steps,
    name_of,
)
from decode_steps import paged
from kernel_inputs import DEVICE, DTYPES, poison_memory, relative_error, with_gaps

from mta_kernels.multi_token_attention import (
    DecodeState,
    multi_token_attention_decode,
    multi_token_attention_decode_reference,
)

OWN = [parts for parts in COMBINATIONS if any(parts[name] for name in PARTS[1:])]  # all others are conv_attention's
ALL = dict.fromkeys(PARTS, True)
MIXING = dict.fromkeys(PARTS, False) | {"pre_mix": True, "post_mix": True}


def name_or_str(value: object) -> str:
    return name_of(value) if isinstance(value, dict) else str(value)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


@pytest.mark.parametrize(("parts", "dtype"), list(zip(OWN, itertools.cycle(DTYPES), strict=False)), ids=name_or_str)
def test_every_combination_of_parts(parts: dict[str, bool], dtype: torch.dtype) -> None:
    """Several steps in a row, after prompts shorter and longer than the taps look back."""
    inputs = Inputs(parts, batch=3, tokens=90, dtype=dtype)
    check_steps(inputs, [1, 3, 86], steps=3, splits=2)


@pytest.mark.parametrize("parts", [ALL, MIXING], ids=name_of)
def test_every_row_of_the_forward(parts: dict[str, bool]) -> None:
    inputs = Inputs(parts, tokens=12, taps=(6, 11), after=(4, 7), dtype=torch.float32)
    rows, state = inputs.double().rows(), inputs.state([0])
    for row in range(12):
        got = multi_token_attention_decode(**inputs.step([row + 1]), state=state, backend="triton", splits=1)
        assert relative_error(got[:, :, 0], rows[:, :, row]) < 3e-6, row


@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
@pytest.mark.parametrize("taps", [(1, 4), (2, 9), (11, 3), (6, 11), (16, 31)], ids=lambda t: f"{t[0]}x{t[1]}")
def test_taps(taps: tuple[int, int], pad_key: str) -> None:
    inputs = Inputs(
        ALL, heads=2, kv_heads=1, batch=2, tokens=100, taps=taps, after=taps, dtype=torch.float32, pad_key=pad_key
    )
    check_steps(inputs, [20, 97], steps=2, splits=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [17, 80, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    inputs = Inputs(ALL, batch=2, tokens=70, head_dim=head_dim, dtype=dtype)
    check_steps(inputs, [6, 68])


@pytest.mark.parametrize("parts", [ALL, MIXING], ids=name_of)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (10, 10), (16, 4), (20, 1)])
def test_heads_and_groups(heads: int, kv_heads: int, parts: dict[str, bool]) -> None:
    inputs = Inputs(parts, heads=heads, kv_heads=kv_heads, tokens=60, groups=1 if heads % 2 else heads // 2)
    inputs = inputs.to(torch.float16)
    check_steps(inputs, [57])


@pytest.mark.parametrize(
    ("parts", "splits"),
    [*((ALL, splits) for splits in (1, 3, 64, "auto")), (MIXING, 8), (MIXING, "auto")],
    ids=name_or_str,
)
def test_splits(parts: dict[str, bool], splits: int | str) -> None:
    """More of them than tiles, and several tiles each; the same result every time."""
    inputs = Inputs(parts, heads=2, batch=2, tokens=300, dtype=torch.float16)
    got = check_steps(inputs, [9, 298], splits=splits)
    assert torch.equal(got, check_steps(inputs, [9, 298], splits=splits))


def test_large_and_very_negative_scores() -> None:
    """fp16 scores of tens of thousands, and true scores all far below the zero of what is masked."""
    inputs = Inputs(MIXING, tokens=40, dtype=torch.float16, magnitude=100.0, scale=100.0)
    inputs.k *= 1.5
    inputs.mixers["pre_mix"] = torch.eye(4, device=DEVICE, dtype=torch.float16)
    scores = inputs.q[:, :, -1:].float() @ inputs.k.repeat_interleave(2, 1).float().mT * 100
    inputs.options["scale"] = 100.0 * 60000 / scores.abs().max().item()
    got = multi_token_attention_decode(**inputs.step([40]), backend="triton")
    assert got.isfinite().all()
    inputs = Inputs(ALL, tokens=50, dtype=torch.float32)
    inputs.q, inputs.k = inputs.q.abs() * 5, -inputs.k.abs() * 5
    inputs.mixers = {name: x.abs() for name, x in inputs.mixers.items()}
    check_steps(inputs, [2], splits=2)
    check_steps(inputs, [48], splits=2)


def test_fp16_scores_whose_products_are_beyond_fp16() -> None:
    """The rows of the prompt too: their products of queries and keys end above 65504, the scaled scores below."""
    inputs = Inputs(ALL, tokens=20, taps=(1, 1), head_dim=64, dtype=torch.float16, scale=0.01)
    inputs.mixers["pre_conv"][:] = 1
    inputs.mixers["pre_mix"] = torch.eye(4, device=DEVICE, dtype=torch.float16)
    inputs.q, inputs.k = inputs.q * 200, inputs.k * 200
    products = inputs.q.float() @ inputs.k.repeat_interleave(2, 1).float().mT
    assert products.abs().max() > 5 * 65504
    check_steps(inputs, [18], steps=2, splits=2)


def test_folded_queries_beyond_fp16() -> None:
    parts = dict.fromkeys(PARTS, False) | {"pre_conv": True, "pre_mix": True}
    inputs = Inputs(parts, tokens=60, dtype=torch.float16, scale=2.0)
    inputs.q *= 6e4 / inputs.q.abs().max()
    inputs.k *= 3e-6
    inputs.mixers["pre_conv"] *= 2 / inputs.mixers["pre_conv"].abs().max()
    check_steps(inputs, [50], splits=2)


def test_older_rows_of_large_scores() -> None:
    """A logit and a logsumexp are subtracted before either is multiplied: the difference alone is exact."""
    inputs = Inputs(MIXING | {"post_conv": True}, tokens=30, dtype=torch.float32)
    inputs.q[:, :, :-1] *= 1e5
    inputs.k[:, :, 1::2] = inputs.k[:, :, ::2]
    got, eager = (
        step(**inputs.step([30]), state=inputs.state([29]), **options)
        for step, options in (
            (multi_token_attention_decode, {"backend": "triton"}), (multi_token_attention_decode_reference, {}),
        )
    )  # fmt: skip
    assert relative_error(got, eager) <= 1e-5


def test_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(ALL, batch=2, tokens=50, dtype=torch.float32)
    step, state = inputs.step([4, 49]), inputs.state([3, 48])
    want = multi_token_attention_decode(**step, state=state.clone(), backend="triton", splits=2)
    if DEVICE == "cpu":
        check_addresses(monkeypatch)
    apart = {name: with_gaps(step[name], float("nan")) for name in ("q_window", *inputs.mixers)}
    apart |= {name: step[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
    apart["lengths"] = torch.stack([step["lengths"].int()] * 2, 1)[:, 0]
    room = DecodeState(with_gaps(state.logits, 7), with_gaps(state.logsumexp, 7), with_gaps(state.lengths, 7))
    got = multi_token_attention_decode(**step | apart, state=room, backend="triton", splits=2)
    torch.testing.assert_close(got, want)
    assert room.lengths.tolist() == [4, 49]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("parts", [ALL, MIXING], ids=name_of)
def test_pages(parts: dict[str, bool], page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        check_addresses(monkeypatch)
    inputs = Inputs(parts, batch=3, tokens=128, dtype=torch.float32)
    lengths = [16, 65, 120]
    step, state = inputs.step(lengths), inputs.state([15, 64, 119])
    want = multi_token_attention_decode(**step, state=None if state is None else state.clone(), backend="triton")
    step["k_cache"], table = paged(step["k_cache"], page_size)
    step["v_cache"], _ = paged(step["v_cache"], page_size)
    used = -(-step["lengths"] // page_size)
    table[torch.arange(table.shape[1], device=DEVICE) >= used[:, None]] = 2**30  # such entries are never read
    got = multi_token_attention_decode(**step, state=state, block_table=table, backend="triton")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("parts", [ALL, MIXING], ids=name_of)
def test_sequences_without_tokens_give_zeros(parts: dict[str, bool]) -> None:
    inputs = Inputs(parts, batch=2, dtype=torch.float16)
    state = inputs.state([0, 20])
    got = multi_token_attention_decode(**inputs.step([0, 21]), state=state, backend="triton")
    assert (got[0] == 0).all()
    assert relative_error(got[1, :, 0], inputs.double().rows()[1, :, 20]) < 2e-3
    if state is not None:
        assert state.lengths.tolist() == [0, 21]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [ALL, MIXING], ids=name_of)
def test_sequences_and_groups_of_heads_are_independent(parts: dict[str, bool], dtype: torch.dtype) -> None:
    check_independence(Inputs(parts, batch=2, tokens=41, groups=2, dtype=dtype), [3, 40], splits=2)


def test_a_new_sequence_takes_the_place_of_another() -> None:
    check_replaced_sequence(Inputs(ALL, batch=2, tokens=40, dtype=torch.float16), splits=2)


def test_float32_mixers_beside_fp16_and_a_repeated_step() -> None:
    inputs = Inputs(ALL, tokens=60, dtype=torch.float16)
    inputs.mixers = {name: x.float() * 1.001 for name, x in inputs.mixers.items()}
    check_steps(inputs, [40], steps=2)
    state = inputs.state([40])
    first, second = (multi_token_attention_decode(**inputs.step([41]), state=state, backend="triton") for _ in range(2))
    assert torch.equal(first, second)


def test_norm_and_gate_follow() -> None:
    after = {"norm_weight": torch.linspace(0.5, 1.5, 16), "depth": 2, "gate_weight": torch.linspace(-1, 1, 16)[None]}
    after = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in after.items()}
    inputs = Inputs(MIXING, dtype=torch.float16, **after)
    check_steps(inputs, [30])
    plain = Inputs(dict.fromkeys(PARTS, False), dtype=torch.float16, **after)
    check_steps(plain, [30])  # through conv_attention's decode


def test_compiled_as_one_graph() -> None:
    """The state that a compiled step changes is the caller's."""
    after = {"norm_weight": torch.linspace(0.5, 1.5, 16, device=DEVICE), "depth": 2}
    inputs = Inputs(ALL, tokens=40, dtype=torch.float32, **after)
    step, state = inputs.step([30]), inputs.state([29])
    other = state.clone()

    def one_step(state: DecodeState) -> Tensor:
        return multi_token_attention_decode(**step, state=state, backend="triton") * 2

    want = one_step(other)
    compiled = torch.compile(one_step, fullgraph=True, backend="aot_eager" if DEVICE == "cpu" else "inductor")
    assert torch.equal(compiled(state), want)
    assert state.lengths.tolist() == [30]
    assert torch.equal(state.logsumexp, other.logsumexp)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", OWN, ids=name_of)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 64), (10, 10, 128), (16, 16, 96), (32, 8, 128)])
def test_bfloat16_at_the_models_shapes(parts: dict[str, bool], heads: int, kv_heads: int, head_dim: int) -> None:
    inputs = Inputs(
        parts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=3, tokens=1500, taps=(6, 11), after=(6, 11),
        dtype=torch.bfloat16,
    )  # fmt: skip
    check_steps(inputs, [1, 700, 1490], steps=4)


@pytest.mark.gpu
def test_cuda_graph_of_a_step() -> None:
    """Replayed for several tokens: lengths, the window and the state change in place."""
    ones = torch.ones(1, 64, device=DEVICE)
    after = {"norm_weight": ones[0], "depth": 1, "gate_weight": ones}
    inputs = Inputs(ALL, heads=16, kv_heads=16, head_dim=64, tokens=600, batch=2, dtype=torch.bfloat16, **after)
    state = inputs.state([500, 9])
    step = inputs.step([501, 10])
    step["k_cache"], step["v_cache"] = inputs.k, inputs.v
    for _ in range(3):
        multi_token_attention_decode(**step, state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multi_token_attention_decode(**step, state=state)
    rows = inputs.double().rows()
    for count in range(1, 5):
        lengths = [500 + count, 9 + count]
        now = inputs.step(lengths)
        step["q_window"].copy_(now["q_window"])
        step["lengths"].copy_(now["lengths"])
        graph.replay()
        for sequence, length in enumerate(lengths):
            assert relative_error(out[sequence, :, 0], rows[sequence, :, length - 1]) < 0.02
