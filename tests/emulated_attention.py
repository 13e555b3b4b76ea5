"""The CUDA rungs of `attention` on a CPU: g++ and the emulator in place of NVRTC and the CUDA driver."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mta_kernels.attention import cuda_launch
from mta_kernels.cuda import driver
from mta_kernels.cuda.compiler import Source

EMULATOR = Path(__file__).parent / "emulator"
GXX = shutil.which("g++")
MATRIX_KERNELS = ("scores", "softmax_rows", "weighted_sum")
KERNELS = {"cuda_naive.cu": MATRIX_KERNELS, "cuda_tiled.cu": MATRIX_KERNELS, "cuda_flash.cu": ("cuda_flash",)}
# Behind the memory of a block lie bytes that no kernel may write.
LAUNCH = """
extern "C" const char* {kernel}_emulated(int blocks, int threads, int bytes, unsigned seed,
                                         const rung::Arguments* args) {{
    return emulator::launch(blocks, 1, threads, bytes + 1024, seed, [=] {{
        rung::{kernel}(*args);
        for (int i = 0; i < 1024; i++)
            if (emulator::block->shared[bytes + i] != (char)0xFF)
                emulator::failure = "a write beyond the block's shared memory";
    }});
}}
"""


class Emulator:
    """Stands in for the compiler and the driver; `seed` decides how threads and copies interleave."""

    def __init__(self) -> None:
        self.seed = 0

    def machine_code(self, wanted: Source) -> bytes:
        """The path of a shared library with the kernels of a source, built if it is not there yet."""
        if GXX is None:
            pytest.skip("no g++ to build the emulated kernels with")
        code = f"#include <device.cuh>\nnamespace rung {{\n#include <mma.cuh>\n#include <{wanted.path.name}>\n}}\n"
        code += "".join(LAUNCH.format(kernel=kernel) for kernel in KERNELS[wanted.path.name])
        flags = [f"-D{key}={value}" for key, value in wanted.constants.items()]
        headers = [EMULATOR / name for name in ("device.cuh", "elements.cuh", "mma.cuh")]
        texts = [code, *flags, *(path.read_text() for path in (wanted.path, *headers))]
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
        library = Path(tempfile.gettempdir()) / "mtabench-emulator" / f"{wanted.path.stem}-{digest}.so"
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
                source, built = Path(temporary, "all.cpp"), Path(temporary, "all.so")
                source.write_text(code)
                command = [GXX, "-O1", "-std=c++17", "-shared", "-fPIC", "-w", *flags, f"-I{EMULATOR}"]
                command += [f"-I{wanted.path.parent}", "-o", str(built), str(source)]
                subprocess.run(command, check=True)
                os.replace(built, library)
        return str(library).encode()

    def load(self, code: bytes, name: str, shared_memory: int, device: Any) -> Any:
        function = ctypes.CDLL(code.decode())[f"{name}_emulated"]
        function.restype = ctypes.c_char_p
        return function

    def launch(
        self, kernel: Any, blocks: tuple[int, ...], threads: int, shared_memory: int, device: Any, args: Any
    ) -> None:
        problem = kernel(blocks[0], threads, shared_memory, self.seed, ctypes.byref(args))
        assert not problem, problem.decode()


@pytest.fixture
def emulated_attention(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """The CUDA rungs run on CPU tensors in this test."""
    found = Emulator()
    monkeypatch.setattr(cuda_launch, "machine_code", found.machine_code)
    monkeypatch.setattr(cuda_launch, "architecture", lambda device: "sm_80")
    for name in ("load", "launch"):
        monkeypatch.setattr(driver, name, getattr(found, name))
    return found
