"""Plans are what calls run: the same launches as a call makes, on GPUs that are not here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.conv_attention import conv_attention, conv_attention_decode
from mta_kernels.gpu_limits import INTERPRETED_CAPABILITY, INTERPRETED_SHARED_MEMORY, INTERPRETED_SM_COUNT
from mta_kernels.multi_token_attention import DecodeState, explain, multi_token_attention, multi_token_attention_decode
from mta_kernels.plan import A100, H200, Recorder, on_planned, plan

HEADS, ROWS, HEAD_DIM, TAPS = 2, 8, 16, (2, 3)
INTERPRETED = planned.PlannedGpu(
    "", INTERPRETED_CAPABILITY, INTERPRETED_SHARED_MEMORY, 228 * 1024, INTERPRETED_SM_COUNT, 0, has_nvrtc=False
)  # fmt: skip


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=grad)


def inputs(rows: int = 4096, head_dim: int = 64, heads: int = 16, grad: bool = False) -> list[Tensor]:
    return [meta(1, heads, rows, head_dim, grad=grad) for _ in range(3)]


def mixers(*names: str, heads: int = 16) -> dict[str, Tensor]:
    return {name: meta(heads, *((6, 11) if name.endswith("conv") else (heads,)), grad=True) for name in names}


ALL = ("pre_conv", "pre_mix", "post_conv", "post_mix")


@pytest.mark.parametrize(
    ("gpu", "backend", "kernels"),
    [
        (H200, "auto", ("hopper_prepare", "hopper_backward", "backward_exact")),
        (H200, "cuda", ("cuda_backward_prepare", "cuda_backward", "backward_exact")),
        (A100, "auto", ("cuda_backward_prepare", "cuda_backward", "backward_exact")),
        (replace(H200, has_nvrtc=False), "auto", ()),
    ],
)
def test_a_gpu_that_is_not_here_decides(gpu: planned.PlannedGpu, backend: str, kernels: tuple[str, ...]) -> None:
    found = plan(gpu, conv_attention, *inputs(grad=True), meta(16, 6, 11, grad=True), backend=backend, backward=True)
    assert found.names("cuda") == kernels
    assert ("_value_gradients_kernel" in found.names("triton")) == (not kernels)
    for call in found.calls:
        assert call.language == "torch" or (min(call.grid) > 0 and call.threads % 32 == 0 and call.bytes > 0)


@pytest.mark.parametrize(
    ("rows", "head_dim", "name", "blocks"), [(512, 64, "mix_rows", 396), (4096, 128, "mix_logits", 120)]
)
def test_as_many_blocks_as_an_h200_launched(rows: int, head_dim: int, name: str, blocks: int) -> None:
    q, k, v = (meta(2, 16, rows, head_dim) for _ in range(3))
    found = plan(H200, multi_token_attention, q, k, v, **mixers("pre_mix", "post_mix"))
    assert [call.grid[0] for call in found.calls if call.name == name] == [blocks]


@pytest.mark.parametrize("page_size", [0, 16])
def test_decode(page_size: int) -> None:
    pages = {"block_table": meta(2, 4096 // page_size, dtype=torch.int32)} if page_size else {}
    cache = meta(512, 4, page_size, 64) if page_size else meta(2, 4, 4096, 64)
    lengths, q = meta(2, dtype=torch.int32), meta(2, 16, 6, 64)
    found = plan(H200, conv_attention_decode, q, cache, cache, meta(16, 6, 11), lengths=lengths, **pages)
    assert found.names("cuda", "triton")[0] == "cuda_decode"


class Running(Recorder):
    """Notes launches of Triton's interpreter, and lets them run."""

    def triton(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: Any) -> None:
        super().triton(kernel, grid, args, options)
        planned.record_with(None)
        kernel[grid](*args, **options)
        planned.record_with(self)


def launches(recorder: Recorder) -> list[tuple]:
    return [
        (x.name, x.grid, {k: v for k, v in x.constants.items() if k not in ("DEPENDENT_LAUNCH", "launch_pdl")})
        for x in recorder.found.calls
        if x.language == "triton"
    ]


@pytest.mark.parametrize("steps", [(), ("pre_mix",), ALL])
def test_a_plan_has_the_launches_of_the_call(steps: tuple[str, ...]) -> None:
    """Forward, backward and decode of Triton, against what its interpreter ran meanwhile."""
    of_mixers = {name: (HEADS, *TAPS) if name.endswith("conv") else (HEADS, HEADS) for name in steps}
    shapes = (1, HEADS, ROWS, HEAD_DIM), of_mixers

    def run(device: str) -> None:
        q, k, v = (torch.ones(shapes[0], device=device, requires_grad=True) for _ in range(3))
        given = {name: torch.ones(shape, device=device) for name, shape in shapes[1].items()}
        lengths = torch.full((1,), ROWS, dtype=torch.int32, device=device)
        if not given:
            weight = torch.ones(HEADS, *TAPS, device=device)
            conv_attention(q, k, v, weight, backend="triton").sum().backward()
            conv_attention_decode(*(x.detach() for x in (q, k, v)), weight, lengths=lengths, backend="triton")
            return
        multi_token_attention(q, k, v, **given, backend="triton").sum().backward()
        state = DecodeState.empty(1, HEADS, TAPS[0], ROWS, dtype=torch.float32, device=device)
        lengths = torch.ones_like(lengths)
        tensors = (x.detach() for x in (q, k, v))
        multi_token_attention_decode(*tensors, lengths=lengths, state=state, **given, backend="triton")

    ran = Running(INTERPRETED)
    planned.record_with(ran)
    try:
        run("cpu")
    finally:
        planned.record_with(None)
    expected = launches(ran)
    assert len(expected) > 8
    recorder = Recorder(INTERPRETED)
    recorder.found = plan(INTERPRETED, run, "meta")
    assert launches(recorder) == expected


