"""Whose kernels do the steps of multi-token attention, on GPUs that need not be there."""

from __future__ import annotations

import pytest
import torch

from mta_kernels.gpu_limits import Gpu
from mta_kernels.multi_token_attention import stages
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


def test_what_is_no_nvidia_gpu_has_none_of_these_kernels() -> None:
    assert stages.cuda_gpu(torch.device("cpu")) is None
    assert stages.cuda_gpu(torch.device("meta")) is None
