"""Triton's launcher for a GPU that is not there: launches reach `fake_libcuda.c`, which keeps all that they are given.

For a process of its own: it loads the library before anybody asks for the real one. Not under Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.nvidia import driver as nvidia

ELF_INFO, PARAMETER = 4, 0x17  # of `.nv.info`: an entry with a size, one about a parameter
NO_BITS = 8  # a section without bytes in the file


class Launch(NamedTuple):
    """What the driver was asked for: `configuration` is function, grid, block, shared memory, stream, attributes."""

    configuration: tuple[int, ...]
    parameters: list[bytes]


class Driver(nvidia.CudaDriver):
    """Triton's, whose GPU is a Hopper and whose device and stream are what one says."""

    def __init__(self, folder: Path) -> None:
        self._library = _load(folder)
        triton.knobs.nvidia.libcuda_path = str(folder)
        self.device, self.stream = 0, 7
        self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_stream = lambda device: self.stream + 100 * device
        self.get_current_device = lambda: self.device
        load = self.utils.load_binary

        def load_and_declare(name: str, kernel: bytes, shared: int, device: int) -> tuple:
            loaded = load(name, kernel, shared, device)
            sizes = _parameter_sizes(kernel, name)
            self._library.fake_declare(ctypes.c_uint64(loaded[1]), len(sizes), (ctypes.c_uint32 * len(sizes))(*sizes))
            return loaded

        self.utils.load_binary = load_and_declare

    def launched(self) -> list[Launch]:
        """All launches since this was asked last."""
        start = ctypes.c_void_p()
        data = memoryview(ctypes.string_at(start.value, size) if (size := self._log(start)) else b"")
        found = []

        def numbers(count: int) -> tuple[int, ...]:
            nonlocal data
            taken, data = struct.unpack_from(f"<{count}Q", data), data[8 * count :]
            return taken

        while data:
            configuration = numbers(10)
            for _ in range(configuration[-1]):
                configuration += numbers(2)
            parameters = []
            for _ in range(*numbers(1)):
                (size,) = numbers(1)
                parameters.append(bytes(data[:size]))
                data = data[size:]
            found.append(Launch(configuration, parameters))
        return found

    def _log(self, start: ctypes.c_void_p) -> int:
        return self._library.fake_launched(ctypes.byref(start))


def _load(folder: Path) -> ctypes.CDLL:
    path = folder / "libcuda.so.1"
    include = Path(nvidia.__file__).parent / "include"
    flags = ["-O1", "-shared", "-fPIC", f"-I{include}", f"-Wl,-soname,{path.name}"]
    subprocess.run(["cc", *flags, str(Path(__file__).with_name("fake_libcuda.c")), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.fake_launched.restype = ctypes.c_uint64
    return library


def _parameter_sizes(cubin: bytes, kernel: str) -> list[int]:
    """Bytes of each parameter of a kernel, as its machine code says."""
    info, found, at = _section(cubin, f".nv.info.{kernel}"), {}, 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        if (kind, attribute) == (ELF_INFO, PARAMETER):
            _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at + 4)
            found[ordinal] = packed >> 18
        at += 4 + (size if kind == ELF_INFO else 0)
    return [found[ordinal] for ordinal in range(len(found))]


def _section(elf: bytes, wanted: str) -> bytes:
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name, kind, _, _, offset, length in headers:
        begin = headers[names][4] + name
        if elf[begin : elf.index(b"\0", begin)] == wanted.encode() and kind != NO_BITS:
            return elf[offset : offset + length]
    raise KeyError(wanted)
