"""What lies on the chip while a fused forward runs: bytes of one tile, by the sizes in the kernels' own modules."""

from __future__ import annotations

import re
from pathlib import Path

from mtabench.problem.case import BYTES_PER_ELEMENT, Case

FLOAT = 4
STATISTICS = 2  # numbers a row: the running maximum and the running sum
Tile = dict[str, int]


def blocks(case: Case, block_m: int, block_n: int, depth: int, columns: int) -> Tile:
    """Of so many queries and keys, `depth` numbers each, and values of so many columns."""
    element = BYTES_PER_ELEMENT[case.dtype]
    return {
        "queries": block_m * depth * element,
        "keys": block_n * depth * element,
        "values": block_n * columns * element,
        "scores": block_m * block_n * FLOAT,
        "statistics": STATISTICS * block_m * FLOAT,
        "accumulator": block_m * columns * FLOAT,
    }


def constants_in(source: Path) -> dict[str, int]:
    """The whole numbers that a C source names: `TILE = 64`."""
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+) = (\d+)\b", source.read_text())}