def test_memory_is_the_most_that_lives_at_once() -> None:
    x = meta(1024, dtype=torch.float32)

    def three(x: Tensor) -> Tensor:
        y = x + 1
        z = y + 1
        del y
        return z + z

    found = plan(H200, three, x)
    assert (found.peak_bytes, [call.name for call in found.calls]) == (2 * 4096, ["add"] * 3)
    assert [call.bytes for call in found.calls] == [2 * 4096] * 3
    expanded = plan(H200, conv_attention, *inputs(), meta(16, 6, 11), backend="triton")
    assert expanded.peak_bytes == pytest.approx(71.57e6, rel=1e-3)  # a launch keeps no scratch that the call frees
    everything = plan(H200, multi_token_attention, *inputs(), **mixers(*ALL)).peak_bytes
    assert everything > plan(H200, conv_attention, *inputs(), meta(16, 6, 11)).peak_bytes > 2 * 16 * 4096 * 64


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("head_chunk", "times"), [(None, 8), (4, 2), (1, 0.6)])
def test_scratch_of_a_forward_is_as_many_times_its_keys(head_dim: int, head_chunk: int | None, times: float) -> None:
    q, k, v = inputs(head_dim=head_dim)
    found = plan(H200, conv_attention, q, k, v, meta(16, 6, 11), backend="triton", head_chunk=head_chunk)
    assert 0 < found.peak_bytes - q.nbytes <= times * k.nbytes


def test_an_error_of_the_call_is_the_plans_and_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="head_dim 300"):
        plan(H200, conv_attention, *inputs(head_dim=300), meta(16, 6, 11), backend="hopper")
    assert planned.recorder() is None
    with pytest.raises(RuntimeError, match="planned already"):
        plan(H200, plan, H200, conv_attention, *inputs(), meta(16, 6, 11))
    assert planned.recorder() is None


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert grad.is_cuda, "as in the forward"
        raise ValueError("no gradient")


def test_a_backward_that_raises_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="no gradient"):
        plan(H200, Refusing.apply, meta(4, grad=True), backward=True)
    assert planned.recorder() is None
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


RTX_4090 = planned.PlannedGpu("NVIDIA GeForce RTX 4090", (8, 9), 99 * 1024, 100 * 1024, 128, 24 * 10**9)
BY_HEADS = "convolve_heads convolution_gradients differentiate_logits"


@pytest.mark.parametrize(
    ("steps", "gpu", "dtype", "forward", "backward"),
    [
        (("pre_mix", "post_mix"), H200, torch.bfloat16, "mix_logits finish_logits mix_values", "mix_rows_backward"),
        (("pre_mix", "post_mix"), A100, torch.bfloat16, "mix_rows", "mix_rows_backward"),
        (ALL, H200, torch.bfloat16, "pre_heads merge_pieces post_heads", f"rebuild_probabilities {BY_HEADS}"),
        (ALL, RTX_4090, torch.bfloat16, "convolve_rows", "convolve_rows convolution_gradients"),
        (ALL[1:], H200, torch.bfloat16, "pre_heads merge_pieces post_heads", f"mix_probabilities {BY_HEADS}"),
        (ALL[:2], H200, torch.bfloat16, "convolve_rows", "convolve_rows convolution_gradients"),
        (ALL, H200, torch.float32, "", ""),
        (ALL, replace(H200, has_nvrtc=False), torch.bfloat16, "", ""),
    ],
    ids=str,
)
def test_a_choice_names_the_cuda_kernels(
    steps: tuple[str, ...], gpu: planned.PlannedGpu, dtype: torch.dtype, forward: str, backward: str
) -> None:
    """`explain` for tensors of a GPU, which here is one that is only planned for."""
    with on_planned(gpu):
        q, k, v = (meta(4, 16, 4096, 64, dtype=dtype, grad=True) for _ in range(3))
        found = explain(q, k, v, **{name: x.detach().to(dtype) for name, x in mixers(*steps).items()})
    named = re.findall(r"with the CUDA kernels? (.+?)(?:, backward|$)", found.reason)
    assert [words.replace(" and", ",").split(", ") for words in named] == [x.split() for x in (forward, backward) if x]


def test_a_choice_names_the_kernels_of_a_decode_step() -> None:
    with on_planned(H200):
        q, cache = meta(2, 16, 6, 64), meta(2, 16, 4096, 64)
        found = explain(q, cache, cache, **mixers(*ALL), decode=True)
    assert found.reason.endswith("with the CUDA kernels mta_decode_keys, mta_decode_values and mta_decode_merge")
