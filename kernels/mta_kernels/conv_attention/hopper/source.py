"""The sources of this folder as the compiler takes them, with a function for every wgmma instruction they use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mta_kernels.conv_attention.banded import FOLDER as BANDED
from mta_kernels.nvrtc.compiler import Source, headers_in

FOLDER = Path(__file__).parent
INSTRUCTION_TYPES = {"Half": "f16", "Bfloat16": "bf16"}
# The functions of a product: A's type, whether it takes `accumulate`, and the instruction's last words. These are the
# signs of A and B, and for each operand in shared memory whether it lies across its 16 numbers, transposed.
INSTRUCTIONS = {
    "run": ("uint64_t a", True, "1, 1, 0, 0"),
    "run_fragments": ("const uint32_t (&a)[4]", True, "1, 1, 0"),
    "run_registers": ("const uint32_t* a", False, "1, 1, 1"),
    "run_transposed": ("uint64_t a", False, "1, 1, 1, 1"),
    "run_rows": ("uint64_t a", False, "1, 1, 1, 0"),
    "run_values": ("uint64_t a", False, "1, 1, 0, 1"),
}


def hopper_source(name: str, constants: Mapping[str, Any], *columns: int) -> Source:
    """The source `name` in this folder, for sm_90a, with products of so many columns beside the convolution's."""
    shapes = *((x, constants["ELEMENT"]) for x in columns), (24, "Half"), (32, "Half")
    headers = headers_in(BANDED, FOLDER) | {"wgmma.cuh": wgmma_header(*shapes)}
    return Source(FOLDER / name, "sm_90a", constants, headers)


def wgmma_header(*shapes: tuple[int, str]) -> str:
    """`wgmma.cuh`: `Product<accumulators, Element>` for these columns and elements, one function an instruction.

    It multiplies 64 rows, 16 deep. Written out, since inline assembly names every register. Accumulator
    `4 b + 2 h + e` of a thread is column `8 b + 2 (lane % 4) + e` of row `16 warp + lane / 4 + 8 h` (PTX ISA, wgmma's
    layout of D). `run` and `run_fragments` add to the accumulators if `accumulate`; the others always add.
    """
    lines = ["#pragma once", "template <int Accumulators, class Element> struct Product;"]
    for columns, element in dict.fromkeys(shapes):  # two roles may share a shape
        lines.append(f"template <> struct Product<{columns // 2}, {element}> {{")
        for function in INSTRUCTIONS:
            lines += _instruction(columns, element, function)
        lines.append("};")
    return "\n".join(lines) + "\n"


def _instruction(columns: int, element: str, function: str) -> list[str]:
    count, kind = columns // 2, INSTRUCTION_TYPES[element]
    a_type, accumulates, more = INSTRUCTIONS[function]
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    in_registers = a_type != "uint64_t a"
    inputs = [*([f'"r"(a[{i}])' for i in range(4)] if in_registers else ['"l"(a)']), '"l"(b)']
    *a, b = [f"%{count + i}" for i in range(len(inputs))]
    first = f"{{{', '.join(a)}}}" if in_registers else a[0]
    words = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{sums}}}, {first}, {b}, "
    words += f"{'p' if accumulates else '1'}, {more};"
    told = ", bool accumulate" if accumulates else ""
    if accumulates:
        words = f"{{ .reg .pred p; setp.ne.b32 p, %{count + len(inputs)}, 0; {words} }}"
        inputs.append('"r"((int)accumulate)')
    return [
        f"    static DEVICE void {function}(float (&d)[{count}], {a_type}, uint64_t b{told}) {{",
        f'        asm volatile("{words}"',
        f"            : {outputs} : {', '.join(inputs)});",
        "    }",
    ]
