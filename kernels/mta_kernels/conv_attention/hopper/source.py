"""The sources of this folder as the compiler takes them, with a function for every wgmma instruction they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mta_kernels.conv_attention.banded import FOLDER as BANDED
from mta_kernels.nvrtc.compiler import Source, headers_in

FOLDER = Path(__file__).parent
INSTRUCTION_TYPES = {"Half": "f16", "Bfloat16": "bf16"}
# For each kind of operands: the function, its A, whether it takes `accumulate`, and the instruction's last words. These
# are the signs of A and B, and for each operand in shared memory whether it is transposed.
INSTRUCTIONS = {
    "shared": ("run", "uint64_t a", True, "1, 1, 0, 0"),
    "fragments": ("run_fragments", "const uint32_t (&a)[4]", True, "1, 1, 0"),
    "registers": ("run_registers", "const uint32_t* a", False, "1, 1, 1"),
    "transposed": ("run_transposed", "uint64_t a", False, "1, 1, 1, 1"),
    "rows": ("run_rows", "uint64_t a", False, "1, 1, 1, 0"),
    "values": ("run_values", "uint64_t a", False, "1, 1, 0, 1"),
}


class Product(NamedTuple):
    """A wgmma instruction that a kernel uses: 64 x `columns` numbers in float32, 16 deep.

    `operands`: "shared" (A and B lie along their 16 numbers), "fragments" (the same, A in registers), "registers" (A in
    registers, B along its columns), "transposed" (A along its rows, B along its columns), "rows" (A along its rows, B
    along its 16 numbers) or "values" (A along its 16 numbers, B along its columns).
    """

    columns: int
    element: str
    operands: str = "shared"


def hopper_source(name: str, products: Iterable[Product], constants: Mapping[str, Any]) -> Source:
    """The source `name` in this folder, for sm_90a."""
    headers = headers_in(BANDED, FOLDER) | {"wgmma.cuh": wgmma_header(products)}
    return Source(FOLDER / name, "sm_90a", constants, headers)


def wgmma_header(products: Iterable[Product]) -> str:
    """`wgmma.cuh`: `Product<accumulators, Element>` for these instructions, one function each.

    Written out, since inline assembly names every register. Accumulator `4 b + 2 h + e` of a thread is column
    `8 b + 2 (lane % 4) + e` of row `16 warp + lane / 4 + 8 h` (PTX ISA, wgmma's layout of D). `run` takes both operands
    from shared memory. `run` and `run_fragments` add to the accumulators if `accumulate`; the others always add.
    """
    by_shape: dict[tuple[int, str], list[str]] = {}
    for product in dict.fromkeys(products):  # two roles may share an instruction
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
    function, a_type, accumulates, more = INSTRUCTIONS[operands]
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
