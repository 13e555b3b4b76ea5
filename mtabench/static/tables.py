"""Compiled kernels as tables for people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rich.text import Text

from mtabench.static.limits import Limits
from mtabench.static.records import DOES_NOT_FIT, FAILED, SKIPPED, Kernel
from mtabench.tables import Cell, Column, as_columns, numbered

LEGEND = (
    "spill: bytes that a thread's spill instructions store+load. shared: KiB a block. blocks, occ.: what an SM holds "
    "at once, and its share of the warps that fit there. limited by: what leaves no room for one more block."
)
RESOURCES = ("kernel", "warps", "stages", "regs", "spill", "shared", "blocks", "occ.", "limited by")
LEFT = ("kernel", "limited by")


def tables(
    kernels: Iterable[Kernel], limits: Sequence[Limits]
) -> Iterator[tuple[str, list[Column], list[tuple[str, str]]]]:
    """For each target and shape a title, its table, and reasons with their marks."""
    by_target = {limit.target: limit for limit in limits}
    for (target, shape), group in groupby(kernels, key=lambda kernel: (kernel.target, kernel.shape)):
        rows = list(group)
        limit = by_target[target]
        title = (
            f"{target}: {shape} ({limit.gpu.removeprefix('NVIDIA ')}: {limit.warps_per_sm} warps, "
            f"{limit.shared_per_sm // 1024} KiB an SM, {limit.shared_per_block // 1024} KiB a block)"
        )
        marks = numbered(row.reason for row in rows)
        yield title, _resources(rows, marks), [(mark, reason) for reason, mark in marks.items()]


def summary(kernels: Sequence[Kernel]) -> str:
    """How many kernels there are, and how many of them have which problem."""
    counts = {
        "spilling": sum(bool(kernel.spill_bytes) for kernel in kernels),
        "not fitting": sum(kernel.status == DOES_NOT_FIT for kernel in kernels),
        "failed": sum(kernel.status == FAILED for kernel in kernels),
        "skipped": sum(kernel.status == SKIPPED for kernel in kernels),
    }
    return f"kernels: {len(kernels)}" + "".join(f", {what}: {count}" for what, count in counts.items())


def _resources(rows: Sequence[Kernel], marks: Mapping[str, str]) -> list[Column]:
    lines: list[list[Cell]] = []
    for row in rows:
        mark = f" {marks[row.reason]}" if row.reason else ""
        if row.registers is None:
            lines.append([row.kernel, *[""] * (len(RESOURCES) - 2), Text(f"{row.status}{mark}", style="bold red")])
            continue
        spills = f"{row.spill_store_bytes}+{row.spill_load_bytes}" if row.spill_bytes else "0"
        fits = row.status != DOES_NOT_FIT
        lines.append(
            [
                row.kernel,
                f"{row.warps}",
                "" if row.stages is None else f"{row.stages}",
                f"{row.registers}",
                Text(spills, style="bold yellow" if row.spill_bytes else ""),
                f"{(row.shared_bytes or 0) / 1024:.1f}",
                f"{row.blocks_per_sm}",
                f"{row.occupancy:.0%}",
                row.limited_by if fits else Text(f"does not fit{mark}", style="bold red"),
            ]
        )
    return as_columns(RESOURCES, lines, LEFT)
