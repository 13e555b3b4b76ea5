"""CUDA kernels on a CPU: g++ and the emulator in place of NVRTC and the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from mta_kernels.nvrtc import compiler, driver, kernel
from mta_kernels.nvrtc.compiler import Source

FOLDER = Path(__file__).parent
GXX = shutil.which("g++")


def launch_code(space: str, kernel: str, at_once: str = "1", before: Sequence[str] = ()) -> str:
    """C++ that runs a kernel, `at_once` blocks at a time; behind a block's memory lie bytes that none may write.

    It takes Arguments, and parameters of the types `before` before them.
    """
    declared = "".join(f"const {of}* map{i}, " for i, of in enumerate(before))
    given = "".join(f"*map{i}, " for i in range(len(before)))
    return f"""
extern "C" const char* {kernel}_emulated(int x, int y, int threads, int bytes, unsigned seed,
                                          {declared}const void* args) {{
    return emulator::launch(x, y, threads, bytes + 1024, seed, [=] {{
        {space}::{kernel}({given}*(const {space}::Arguments*)args);
        for (int i = 0; i < 1024; i++)
            if (emulator::shared_memory()[bytes + i] != (char)0xFF)
                emulator::fail("a write beyond the block's shared memory");
    }}, {at_once});
}}
"""


def built(code: str, options: list[str], folders: list[Path], read: list[Path]) -> Path:
    """A shared library of a C++ program, built if there is none yet of this code, these options and files.

    Where the folders with headers lie does not count: another checkout has the same library.
    """
    digest = hashlib.sha256("\0".join([code, *options, *(path.read_text() for path in read)]).encode()).hexdigest()
    library = Path(tempfile.gettempdir()) / "mtabench-emulator" / f"{digest[:32]}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
            source, result = Path(temporary, "all.cpp"), Path(temporary, "all.so")
            source.write_text(code)
            command = [GXX, "-std=c++20", "-shared", "-fPIC", "-w", *options, *(f"-I{x}" for x in [FOLDER, *folders])]
            subprocess.run([*command, "-o", str(result), str(source)], check=True)
            os.replace(result, library)
    return library


@functools.cache
def machine() -> ctypes.CDLL:
    """What all kernels run on, for them to find."""
    source = FOLDER / "machine.cpp"
    read = [source, *(FOLDER / name for name in ("machine.hpp", "numbers.cuh"))]
    return ctypes.CDLL(str(built(source.read_text(), ["-O3"], [], read)), mode=ctypes.RTLD_GLOBAL)


def aligned(x: ctypes.Structure) -> Any:
    """The same, at a multiple of 64 bytes, as a GPU has a tensor map."""
    room = (ctypes.c_char * (ctypes.sizeof(x) + 64))()
    start = -ctypes.addressof(room) % 64
    ctypes.memmove(ctypes.addressof(room) + start, ctypes.addressof(x), ctypes.sizeof(x))
    return ctypes.byref(room, start)


class Emulator:
    """Stands in for the compiler and the driver; `seed` decides how threads and copies interleave."""

    folders: tuple[Path, ...] = ()  # with headers, beside a source's own folder

    def __init__(self) -> None:
        self.seed, self.launched = 0, 0

    def program(self, wanted: Source) -> str:
        """C++ that includes a source, with a function KERNEL_emulated for each kernel: gives "", or what went wrong."""
        raise NotImplementedError

    def runs(self, wanted: Source) -> bool:
        """Whether this emulator has the kernels of a source."""
        return True

    def machine_code(self, wanted: Source) -> bytes:
        """The path of a shared library with the kernels of a source, built if it is not there yet."""
        if GXX is None:
            pytest.skip("no g++ to build the emulated kernels with")
        folders = [wanted.path.parent, *self.folders, compiler.FOLDER]
        options = ["-Og", *(f"-D{key}={value}" for key, value in wanted.constants.items())]
        options += ["-fsanitize=alignment", "-nodefaultlibs"]  # machine.cpp reports what it finds
        headers = [path for folder in folders for path in sorted(folder.glob("*.cuh"))]
        read = [wanted.path, *headers, *sorted(FOLDER.glob("*.[ch]*"))]
        return str(built(self.program(wanted), options, folders, read)).encode()

    def load(self, code: bytes, name: str, shared_memory: int, device: Any, *, beside: bool = False) -> Any:
        machine()
        function = ctypes.CDLL(code.decode())[f"{name}_emulated"]
        function.restype = ctypes.c_char_p
        return function

    def launch(
        self, kernel: Any, blocks: tuple[int, int], threads: int, shared_memory: int, device: Any, *args: Any,
        follows: bool = False,
    ) -> None:  # fmt: skip
        problem = kernel(*blocks, threads, shared_memory, self.seed, *map(aligned, args))
        assert not problem, problem.decode()
        self.launched += 1

    def laid_out(self, *launch: Any, **options: Any) -> Callable[[], None]:
        """As `driver.Launch`."""
        return functools.partial(self.launch, *launch, **options)

    def in_turn(self, *launches: Callable[[], None]) -> Callable[[], None]:
        """As `driver.LaunchSequence`."""

        def run() -> None:
            for launch in launches:
                launch()

        return run

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Be the driver, and the compiler of what `runs`; others may have been theirs before."""
        others = kernel.machine_code
        kernel.kernel.cache_clear()
        monkeypatch.setattr(
            kernel, "machine_code", lambda source: self.machine_code(source) if self.runs(source) else others(source)
        )
        monkeypatch.setattr(driver, "architecture", lambda device: "sm_80")
        monkeypatch.setattr(driver, "load", self.load)
        monkeypatch.setattr(driver, "Launch", self.laid_out)
        monkeypatch.setattr(driver, "LaunchSequence", self.in_turn)
        monkeypatch.setattr(driver, "launch", self.launch)
        return self
