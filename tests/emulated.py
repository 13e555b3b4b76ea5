"""The Hopper kernels on a CPU: g++ and the emulator in place of NVRTC and the CUDA driver."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mta_kernels.conv_attention.hopper import backward, forward, prepare, source, tensor_maps
from mta_kernels.cuda import driver
from mta_kernels.cuda.compiler import Source

EMULATOR = Path(__file__).parent / "emulator"
GXX = shutil.which("g++")


class TensorMap(ctypes.Structure):
    """`TensorMap` of emulator/device.cuh."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("extent", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("unused", ctypes.c_char * 56),
    )


class Emulator:
    """Stands in for the compiler and the driver of `hopper`; `seed` decides how threads and copies interleave."""

    def __init__(self) -> None:
        self.seed = 0

    def machine_code(self, wanted: Source) -> bytes:
        """The path of a shared library, built if it is not there yet."""
        if GXX is None:
            pytest.skip("no g++ to build the emulated kernels with")
        sources = [*EMULATOR.iterdir(), *(source.FOLDER / header for header in source.HEADERS), wanted.path]
        flags = [f"-D{key}={value}" for key, value in wanted.constants.items()]
        digest = hashlib.sha256("\0".join([*flags, *(path.read_text() for path in sorted(sources))]).encode())
        library = Path(tempfile.gettempdir()) / "mtabench-emulator" / f"{digest.hexdigest()[:32]}.so"
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so") as file:
                command = [GXX, "-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-psabi", *flags, f"-I{EMULATOR}"]
                command += [f"-I{source.FOLDER}", "-o", file.name, str(EMULATOR / f"{wanted.path.stem}.cpp")]
                subprocess.run(command, check=True)
                shutil.copy(file.name, library.with_suffix(f".{Path(file.name).stem}"))
                library.with_suffix(f".{Path(file.name).stem}").rename(library)
        return str(library).encode()

    def load(self, code: bytes, name: str, shared_memory: int, device: Any) -> Any:
        function = ctypes.CDLL(code.decode()).emulated
        function.restype = ctypes.c_char_p
        return function

    def launch(
        self, kernel: Any, blocks: tuple[int, int], threads: int, shared_memory: int, device: Any, *args: Any
    ) -> None:
        problem = kernel(*blocks, threads, shared_memory, self.seed, *[ctypes.byref(x) for x in args])
        assert not problem, problem.decode()

    def tensor_map(self, x: Tensor) -> TensorMap:
        assert tensor_maps.describable(x) is x
        strides = [2, *(2 * stride for stride in reversed(tensor_maps.outer_strides(x)))]
        extent, stride = (ctypes.c_int64 * 4)(*reversed(x.shape)), (ctypes.c_int64 * 4)(*strides)
        return TensorMap(x.data_ptr(), extent, stride)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """`backend="hopper"` runs on CPU tensors in this test."""
    from mta_kernels.conv_attention import api

    found = Emulator()
    for module in (prepare, forward, backward):
        monkeypatch.setattr(module, "machine_code", found.machine_code)
    for name in ("load", "launch"):
        monkeypatch.setattr(driver, name, getattr(found, name))
    for module in (forward, backward):
        monkeypatch.setattr(module, "tensor_map", found.tensor_map)
    monkeypatch.setattr(
        api,
        "hopper_unsupported",
        lambda *, device, dtype, head_dim, query_taps, key_taps: forward.shape_unsupported(
            dtype, head_dim, query_taps, key_taps
        ),
    )
    return found
