"""The kernels of `cuda_conv` on a CPU: g++ and the emulator in place of NVRTC and the CUDA driver."""

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

from mta_kernels.conv_attention.cuda_conv import decode, shape
from mta_kernels.cuda import driver
from mta_kernels.cuda.compiler import Source

EMULATOR = Path(__file__).parent / "emulator"
GXX = shutil.which("g++")
KERNELS = {
    "forward.cu": ("conv_attention_forward",),
    "backward_q.cu": ("conv_attention_backward_q",),
    "backward_kv.cu": ("conv_attention_backward_kv",),
    "decode.cu": ("conv_attention_decode_split", "conv_attention_decode_combine"),
}
# Behind the memory of a block lie bytes that no kernel may write.
LAUNCH = """
extern "C" const char* {kernel}_emulated(int blocks, int threads, int bytes, unsigned seed, const void* args) {{
    return emulator::launch(blocks, 1, threads, bytes + 1024, seed, [=] {{
        {space}::{kernel}(*(const {space}::Arguments*)args);
        for (int i = 0; i < 1024; i++)
            if (shared_bytes()[bytes + i] != (char)0xFF) emulator::failure = "a write beyond the block's shared memory";
    }});
}}
"""


class Emulator:
    """Stands in for the compiler and the driver; `seed` decides how threads and copies interleave."""

    def __init__(self) -> None:
        self.seed = 0

    def machine_code(self, wanted: Source) -> bytes:
        """The path of a shared library with all kernels of a shape, built if it is not there yet."""
        if GXX is None:
            pytest.skip("no g++ to build the emulated kernels with")
        code = "#include <tiles.cuh>\n"
        for name, kernels in KERNELS.items():
            space = name.partition(".")[0]
            code += f"namespace {space} {{\n#include <{name}>\n}}\n"
            code += "".join(LAUNCH.format(space=space, kernel=kernel) for kernel in kernels)
        folder = wanted.path.parent
        flags = [f"-D{key}={value}" for key, value in wanted.constants.items()]
        sources = [*sorted(folder.glob("*.cu*")), EMULATOR / "instructions.cuh", EMULATOR / "device.cuh"]
        digest = hashlib.sha256("\0".join([code, *flags, *(path.read_text() for path in sources)]).encode())
        library = Path(tempfile.gettempdir()) / "mtabench-emulator" / f"conv-{digest.hexdigest()[:32]}.so"
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
                source, built = Path(temporary, "all.cpp"), Path(temporary, "all.so")
                source.write_text(code)
                command = [GXX, "-O1", "-std=c++17", "-shared", "-fPIC", "-w", *flags, f"-I{EMULATOR}", f"-I{folder}"]
                subprocess.run([*command, "-o", str(built), str(source)], check=True)
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
def emulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """`cuda_conv` runs on CPU tensors in this test."""
    found = Emulator()
    monkeypatch.setattr(shape, "machine_code", found.machine_code)
    monkeypatch.setattr(shape, "architecture", lambda device: "sm_80")
    monkeypatch.setattr(shape, "device_unsupported", lambda device: None)
    monkeypatch.setattr(shape, "missing_package", lambda: None)
    monkeypatch.setattr(decode, "choose_splits", lambda *_: 3)
    for name in ("load", "launch"):
        monkeypatch.setattr(driver, name, getattr(found, name))
    return found
