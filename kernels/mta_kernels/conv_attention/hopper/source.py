"""The sources of this folder as the compiler takes them, with a function for every wgmma instruction they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mta_kernels.nvrtc.compiler import Source, headers_in

FOLDER = Path(__file__).parent
HEADERS = tuple(sorted(path.name for path in FOLDER.glob("*.cuh")))
INSTRUCTION_TYPES = {"Half": "f16", "Bfloat16": "bf16"}


class Product(NamedTuple):
    """A wgmma instruction that a kernel uses: 64 x `columns` numbers in float32, 16 deep.

    `operands`: "shared" (A and B lie along their 16 numbers), "fragments" (the same, A in registers), "registers" (A in
    registers, B along its columns) or "transposed" (A along its rows, B along its columns).
    """

    columns: int
    element: str
    operands: str = "shared"


def hopper_source(name: str, products: Iterable[Product], constants: Mapping[str, Any]) -> Source:
    """The source `name` in this folder, for sm_90a."""
    headers = headers_in(FOLDER, HEADERS) | {"wgmma.cuh": wgmma_header(products)}
    return Source(FOLDER / name, "sm_90a", constants, headers)


def wgmma_header(products: Iterable[Product]) -> str:
    """`wgmma.cuh`: `Product<accumulators, Element>` for these instructions, one function each.

    Written out, since inline assembly names every register: accumulator `4 b + 2 h + e` of a thread is column
    `8 b + 2 (lane % 4) + e` of row `16 warp + lane / 4 + 8 h` (PTX ISA, wgmma's layout of D). `run` takes both operands
    from shared memory; `run_registers` and `run_transposed` add to the accumulators, which `run` and `run_fragments` do
    if asked.
    """
    by_shape: dict[tuple[int, str], list[str]] = {}
    for product in dict.fromkeys(products):  # two roles may be one instruction
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
    if operands == "fragments":
        a = ", ".join(f"%{count + i}" for i in range(4))
        return [
            f"    static DEVICE void run_fragments(float (&d)[{count}], const uint32_t (&a)[4], uint64_t b,",
            "                                     bool accumulate) {",
            f'        asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "',
            f'            "{instruction}, {{{a}}}, %{count + 4}, p, 1, 1, 0; }}"',
            f'            : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));',
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
