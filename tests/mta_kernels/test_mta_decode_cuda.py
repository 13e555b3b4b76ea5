"""The CUDA kernels of decode against the forward in float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from emulated_mta_decode import emulated_mta_decode  # noqa: F401
from kernel_inputs import DEVICE, DTYPES, poison_memory, relative_error, with_gaps
from torch import Tensor

from mta_kernels.multi_token_attention import (
    DecodeState,
    multi_token_attention_decode,
    multi_token_attention_decode_reference,
)
from mta_kernels.multi_token_attention.decode import api as decode_api
from mta_kernels.multi_token_attention.decode import triton as decode_triton
from mta_kernels.multi_token_attention.decode_cuda import plan

pytest.importorskip("triton")

OWN = [parts for parts in COMBINATIONS if any(parts[name] for name in PARTS[1:])]
ALL = dict.fromkeys(PARTS, True)
WITHOUT_KERNELS = (
    "test_what_is_left_to_triton",
    "test_gpus_whose_blocks_have_no_room_keep_triton", "test_no_step_needs_more_than_that_room",
    "test_the_compiler_takes_them",
)  # fmt: skip
MIXING = dict.fromkeys(PARTS, False) | {"pre_mix": True, "post_mix": True}
# Whether there is a norm, the numbers of a head's gate, 0 without one and None for one a head dim, and a bias.
NORM_AND_GATE = [
    (True, 0, False), (False, 1, False), (False, 1, True), (False, None, False), (False, None, True), (True, 1, False),
    (True, 1, True), (True, None, False), (True, None, True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)
    if DEVICE == "cuda" or request.node.originalname in WITHOUT_KERNELS:
        return SimpleNamespace()
    return request.getfixturevalue("emulated_mta_decode")


def inputs_of(parts: dict[str, bool], heads: int = 8, dtype: torch.dtype = torch.float16, **options) -> Inputs:
    return Inputs(parts, heads=heads, kv_heads=heads, dtype=dtype, **options)


def norm_and_gate(norm: bool, gate: int | None, bias: bool, head_dim: int, dtype=torch.float16) -> dict[str, Any]:
    """Random tensors of them in a dtype, a depth and an eps that counts."""
    generator, outputs = torch.Generator().manual_seed(2), head_dim if gate is None else gate

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    options = {"norm_weight": 1 + normal(head_dim) / 3, "depth": 3, "norm_eps": 0.1} if norm else {}
    options |= {"gate_weight": normal(outputs, head_dim) / head_dim**0.5} if outputs else {}
    return options | ({"gate_bias": normal(outputs)} if bias else {})


@pytest.mark.parametrize("parts", OWN, ids=name_of)
def test_every_combination_of_parts(parts: dict[str, bool]) -> None:
    """Prompts shorter and longer than the taps look back; programs that share a sequence, and that have several."""
    inputs = inputs_of(parts, batch=3, tokens=300)
    check_steps(inputs, [1, 298, 3], steps=2)


@pytest.mark.parametrize("dtype", [x for x in DTYPES if x.itemsize == 2], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (10, 128), (9, 96)])
def test_heads_and_head_dims(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    inputs = inputs_of(ALL, heads, dtype, head_dim=head_dim, tokens=170, taps=(6, 11), after=(6, 11))
    check_steps(inputs, [168])


@pytest.mark.parametrize(
    ("taps", "pad_key"), [((1, 4), "both"), ((1, 4), "left"), ((16, 16), "right"), ((16, 16), "both")], ids=str
)
def test_taps(taps: tuple[int, int], pad_key: str) -> None:
    check_steps(inputs_of(ALL, taps=taps, after=taps, batch=2, tokens=150, pad_key=pad_key), [9, 147], steps=2)


@pytest.fixture
def no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and gate of the public functions are nowhere but in merge.cu."""

    def called(*arguments: object) -> None:
        raise AssertionError("norm and gate follow in a kernel of their own")

    for module in (decode_api, decode_triton):
        monkeypatch.setattr(module, "norm_and_gate", called)


