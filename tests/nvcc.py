"""CUDA C++ sources compiled by the nvcc on PATH, for a GPU that is not there."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtabench.static import machine_code
from mtabench.static.limits import Limits
from mtabench.static.sources import CudaCode


def compile_file(path: Path, limits: Limits, flags: Sequence[str], headers: Mapping[str, str]) -> CudaCode:
    """Compile a `.cu` file; from sm_90 on for the target with its own instructions (sm_90a).

    `headers` are texts that it may include by their names.
    """
    compiler = shutil.which("nvcc")
    assert compiler is not None
    suffix = "a" if limits.capability[0] >= 9 else ""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in headers.items():
            Path(folder, name).write_text(text)
        cubin = Path(folder, "code.cubin")
        command = [compiler, "-cubin", f"-arch={limits.target}{suffix}", "-std=c++17", "-O3", "-Xptxas=-v"]
        command += [f"-I{folder}", *flags, str(path), "-o", str(cubin)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        return CudaCode(cubin.read_bytes(), done.stdout, ("nvcc", machine_code.version_of(compiler)))
