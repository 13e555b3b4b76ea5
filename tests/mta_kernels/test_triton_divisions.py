"""No pipelined loop of a Triton kernel divides by what may be zero.

The pipeliner computes the first iteration's indices before the loop. A division by zero is undefined there, so LLVM
takes the loop as entered and copies a first tile over shared memory that others use.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mta_kernels

FILES = sorted(x for x in Path(mta_kernels.__file__).parent.rglob("*.py") if "import triton" in x.read_text())
PLANTED = """
def kernel(start, end, group):
    steps = tl.maximum(tl.cdiv(end - start, 64), 0)
    for step in tl.range(0, steps * group, num_stages=2):
        head = step // {}
"""


def possible_zeros(code: str) -> list[str]:
    """Divisors in a loop but for constants, `tl.maximum(.., 1)` and arguments, of which the host gives none of 0."""
    above_zero = re.compile(r"tl\.maximum\(.*, 1\)|tl\.num_programs\(\d\)|[A-Z_]+|[1-9]\d*")
    found = []
    for kernel in (x for x in ast.walk(ast.parse(code)) if isinstance(x, ast.FunctionDef)):
        safe = {argument.arg for argument in (*kernel.args.args, *kernel.args.kwonlyargs)}
        for node in ast.walk(kernel):
            if isinstance(node, ast.Assign) and above_zero.fullmatch(ast.unparse(node.value)):
                safe |= {ast.unparse(target) for target in node.targets}
        loops = (x for x in ast.walk(kernel) if isinstance(x, ast.For) and "static_range(" not in ast.unparse(x.iter))
        for loop in (x for x in loops if "range(" in ast.unparse(x.iter)):
            for node in (x for statement in loop.body for x in ast.walk(statement)):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
                    divisor = ast.unparse(node.right)
                    if divisor not in safe and not above_zero.fullmatch(divisor):
                        found.append(f"{kernel.name}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_loops_divide_by_no_zero(file: Path) -> None:
    assert not possible_zeros(file.read_text())


def test_a_divisor_that_may_be_zero_is_found() -> None:
    assert possible_zeros(PLANTED.format("steps")) == ["kernel: step // steps"]
    assert not possible_zeros(PLANTED.format("group")) + possible_zeros(PLANTED.format("tl.maximum(steps, 1)"))