@pytest.mark.parametrize("kind", NORM_AND_GATE, ids=str)
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.float32), (96, torch.float16)], ids=str)
def test_norm_and_gate(kind: tuple, head_dim: int, dtype: torch.dtype, no_other_kernel: None) -> None:
    """Sequences of one program and of several; weights of q's dtype and of float32, which is not rounded."""
    after = norm_and_gate(*kind, head_dim, dtype)
    check_steps(inputs_of(MIXING, batch=3, tokens=100, head_dim=head_dim, **after), [0, 98, 3], splits=3)


@pytest.mark.parametrize("head_dim", range(16, plan.MOST_HEAD_DIM + 1, 16))
def test_norm_and_gate_of_every_head_dim(head_dim: int, no_other_kernel: None) -> None:
    """Rows of partial outputs that a warp has several of, and that leave lanes idle; more of them than fit at once."""
    for gate in (1, None):
        inputs = inputs_of(MIXING, tokens=40, head_dim=head_dim, **norm_and_gate(True, gate, True, head_dim))
        check_steps(inputs, [39], splits=[3, 40][gate is None])
    check_steps(inputs_of(MIXING, tokens=300, head_dim=head_dim), [299], splits=128)


@pytest.mark.parametrize("gate", [1, None])
def test_strides_of_norm_and_gate(gate: int | None, no_other_kernel: None) -> None:
    after = norm_and_gate(True, gate, True, 32)
    inputs = inputs_of(MIXING, batch=2, head_dim=32)
    step = inputs.step([9, 30])
    want = multi_token_attention_decode(**step, **after, backend="triton")
    apart = {name: with_gaps(x, float("nan")) if isinstance(x, Tensor) else x for name, x in after.items()}
    assert torch.equal(multi_token_attention_decode(**step, **apart, backend="triton"), want)
    transposed = after["gate_weight"].mT.contiguous().mT
    assert torch.equal(
        multi_token_attention_decode(**step, **after | {"gate_weight": transposed}, backend="triton"), want
    )
    same = {name: x[..., :1].expand(x.shape) for name, x in after.items() if isinstance(x, Tensor)}
    want = multi_token_attention_decode(**step, **after | {name: x.contiguous() for name, x in same.items()})
    assert torch.equal(multi_token_attention_decode(**step, **after | same), want)


def test_norm_and_gate_of_large_and_small_outputs(no_other_kernel: None) -> None:
    """A gate that is open or closed, and outputs whose squares no 16 bits hold."""
    after = norm_and_gate(True, 1, True, 64) | {"norm_eps": 0.0}
    for magnitude, by in ((1e4, 1.0), (1e-4, 1.0), (1.0, 100.0), (1.0, -100.0)):
        after["gate_weight"] = by * norm_and_gate(True, 1, True, 64)["gate_weight"]
        inputs = inputs_of(MIXING, head_dim=64, **after)
        inputs.v = inputs.v * magnitude
        check_steps(inputs, [30])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NORM_AND_GATE, ids=str)
def test_norm_and_gate_in_bfloat16_at_the_models_shapes(kind: tuple) -> None:
    for heads, head_dim in ((16, 64), (10, 128), (16, 96)):
        shape = {"head_dim": head_dim, "batch": 3, "tokens": 1500, "taps": (6, 11), "after": (6, 11)}
        after = norm_and_gate(*kind, head_dim, torch.float32)
        check_steps(inputs_of(ALL, heads, torch.bfloat16, **shape, **after), [1, 700, 1490])


@pytest.mark.parametrize("splits", [1, 3, 16])
def test_splits(splits: int) -> None:
    """More of them than keys, too, beside rows of logits that are read 8 at a time; the same result every time."""
    inputs = inputs_of(ALL, batch=5, tokens=104)
    got = check_steps(inputs, [0, 1, 9, 40, 100], splits=splits)
    assert torch.equal(got, check_steps(inputs, [0, 1, 9, 40, 100], splits=splits))


def test_a_program_has_many_sequences(machine: SimpleNamespace) -> None:
    machine.multiprocessors = 2
    lengths = [3 * n % 37 for n in range(24)]
    check_steps(inputs_of(ALL, batch=24, tokens=40), lengths)


