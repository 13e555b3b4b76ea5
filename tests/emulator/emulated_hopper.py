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
        ("extent", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("box", ctypes.c_int * 4),
        ("unused", ctypes.c_char * 40),
    )


def tensor_map(x: Tensor, box: tuple[int, int, int, int] = (1, 1, 64, 64)) -> tensor_maps.TensorMap:
    """As the function of that name, for the emulator."""
    assert tensor_maps.describable(x) is x
    strides = [2, *(2 * stride for stride in reversed(tensor_maps.outer_strides(x)))]
    extent, stride = (ctypes.c_int64 * 4)(*reversed(x.shape)), (ctypes.c_int64 * 4)(*strides)
    sizes = (ctypes.c_int * 4)(*reversed(box))
    return tensor_maps.TensorMap.from_buffer_copy(EmulatedMap(x.data_ptr(), extent, stride, sizes))


class HopperEmulator(Emulator):
    folders = (banded.FOLDER,)

    def program(self, wanted: Source) -> str:
        return (FOLDER / f"{wanted.path.stem}.cpp").read_text()


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> HopperEmulator:
    """`backend="hopper"` runs on CPU tensors in this test."""
    from mta_kernels.conv_attention.fastpath import replay
    from mta_kernels.conv_attention.hopper import backend

    found = HopperEmulator()
    found.take_over(monkeypatch, prepare)
    for module, name in (
        (forward, "_launches"),
        (backward, "_launches"),
        (replay, "_seen"),
        (replay, "_seen_backward"),
    ):
        monkeypatch.setattr(module, name, {})
    for module in (forward, backward):
        monkeypatch.setattr(module, "sm_count", lambda device: 3)  # persistent blocks with several work tiles each
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    return found
