"""The overlapping tiles against float64: on a GPU if there is one, else the same sources in the emulator."""

from __future__ import annotations

import functools

import emulated_conv as emulation
import pytest
import torch
from emulated_conv import emulated_cuda  # noqa: F401
from kernel_inputs import DEVICE, make, poison_memory, relative_error
from planted_faults import plant
from torch import Tensor

from mta_kernels.conv_attention import conv_attention_reference
from mta_kernels.nvrtc import compiler
from mta_ladder import cuda_conv
from mta_ladder.cuda_conv import shape as shapes
from mta_ladder.cuda_conv.shape import Shape

ON_GPU = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("q", "k", "v", "weight")


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """NaN in whatever a kernel does not write; gives the emulator, if it is used."""
    poison_memory(monkeypatch)
    return None if ON_GPU else request.getfixturevalue("emulated_cuda")


def inputs(*args, **options) -> dict[str, Tensor]:
    return dict(zip(NAMES, make(*args, **options), strict=True))


def in_double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in tensors.items()}


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated sources")
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("tiles.cuh", "copies_wait();\n        __syncthreads();\n        multiply_rows", "multiply_rows"),
        ("forward.cu", "__syncthreads();\n        load_tile(tile, v, key, 0);", "load_tile(tile, v, key, 0);"),
        ("forward.cu", "float* row_factors = taps + TAP_NUMBERS;", "float* row_factors = taps + TAP_NUMBERS + 4;"),
    ],
    ids=["no wait for a tile", "no barrier before the convolution", "more shared memory than was asked for"],
)
def test_the_emulator_finds_what_a_gpu_may_hide(kernels, monkeypatch, tmp_path, name, line, instead) -> None:
    plant(monkeypatch, shapes, tmp_path, name, line, instead)
    monkeypatch.setattr(emulation, "KERNELS", {"forward.cu": emulation.KERNELS["forward.cu"]})
    monkeypatch.setattr(shapes, "_kernel", functools.cache(shapes._kernel.__wrapped__))
    leaves = inputs(1, 1, 1, 70, 8, (3, 3), dtype=FP32)
    want = conv_attention_reference(**in_double(leaves))

    def run() -> None:
        for kernels.seed in range(4):
            assert relative_error(cuda_conv.conv_attention(**leaves), want) < 1e-5

    with pytest.raises(AssertionError):  # wrong, or what the emulator says
        run()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "taps", "words"),
    [
        (torch.float64, 64, (6, 11), "dtype torch.float64 is not float16, bfloat16 or float32"),
        (BF16, 20, (6, 11), "head_dim 20 is not a multiple of 8 from 8 to 128"),
        (BF16, 136, (6, 11), "head_dim 136"),
        (BF16, 64, (12, 11), "12x11 taps are outside 1x1 to 11x11"),
        (BF16, 64, (6, 12), "6x12 taps are outside 1x1 to 11x11"),
    ],
)
def test_what_it_cannot_take_is_told(dtype, head_dim, taps, words: str) -> None:
    q, k, v, weight = make(1, 1, 1, 8, head_dim, taps, dtype)
    with pytest.raises(ValueError, match=words):
        cuda_conv.conv_attention(q, k, v, weight)
    q_window = torch.zeros(1, 1, taps[0], head_dim, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=words):
        cuda_conv.conv_attention_decode(q_window, k, v, weight, lengths=torch.tensor([8], device=DEVICE))


def test_bad_arguments_are_told() -> None:
    q, k, v, weight = make(1, 1, 1, 8, 16, (1, 3), FP16)
    with pytest.raises(ValueError, match="q has 5 rows and k 8; cuda-conv takes whole sequences"):
        cuda_conv.conv_attention(q[:, :, :5], k, v, weight)
    with pytest.raises(ValueError, match="pad_key is 'middle'"):
        cuda_conv.conv_attention(q, k, v, weight, pad_key="middle")
    with pytest.raises(ValueError, match="splits is 0; expected 'auto' or a whole number from 1 to 128"):
        cuda_conv.conv_attention_decode(q, k, v, weight, lengths=torch.tensor([8], device=DEVICE), splits=0)


def test_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    reason = cuda_conv.unsupported(device="cpu", dtype=BF16, head_dim=64, query_taps=6, key_taps=11)
    assert reason == "its kernels need an NVIDIA GPU of sm_80 or later, not a cpu device"


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [
        (Shape(FP16, 16, 2, 3), "sm_80"),
        (Shape(FP32, 16, 1, 2), "sm_90"),
        (Shape(BF16, 16, 2, 3), "sm_120"),
    ],
    ids=str,
)
def test_it_compiles(shape: Shape, architecture: str) -> None:
    reason = compiler.missing_package()
    if reason:
        pytest.skip(reason)
    for name in shape.shared_memory:
        code, _ = compiler.compile_source(shape.source(name, architecture))
        assert code.startswith(b"\x7fELF")


def test_every_shape_fits_the_shared_memory_of_every_gpu_from_sm_80_on() -> None:
    for dtype in (FP16, FP32):
        for head_dim in range(8, 129, 8):
            for taps in (1, 11):
                assert max(Shape(dtype, head_dim, taps, taps).shared_memory.values()) <= 99 * 1024
