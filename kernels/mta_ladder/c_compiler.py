"""Rung 1 in C, on a CPU: compiled by the system's compiler at the first use, kept on disk, called by ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.code_cache import cache_folder, keep_code, kept_code

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# The first set that the compiler accepts is used. `-fopenmp-simd` needs no library: vector loops, on one core.
NATIVE = ("-O3", "-march=native")
FLAGS = ((*NATIVE, "-fopenmp"), (*NATIVE, "-fopenmp-simd"), ("-O3", "-fopenmp"), ("-O3",))
# q, k, v, out; batch, heads, KV heads, M, N, head dim, value dim; causal, scale, threads
ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 7, ctypes.c_int, ctypes.c_float, ctypes.c_int)


class CompileError(RuntimeError):
    """There is no compiler, or it does not compile a source of ours; the message names the reason, in a clause."""


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, source: str) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`, all float32.

    By the function `attention` of a C source. Causal: the queries are the last M of N positions. "c_loops.c" stores the
    `M x N` scores of one head at a time, "c_tiled.c" none beyond a tile. Inputs that are not contiguous are copied.
    Raises CompileError, and MemoryError if the source finds no room for what it stores.
    """
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, heads, rows, head_dim = q.shape
    out = empty(batch, heads, rows, v.shape[3], dtype=torch.float32)
    pointers = (x.data_ptr() for x in (q, k, v, out))
    sizes = (batch, heads, k.shape[1], rows, k.shape[2], head_dim, v.shape[3])
    if function(FOLDER / source)(*pointers, *sizes, causal, scale, torch.get_num_threads()):
        raise MemoryError(f"{source} has no memory for {heads} heads of {rows} x {k.shape[2]} scores")
    return out


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int, source: str) -> str | None:
    """Why `attention` cannot run, or None. Compiles the source to find out, if that was not done before."""
    if device.type != "cpu":
        return f"{source} runs on a CPU, not on {device.type}"
    if dtype != torch.float32:
        return f"{source} reads float32 and computes in it, not {dtype}".replace("torch.", "")
    try:
        function(FOLDER / source)
    except CompileError as error:
        return str(error)
    return None


def function(source: Path) -> Callable[..., int]:
    """The source's function, compiled and loaded; raises CompileError."""
    found = _loaded(source, os.environ.get("CC", ""), os.environ.get("PATH", ""))
    if isinstance(found, CompileError):
        raise found
    return found


@functools.cache
def _loaded(source: Path, named_compiler: str, path: str) -> Callable[..., int] | CompileError:
    """The same, or the error, once for each compiler that the environment may name."""
    try:
        descriptor = os.memfd_create(source.stem)
        with open(descriptor, "wb") as file:
            file.write(_library(source, _compiler(named_compiler)))
            file.flush()
            found = ctypes.CDLL(f"/proc/self/fd/{descriptor}").attention
    except CompileError as error:
        return error
    except OSError as error:
        return CompileError(f"what {source.name} was compiled to cannot be loaded: {error}")
    found.argtypes, found.restype = ARGUMENTS, ctypes.c_int
    return found


def _library(source: Path, compiler: Sequence[str]) -> bytes:
    """The library, from the cache if it was compiled before by this compiler for this CPU; else it is put there.

    Its bytes are loaded, not the cache's file: in a shared folder another user could replace that behind the check.
    """
    text = source.read_text()
    identity = "\0".join([shlex.join(compiler), *_machine(compiler), text])
    refused = ""
    for flags in FLAGS:
        digest = hashlib.sha256("\0".join([identity, *flags]).encode()).hexdigest()[:32]
        path = cache_folder("c") / f"{source.stem}-{digest}.so"
        if (code := kept_code(path)) is None:
            with tempfile.TemporaryDirectory() as folder:
                new = Path(folder, path.name)
                done = _run([*compiler, *flags, "-shared", "-fPIC", "-o", str(new), str(source), "-lm"])
                if done.returncode:
                    refused = refused or _telling_line(done.stderr)
                    continue
                code = new.read_bytes()
            with suppress(OSError):
                keep_code(path, code)
        if "-fopenmp" not in flags and "omp parallel" in text:
            warnings.warn(f"{source.name} runs on one core: {compiler[0]} takes no -fopenmp ({refused})", stacklevel=2)
        return code
    raise CompileError(f"{compiler[0]} does not compile {source.name}: {refused}")


def _compiler(named_compiler: str) -> list[str]:
    """The command that CC names, else the first compiler there is; raises CompileError."""
    named = shlex.split(named_compiler)
    if named:
        if shutil.which(named[0]) is None:
            raise CompileError(f"CC names {named[0]!r}, and there is no such compiler")
        return named
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise CompileError(f"it needs a C compiler ({', '.join(COMPILERS)}, or the one that CC names), and there is none")


def _machine(compiler: Sequence[str]) -> list[str]:
    """The compiler's version, and this CPU in macros: machines with other CPUs may share the cache."""
    options = (["--version"], [*NATIVE, "-E", "-dM", "-x", "c", os.devnull])
    return [_run([*compiler, *words]).stdout for words in options]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error.strerror}") from None


def _telling_line(words: str) -> str:
    """The first error in a compiler's output."""
    lines = [line.strip() for line in words.splitlines() if line.strip()] or ["it says nothing"]
    return next((line for line in lines if "error" in line), lines[-1])
