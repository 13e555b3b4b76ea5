"""CUDA C++ sources to machine code: shipped in the wheel, or compiled by NVRTC, which PyTorch for CUDA brings.

Through `cuda.bindings`, which PyTorch brings too: no toolkit and no compiler are needed on the user's machine. What
NVRTC compiled is kept on disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mta_kernels import planned
from mta_kernels.code_cache import cache_folder, keep_code, kept_code
from mta_kernels.nvrtc.shipped import shipped_code

FOLDER = Path(__file__).parent


class CompileError(RuntimeError):
    """The compiler rejected a source of this package; the message is the compiler's."""


@dataclass(frozen=True)
class Source:
    """What the compiler reads: a `.cu` file, headers by the names it includes them by, macros, and for which GPU.

    `architecture` is "sm_80", "sm_90a" and so on.
    """

    path: Path
    architecture: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        """The compiler's command line."""
        return [
            *(f"-D{key}={value}" for key, value in self.constants.items()),
            f"--gpu-architecture={self.architecture}",
            "--std=c++17",
            "--ptxas-options=-v",
            "--device-as-default-execution-space",  # for lambdas, which older compilers take for host code
        ]

    @property
    def file_name(self) -> str:
        """The name of its machine code: it changes with whatever the compiler reads."""
        parts = [*sorted(self.options), str(sorted(self.headers.items())), self.path.read_text()]
        return f"{self.path.stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.cubin"


def compile_source(source: Source) -> tuple[bytes, str]:
    """Machine code, and the assembler's report. Raises CompileError with the compiler's messages."""
    from cuda.bindings import nvrtc

    name, headers, options = source.path.name, source.headers, source.options
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source.path.read_bytes(), name.encode(), len(headers), [x.encode() for x in headers.values()],
            [x.encode() for x in headers],
        )
    )  # fmt: skip
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        # NVRTC writes into these bytes: one more than it needs, since Python caches bytes objects of length one.
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)) + 1)
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        words = log.rstrip(b"\0 \n").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} does not compile: {words}")
        code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code, words


def headers_in(*folders: Path) -> dict[str, str]:
    """Texts of the headers beside this file and in folders, by their names; a later folder overrides an earlier one."""
    return {path.name: path.read_text() for folder in (FOLDER, *folders) for path in sorted(folder.glob("*.cuh"))}


def machine_code(source: Source) -> bytes:
    """Machine code: shipped in the wheel, else as this compiler made it before (see `cache_folder`), else compiled.

    While a call is only planned, the source itself.
    """
    if planned.recorder() is not None:
        return source  # type: ignore[return-value]
    name = source.file_name
    if (code := shipped_code(name)) is not None:
        return code
    path = cache_folder("cuda") / f"nvrtc-{version()}" / name
    if (code := kept_code(path)) is not None:
        return code
    code, _ = compile_source(source)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, no more
        keep_code(path, code)
    return code


@functools.cache
def version() -> str:
    """The version of NVRTC, such as "13.0"."""
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    _checked((result,))
    return f"{major}.{minor}"


MISSING = "NVRTC is not installed (pip install 'mtabench[cuda]'; PyTorch for CUDA brings it)"


def missing_package(device: torch.device | None = None) -> str | None:
    """What must be installed to compile, in words, or None; a planned GPU has its own `has_nvrtc`."""
    gpu = None if device is None else planned.gpu_at(device.index)
    return None if (gpu.has_nvrtc if gpu else _is_installed()) else MISSING


@functools.cache
def _is_installed() -> bool:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


def _checked(results: tuple) -> Any:
    """The value that an NVRTC call gave; raises CompileError if it failed."""
    if int(results[0]) != 0:
        raise CompileError(f"NVRTC failed: {results[0]}")
    return results[1] if len(results) > 1 else None