def test_a_sequence_has_more_programs_than_are_added_at_once(machine: SimpleNamespace) -> None:
    machine.multiprocessors = 150
    step = inputs_of(MIXING, tokens=9600, head_dim=80).step([9600])
    got = multi_token_attention_decode(**step, backend="triton")
    exact = {name: x.double() if name != "lengths" else x for name, x in step.items()}
    assert relative_error(got, multi_token_attention_decode_reference(**exact)) < 2e-3


@pytest.mark.parametrize("seed", range(3))
def test_threads_and_copies_in_any_order(seed: int, machine: SimpleNamespace) -> None:
    machine.seed = seed
    inputs = inputs_of(ALL, 9, tokens=420, taps=(6, 11), after=(6, 11))
    check_steps(inputs, [417])


def test_any_strides() -> None:
    inputs = inputs_of(ALL, batch=2, tokens=50)
    step, state = inputs.step([4, 49]), inputs.state([3, 48])
    assert state is not None
    want = multi_token_attention_decode(**step, state=state.clone(), backend="triton")
    apart = {name: with_gaps(step[name], float("nan")) for name in ("q_window", *inputs.mixers)}
    apart |= {name: step[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
    apart["lengths"] = torch.stack([step["lengths"].int()] * 2, 1)[:, 0]
    room = DecodeState(with_gaps(state.logits, 7), with_gaps(state.logsumexp, 7), with_gaps(state.lengths, 7))
    got = multi_token_attention_decode(**step | apart, state=room, backend="triton")
    assert torch.equal(got, want)
    assert room.lengths.tolist() == [4, 49]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("parts", [ALL, MIXING], ids=name_of)
def test_pages(parts: dict[str, bool], page_size: int) -> None:
    inputs = inputs_of(parts, batch=3, tokens=128)
    step, state = inputs.step([16, 65, 120]), inputs.state([15, 64, 119])
    want = multi_token_attention_decode(**step, state=None if state is None else state.clone(), backend="triton")
    step["k_cache"], table = paged(step["k_cache"], page_size)
    step["v_cache"], _ = paged(step["v_cache"], page_size)
    used = -(-step["lengths"] // page_size)
    table[torch.arange(table.shape[1], device=DEVICE) >= used[:, None]] = 2**30  # such entries are never read
    table = torch.stack([table] * 2, 2)[:, :, 0]
    got = multi_token_attention_decode(**step, state=state, block_table=table, backend="triton")
    assert torch.equal(got, want)


@pytest.mark.parametrize("parts", [ALL, MIXING], ids=name_of)
def test_sequences_without_tokens_give_zeros(parts: dict[str, bool]) -> None:
    inputs = inputs_of(parts, batch=2)
    after = norm_and_gate(True, None, True, 16)
    step = inputs.step([0, 0])
    assert (multi_token_attention_decode(**step, **after, state=inputs.state([0, 0]), splits=3) == 0).all()
    state = inputs.state([0, 20])
    got = multi_token_attention_decode(**inputs.step([0, 21]), state=state, backend="triton")
    assert (got[0] == 0).all()
    assert relative_error(got[1, :, 0], inputs.double().rows()[1, :, 20]) < 2e-3
    if state is not None:
        assert state.lengths.tolist() == [0, 21]


@pytest.mark.parametrize(("parts", "groups"), [(ALL, 8), (MIXING, 2)], ids=["all parts", "float32 mixings"])
def test_sequences_and_groups_of_heads_are_independent(parts: dict[str, bool], groups: int) -> None:
    inputs = inputs_of(parts, batch=2, tokens=48, groups=groups)
    inputs.mixers = {name: x if parts is ALL else x.float() for name, x in inputs.mixers.items()}
    check_independence(inputs, [3, 40])


def test_a_new_sequence_takes_the_place_of_another() -> None:
    check_replaced_sequence(inputs_of(ALL, batch=2, tokens=40), splits=3)


def test_float32_mixers_and_a_repeated_step() -> None:
    inputs = inputs_of(ALL, tokens=60)
    inputs.mixers = {name: x.float() * 1.001 for name, x in inputs.mixers.items()}
    check_steps(inputs, [40], steps=2)
    state = inputs.state([40])
    first, second = (multi_token_attention_decode(**inputs.step([41]), state=state, backend="triton") for _ in range(2))
    assert torch.equal(first, second)
