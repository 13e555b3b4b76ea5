"""CUDA C++ sources compiled for a GPU that is not there, by the nvcc of a CUDA toolkit."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtabench.static import machine_code
from mtabench.static.limits import Limits
from mtabench.static.sources import CudaCode, SkippedError


def compile_file(
    path: Path, limits: Limits, flags: Sequence[str] = (), headers: Mapping[str, str] | None = None
) -> CudaCode:
    """Compile a `.cu` file; from sm_90 on for the target with its own instructions (sm_90a).

    `headers` are texts that it may include by their names. Raises SkippedError without nvcc, and CompileError with the
    compiler's words.
    """
    compiler = nvcc()
    suffix = "a" if limits.capability[0] >= 9 else ""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (headers or {}).items():
            Path(folder, name).write_text(text)
        cubin = Path(folder, "code.cubin")
        command = [compiler, "-cubin", f"-arch={limits.target}{suffix}", "-std=c++17", "-O3", "-Xptxas=-v"]
        command += [f"-I{path.parent}", f"-I{folder}", *flags, str(path), "-o", str(cubin)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise CompileError(done.stdout.strip() or f"{compiler} ended with exit code {done.returncode}")
        return CudaCode(cubin.read_bytes(), done.stdout, ("nvcc", machine_code.version_of(compiler)))


class CompileError(Exception):
    """nvcc refused a source; the text is what it said."""


@functools.cache
def nvcc() -> str:
    """The path of nvcc: on PATH, else in $CUDA_HOME or /usr/local/cuda. Raises SkippedError where there is none."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    found = shutil.which("nvcc") or (str(home) if home.is_file() else None)
    if found is None:
        raise SkippedError("nvcc is not installed; install a CUDA toolkit, or put its bin folder on PATH")
    return found
