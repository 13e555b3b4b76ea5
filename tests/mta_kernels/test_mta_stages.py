"""Whose kernels do the steps of multi-token attention, on GPUs that need not be there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_inputs import DEVICE

from mta_kernels import score_chunks
from mta_kernels.gpu_limits import Gpu
from mta_kernels.multi_token_attention import multi_token_attention, stages
from mta_kernels.multi_token_attention.triton import backward, convolution, heads, products, rows
from mta_kernels.operation import Convolution, HeadMix, Operation

BF16, FP32 = torch.bfloat16, torch.float32
H200, A100, RTX_4090 = Gpu((9, 0), 227 * 1024), Gpu((8, 0), 163 * 1024), Gpu((8, 9), 99 * 1024)
TAPS, MIX = Convolution(6, 11, 5), HeadMix()
MIXED, ALL = Operation(None, 1.0, pre_mix=MIX, post_mix=MIX), Operation(TAPS, 1.0, True, MIX, TAPS, MIX)


def forward(operation: Operation, gpu: Gpu | None, **other) -> str:
    usual = {"dtype": BF16, "heads": 16, "head_dim": 64, "documents": False, "key_rows": 4096, "rows": 4096}
    return stages.forward(operation, gpu, **{**usual, "sequences": 4, **other})


@pytest.mark.parametrize(
    ("operation", "gpu", "other", "by"),
    [
        (MIXED, H200, {}, "mix"),
        (MIXED, A100, {}, "stages"),
        (MIXED, H200, {"documents": True}, "stages"),
        (MIXED, H200, {"dtype": torch.float16}, "stages"),
        (MIXED, H200, {"heads": 17}, "stages"),
        (MIXED, H200, {"head_dim": 24}, "stages"),
        (MIXED, H200, {"head_dim": 144}, "stages"),
        (MIXED, H200, {"head_dim": 128, "key_rows": 2048}, "stages"),
        (MIXED, H200, {"head_dim": 128, "key_rows": 4096}, "mix"),
        (ALL, H200, {}, "heads"),
        (ALL, A100, {"documents": True}, "heads"),
        (ALL, RTX_4090, {}, "stages"),
        (ALL, H200, {"heads": 32}, "stages"),
        (Operation(TAPS, 1.0, True, None, TAPS, MIX), H200, {}, "stages"),
        (Operation(TAPS, 1.0, True, MIX), H200, {}, "stages"),
        (ALL, H200, {"dtype": FP32}, "stages"),
        (ALL, None, {}, "stages"),
        (MIXED, None, {}, "stages"),
    ],
    ids=str,
)
def test_forward(operation: Operation, gpu: Gpu | None, other: dict, by: str) -> None:
    assert forward(operation, gpu, **other) == by


@pytest.mark.parametrize(
    ("batch", "keys", "head_dim", "pays"),
    [
        (4, 4096, 64, True), (1, 16384, 64, True), (1, 16384, 128, True), (1, 65536, 128, True),
        (4, 4096, 96, True), (8, 2048, 96, False),  # two blocks more a tile, which it takes many keys to pay
        (1, 65536, 64, False), (1, 1024, 64, False),  # few tiles
    ],
)  # fmt: skip
def test_where_one_kernel_from_queries_to_outputs_pays(batch: int, keys: int, head_dim: int, pays: bool) -> None:
    sequences, rows = score_chunks.chunk_rows(MIXED, batch, 16, keys, 2, backward=False)
    assert stages.mix_pays(16, head_dim, keys, min(rows, keys), sequences) == pays


def test_backward() -> None:
    assert [stages.mixes_heads_backward(ALL, gpu, BF16, 16) for gpu in (H200, A100, None)] == [True, False, False]
    assert not stages.mixes_heads_backward(Operation(TAPS, 1.0, True, MIX, TAPS), H200, BF16, 16)
    assert [stages.convolves(TAPS, gpu, BF16) for gpu in (H200, RTX_4090, None)] == [True, True, False]
    rows = [stages.mixes_rows(gpu, BF16, 16, 16384, backward=True) for gpu in (H200, A100, None)]
    assert rows == [True, False, False]


@pytest.mark.parametrize(("switch", "operation"), [("CUDA_MIX", MIXED), ("CUDA_HEADS", ALL)])
def test_measurements_turn_kernels_off(monkeypatch: pytest.MonkeyPatch, switch: str, operation: Operation) -> None:
    assert forward(operation, H200) != "stages"
    monkeypatch.setattr(stages, switch, False)
    assert forward(operation, H200) == "stages"


def test_constants_are_in_the_order_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a launch that is replayed relies on."""
    seen = set()

    def record(kernel, programs, signature, *args, **options) -> None:
        names = kernel.arg_names
        assert len(args) + len([name for name in options if name not in ("num_warps", "maxnreg")]) == len(names)
        assert list(options)[: len(names) - len(args)] == names[len(args) :]
        seen.add(kernel.fn.__name__)

    monkeypatch.setattr(stages, "cuda_gpu", lambda device: None)
    for module in (products, rows, heads, convolution):
        monkeypatch.setattr(module, "launch", record)
    q, taps, mix = (torch.ones(shape, device=DEVICE) for shape in ((1, 2, 20, 16), (2, 2, 3), (2, 2)))
    for documents in (None, torch.tensor([0, 7, 20], device=DEVICE)):
        mixers = {"pre_conv": taps, "pre_mix": mix, "post_conv": taps, "post_mix": mix, "cu_seqlens": documents}
        multi_token_attention(q, q, q, **mixers, backend="triton")
    assert len(seen) == 5


def test_products_are_given_rows_that_the_copy_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of head dims whose rows do not begin at multiples of 16 bytes."""
    given = []

    def checked(product, left, right, *others, **options) -> None:
        given.append(right)
        assert products.rows_of(right) is right
        product(left, right, *others, **options)

    for name in ("score_product", "row_product", "add_transposed_product"):
        monkeypatch.setattr(backward, name, partial(checked, getattr(backward, name)))
    x = torch.randn(1, 2, 9, 20, device=DEVICE, dtype=torch.float16).requires_grad_()
    bounds, mix = torch.tensor([0, 4, 9], device=DEVICE), torch.eye(2, device=DEVICE)
    multi_token_attention(x, x, x, pre_mix=mix, post_mix=mix, cu_seqlens=bounds, backend="triton").sum().backward()
    assert len(given) == 5


def test_what_is_no_nvidia_gpu_has_none_of_these_kernels() -> None:
    assert stages.cuda_gpu(torch.device("cpu")) is None
    assert stages.cuda_gpu(torch.device("meta")) is None
