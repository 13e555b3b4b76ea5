"""CUDA C++ sources to machine code: by NVRTC, which comes with every PyTorch that has CUDA, kept in memory and on disk.

Through `cuda.bindings`, which PyTorch brings too: no toolkit and no compiler are needed on the user's machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
HEADERS = ("device.cuh", "tiles.cuh")
INSTRUCTION_TYPES = {"Half": "f16", "Bfloat16": "bf16"}


class Product(NamedTuple):
    """A wgmma instruction that a kernel uses: 64 x `columns` numbers in float32, 16 deep.

    `operands`: "shared" (A and B lie along their 16 numbers), "registers" (A in registers, B along its columns) or
    "transposed" (A along its rows, B along its columns).
    """

    columns: int
    element: str
    operands: str = "shared"


class CompileError(RuntimeError):
    """The compiler refused a source of ours; its words are the message."""


def wgmma_header(products: Iterable[Product]) -> str:
    """`wgmma.cuh`: `Product<accumulators, Element>` for these instructions, one function each.

    Written out, since inline assembly names every register: accumulator `4 b + 2 h + e` of a thread is column
    `8 b + 2 (lane % 4) + e` of row `16 warp + lane / 4 + 8 h` (PTX ISA, wgmma's layout of D). `run` takes both operands
    from shared memory; `run_registers` and `run_transposed` add to the accumulators, which `run` does if asked.
    """
    by_shape: dict[tuple[int, str], list[str]] = {}
    for product in products:
        by_shape.setdefault((product.columns, product.element), []).append(product.operands)
    lines = ["#pragma once", "template <int Accumulators, class Element> struct Product;"]
    for (columns, element), kinds in by_shape.items():
        lines.append(f"template <> struct Product<{columns // 2}, {element}> {{")
        for operands in kinds:
            lines += _instruction(columns, element, operands)
        lines.append("};")
    return "\n".join(lines) + "\n"


def _instruction(columns: int, element: str, operands: str) -> list[str]:
    count, kind = columns // 2, INSTRUCTION_TYPES[element]
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{accumulators}}}"
    if operands == "registers":
        a = ", ".join(f"%{count + i}" for i in range(4))
        return [
            f"    static DEVICE void run_registers(float (&d)[{count}], const uint32_t* a, uint64_t b) {{",
            f'        asm volatile("{instruction}, {{{a}}}, %{count + 4}, 1, 1, 1, 1;"',
            f'            : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));',
            "    }",
        ]
    if operands == "transposed":
        return [
            f"    static DEVICE void run_transposed(float (&d)[{count}], uint64_t a, uint64_t b) {{",
            f'        asm volatile("{instruction}, %{count}, %{count + 1}, 1, 1, 1, 1, 1;"',
            f'            : {outputs} : "l"(a), "l"(b));',
            "    }",
        ]
    return [
        f"    static DEVICE void run(float (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{",
        f'        asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "',
        f'            "{instruction}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"',
        f'            : {outputs} : "l"(a), "l"(b), "r"((int)accumulate));',
        "    }",
    ]


def compile_source(name: str, products: Iterable[Product], constants: Mapping[str, Any]) -> tuple[bytes, str]:
    """Machine code for sm_90a of the source `name` in this folder, and what the assembler said of it.

    `constants` become macros. Raises CompileError with the compiler's words.
    """
    from cuda.bindings import nvrtc

    headers = {header: (FOLDER / header).read_text() for header in HEADERS}
    headers["wgmma.cuh"] = wgmma_header(products)
    options = [f"-D{key}={value}" for key, value in constants.items()]
    options += ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v"]
    source = (FOLDER / name).read_text()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source.encode(), name.encode(), len(headers), [x.encode() for x in headers.values()],
            [x.encode() for x in headers],
        )
    )  # fmt: skip
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        words = log.rstrip(b"\0 \n").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} does not compile: {words}")
        code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code, words


def machine_code(name: str, products: Iterable[Product], constants: Mapping[str, Any]) -> bytes:
    """The same, from the cache on disk if it was compiled before with this compiler: see `cache_folder`."""
    products = list(products)
    parts = [version(), wgmma_header(products), str(sorted(constants.items()))]
    parts += [(FOLDER / source).read_text() for source in (*HEADERS, name)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = cache_folder() / f"{Path(name).stem}-{digest}.cubin"
    with contextlib.suppress(OSError):
        code = path.read_bytes()
        if code.startswith(b"\x7fELF"):
            return code
    code, _ = compile_source(name, products, constants)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, no more
        _write_whole(path, code)
    return code


@functools.cache
def version() -> str:
    """NVRTC's, such as "13.0"."""
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    _checked((result,))
    return f"{major}.{minor}"


def cache_folder() -> Path:
    """Where machine code is kept: `$MTA_KERNELS_CACHE`, else `$XDG_CACHE_HOME/mta_kernels`, else in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("MTA_KERNELS_CACHE") or os.path.join(base, "mta_kernels")) / "hopper"


def _write_whole(path: Path, code: bytes) -> None:
    """Under its name only once it is complete: several processes may compile the same kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)


@functools.cache
def missing_package() -> str | None:
    """What must be installed to compile, in words, or None."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return "NVRTC is not installed (pip install 'mtabench[cuda]'; PyTorch for CUDA brings it)"
    return None


def _checked(results: tuple) -> Any:
    """The value that an NVRTC call gave; raises CompileError if it failed."""
    if int(results[0]) != 0:
        raise CompileError(f"NVRTC failed: {results[0]}")
    return results[1] if len(results) > 1 else None
