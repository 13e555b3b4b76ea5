"""The command `roofline`: where the cells of results files stand below what their device can do."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtabench.charts.ceilings import FILE_NAME, DrawnCeilings, known_ceilings
from mtabench.charts.data import read_cells
from mtabench.console import make_console, significant
from mtabench.errors import UsageError
from mtabench.measuring.settled import UNSETTLED, mark_of, unsettled_of
from mtabench.prediction.devices import known_device
from mtabench.prediction.roofline import Standing, standing
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.profiling.tables import COUNTERS_FILE, read_memory_bytes
from mtabench.results.results_file import Key, key_of, of_gpu
from mtabench.tables import Column, fitted, lines, print_lines, print_prose


class Placed(NamedTuple):
    """A cell, its row and device, that device's ceilings in TFLOP/s and GB/s, and where it stands below them."""

    case: Case
    row: Mapping[str, Any]
    device: str
    ceilings: tuple[float, float]
    standing: Standing


def run(csv_paths: Sequence[Path], profiles: Sequence[Path]) -> int:
    """Print a table a device and dtype; raises UsageError if no cell can be placed."""
    counted: dict[Key, float] = {}
    for path in profiles:
        counted |= read_memory_bytes(path / COUNTERS_FILE if path.is_dir() else path)
    cells = read_cells(csv_paths)
    groups: list[tuple[str, list[Placed]]] = []
    for (device, dtype), group in cells.groupby(["device", "dtype"], sort=False):
        found, note = _ceilings(group, str(device))
        timed = group[(group["status"] == "ok") & group["median_ms"].notna()]
        records: list[Any] = timed.to_dict("records")
        rows = [
            Placed(case, row, str(device), rates, standing(case, row["median_ms"], *rates, counted.get(key_of(case))))
            for case, row in ((Case.of_row(row, "cuda" if of_gpu(row) else "cpu"), row) for row in records)
            if (rates := _rates(found, case))
        ]
        groups.append((f"{device}, {', '.join([str(dtype), *_shared(rows)])}: {note}", rows))
    placed = [row for _, rows in groups for row in rows]
    console = make_console()
    for title, rows in groups:
        print_prose(console, title)
        if rows:
            above, kept, dropped = fitted([one for one in _columns(rows) if any(one.texts)], console.width)
            print_lines(console, lines(kept, above))
            if dropped:
                names = ", ".join(column.name for column in dropped)
                print_prose(console, f"left out for {console.width} columns: {names}")
    if not placed:
        # Beside the results file is where the ceilings are looked up.
        measure_them = shlex.join(["mtabench", "env", "--measure", "--out", str(csv_paths[0].parent / FILE_NAME)])
        raise UsageError(
            "no cell can be placed: there is none with a time on a device whose ceilings are known; on that device "
            f"`{measure_them}` measures them"
        )
    if marked := unsettled_of([one.row for one in placed]):
        print_prose(console, f"{UNSETTLED} {marked}")
    print_prose(
        console,
        "roof: the least time of the useful work at these ceilings; left: the time over it, what any algorithm could "
        "win; own left: the same for what this implementation executes and moves",
    )
    return 0


def _shared(rows: Sequence[Placed]) -> list[str]:
    """What of the shape all rows have in common, and the table therefore does not repeat."""
    facts = [{case.pass_, f"batch {case.batch}", f"head dim {case.head_dim}"} for case, *_ in rows]
    steps = {case.steps for case, *_ in rows} - {""}  # plain attention has none
    return sorted(set.intersection(*facts) | (steps if len(steps) == 1 else set())) if facts else []


def _rates(ceilings: DrawnCeilings, case: Case) -> tuple[float, float] | None:
    """The ceilings that hold for a cell: of products in TFLOP/s and of memory in GB/s; None if one is not known."""
    memory = ceilings.memory(case.pass_).gbytes_s
    return (ceilings.matmul_tflops, memory) if ceilings.matmul_tflops and memory else None


def _ceilings(cells: Any, device: str) -> tuple[DrawnCeilings, str]:
    """The ceilings of the device of these cells, and in words where they come from."""
    found = known_ceilings(cells)
    passes = set(cells["pass"])
    lacking = [found.matmul_tflops is None, any(found.memory(pass_).gbytes_s is None for pass_ in passes)]
    notes = [found.note]
    if any(lacking):
        known = known_device(device)
        if known and known.measured:
            copy, matmul = known.measured
            taken = [f"{matmul:g} TFLOP/s"] * lacking[0] + [f"{copy:g} GB/s"] * lacking[1]
            found = found._replace(
                matmul_tflops=found.matmul_tflops or matmul, copy_gbytes_s=found.copy_gbytes_s or copy
            )
            notes.append(f"{' and '.join(taken)} taken from mtabench.prediction.devices")
    placed = found.matmul_tflops and any(found.memory(pass_).gbytes_s for pass_ in passes)
    return found, "; ".join(notes) + ("" if placed else ": not placed")


def _columns(rows: Sequence[Placed]) -> list[Column]:
    """All columns; the unit stands below the name."""
    cases, found = [row.case for row in rows], [row.standing for row in rows]
    shape = [
        Column("pass", [case.pass_ for case in cases], 0, "left", True),
        Column("batch", [str(case.batch) for case in cases], apart=True),
        Column("dim", [str(case.head_dim) for case in cases], apart=True),
        Column("steps", [case.steps for case in cases], 0, "left", True),
    ]
    return [
        *(column for column in shape if len({*column.texts} - {""}) > 1),
        Column("seq", [short(case.seq) for case in cases]),
        Column("impl", [case.label.replace("splits ", "") for case in cases], 0, "left"),
        Column("median\nms", [mark_of(one.row) + significant(one.standing.median_ms) for one in rows]),
        Column("useful\nGFLOP", [significant(one.useful_flops / 1e9, 3) for one in found], 6),
        Column("executed\nGFLOP", [significant(one.executed_flops / 1e9, 3) for one in found], 8),
        Column("least\nMB", [_megabytes(one.least_bytes) for one in found], 7),
        Column("model\nMB", [_megabytes(one.model_bytes) for one in found], 9),
        Column("counted\nMB", [_megabytes(one.counted_bytes) for one in found], 10),
        Column("FLOP\na byte", [significant(one.intensity, 3) for one in found], 5),
        Column("roof\nms", [significant(one.roof_ms, 3) for one in found], 2),
        Column("of roof", [f"{one.fraction:.1%}" for one in found]),
        Column("left", [f"{significant(one.speedup_left, 3)}x" for one in found], 1),
        Column("own\nleft", [f"{significant(one.own_speedup_left, 3)}x" for one in found], 4),
        Column("roof by", ["compute" if one.compute_bound else "memory" for one in found], 3, "left"),
    ]


def _megabytes(count: float | None) -> str:
    return significant(count / 1e6, 3) if count else ""
