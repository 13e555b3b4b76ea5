"""The Hopper kernels on a CPU."""

from __future__ import annotations

import ctypes

import pytest
from emulated_kernels import FOLDER, Emulator
from torch import Tensor

from mta_kernels.conv_attention import banded
from mta_kernels.conv_attention.hopper import backward, forward, prepare, tensor_maps
from mta_kernels.nvrtc.compiler import Source


class EmulatedMap(ctypes.Structure):
    """`TensorMap` of emulator/device.cuh."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("extent", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
        ("box", ctypes.c_int * 5),
        ("unused", ctypes.c_char * 20),
    )


def encode(
    x: Tensor, extents: list[int], strides: list[int], box: list[int], promotion: int = 256
) -> tensor_maps.TensorMap:
    """As the function of that name, for the emulator."""
    more = [1] * (5 - len(extents))
    extent, size = (ctypes.c_int64 * 5)(*extents, *more), (ctypes.c_int * 5)(*box, *more)
    stride = (ctypes.c_int64 * 5)(2, *(2 * n for n in strides))
    return tensor_maps.TensorMap.from_buffer_copy(EmulatedMap(x.data_ptr(), extent, stride, size))


def tensor_map(x: Tensor, box: tuple[int, int, int, int] = (1, 1, 64, 64)) -> tensor_maps.TensorMap:
    """As the function of that name, for the emulator."""
    assert tensor_maps.describable(x) is x
    return encode(x, [*reversed(x.shape)], [*reversed(tensor_maps.outer_strides(x))], [*reversed(box)])


class HopperEmulator(Emulator):
    folders = (banded.FOLDER,)

    def runs(self, wanted: Source) -> bool:
        return wanted.architecture == "sm_90a"

    def program(self, wanted: Source) -> str:
        return (FOLDER / f"{wanted.path.stem}.cpp").read_text()


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> HopperEmulator:
    """`backend="hopper"` runs on CPU tensors in this test."""
    from mta_kernels.conv_attention.hopper import backend

    found = HopperEmulator()
    found.take_over(monkeypatch)
    monkeypatch.setattr(prepare, "_launches", {})
    for module in (forward, backward):
        monkeypatch.setattr(module, "sm_count", lambda device: 3)  # persistent blocks with several work tiles each
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    return found
