"""What a cubin and the assembler's words say of a kernel: registers, stack, spills, static shared memory.

Read with the tools in Triton's wheel: `cuobjdump -res-usage` and `ptxas -v`.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mtabench.static.limits import RESERVED_SHARED_BYTES

_FUNCTION = re.compile(r"^ Function (\S+):\n\s+(.*)$", re.MULTILINE)
_COMPILED = re.compile(r"Compiling entry function '([^']+)' for")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class ToolError(Exception):
    """A tool is missing, or gives what cannot be read; the text is a sentence."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Registers a thread, bytes of stack a thread, bytes of static shared memory a block."""

    registers: int
    stack: int
    static_shared: int


@dataclass(frozen=True, slots=True)
class Spills:
    """Bytes that a thread's spill instructions store and load, each instruction counted once."""

    stores: int
    loads: int


def parse_usage(text: str, capability: int) -> dict[str, Usage]:
    """The kernels of a cubin for compute capability 80, 90, ..., from what `cuobjdump -res-usage` prints."""
    found = {}
    for name, words in _FUNCTION.findall(text):
        numbers = dict(re.findall(r"(\w+(?:\[\d+\])?):(\d+)", words))
        # From sm_90 on, what the system keeps of each block is part of the number.
        reserved = RESERVED_SHARED_BYTES if capability >= 90 else 0
        try:
            shared = int(numbers["SHARED"]) - reserved
            found[name] = Usage(int(numbers["REG"]), int(numbers["STACK"]), max(0, shared))
        except KeyError as error:
            raise ToolError(f"cuobjdump -res-usage says nothing of {error.args[0]} in {words!r}") from None
    if not found:
        raise ToolError(f"cuobjdump -res-usage finds no kernel; it prints {text.strip()[-200:]!r}")
    return found


def parse_spills(log: str) -> dict[str, Spills]:
    """The kernels that `ptxas -v` assembled and what each spills."""
    names = [*_COMPILED.finditer(log)]
    ends = [match.start() for match in names[1:]] + [len(log)]
    found = {}
    for match, end in zip(names, ends, strict=True):
        numbers = _SPILLS.search(log, match.end(), end)
        if numbers is None:
            raise ToolError(f"ptxas -v does not say what {match[1]} spills: {log[match.start() : end].strip()!r}")
        found[match[1]] = Spills(int(numbers[2]), int(numbers[3]))
    return found


def symbol_of(name: str, symbols: Iterable[str]) -> str:
    """The one of the symbols of a cubin that is a kernel called `name` in C++, mangled (Itanium C++ ABI) or not.

    Raises ValueError if none or several are: name a kernel by its symbol then.
    """
    tail = re.compile(rf"_Z\w*?(?<!\d){len(name)}{re.escape(name)}(?![a-z])\w*")
    symbols = sorted(symbols)
    found = [symbol for symbol in symbols if symbol == name or tail.fullmatch(symbol)]
    if len(found) != 1:
        problem = f"{len(found)} kernels" if found else "no kernel"
        raise ValueError(f"there is {problem} {name!r} in a cubin whose kernels are {', '.join(symbols)}")
    return found[0]


def usage_of(cubin: bytes, capability: int) -> dict[str, Usage]:
    """`parse_usage` of a cubin."""
    return parse_usage(_run_on(cubin, ".cubin", tool("cuobjdump"), "-res-usage"), capability)


def spills_of(ptx: str, options: tuple[str, ...] = ()) -> dict[str, Spills]:
    """`parse_spills` of PTX assembled again for the target it names, with the options that it was assembled with."""
    target = re.search(r"^\.target\s+(sm_(\d+)\w*)", ptx, re.MULTILINE)
    if target is None:
        raise ToolError("the compiler's PTX names no target")
    command = [tool(assembler_name(int(target[2]))), "-v", *options, f"--gpu-name={target[1]}", "-o", "/dev/null"]
    return parse_spills(_run_on(ptx.encode(), ".ptx", *command))


def assembler_name(capability: int) -> str:
    """Which of Triton's two assemblers a target takes."""
    return "ptxas-blackwell" if capability >= 100 else "ptxas"


@functools.cache
def tool(name: str) -> str:
    """The path of an NVIDIA tool that Triton brings or that a variable names (TRITON_PTXAS_PATH and the like).

    Raises ToolError, with what to do about it.
    """
    from triton import knobs

    attribute = name.replace("-", "_")
    try:
        return getattr(knobs.nvidia, attribute).path
    except (AttributeError, RuntimeError):
        raise ToolError(
            f"{name} is missing from Triton's folder triton/backends/nvidia/bin; install Triton from PyPI "
            f"(pip install --force-reinstall triton), or set TRITON_{attribute.upper()}_PATH to one of a CUDA toolkit"
        ) from None


@functools.cache
def version_of(path: str) -> str:
    """The version that one of these tools states of itself: 12.8.93."""
    text = run(path, "--version")
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise ToolError(f"{path} --version states no version; it prints {text.strip()[-200:]!r}")
    return match[1]


def _run_on(content: bytes, suffix: str, *command: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        return run(*command, file.name)


def run(*command: str) -> str:
    """Everything that a command prints; raises ToolError with its last words if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        words = done.stdout.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ToolError(f"{Path(command[0]).name} failed: {words[0]}")
    return done.stdout
