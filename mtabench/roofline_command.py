"""The command `roofline`: where the cells of results files stand below what their device can do."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from mtabench.charts.ceilings import known_ceilings
from mtabench.charts.data import read_cells
from mtabench.errors import UsageError
from mtabench.files.results import KEY_COLUMNS, Key, key_of, text_of
from mtabench.files.table import make_console, significant
from mtabench.model.devices import find_device
from mtabench.profiling.tables import COUNTERS_FILE, read_memory_bytes
from mtabench.roofline import Standing, standing
from mtabench.sweeps.axes import short
from mtabench.sweeps.case import Case
from mtabench.sweeps.outputs import check_output, written

OUT_COLUMNS = (
    *KEY_COLUMNS, "device", "median_ms", "useful_flops", "executed_flops", "least_bytes", "model_bytes",
    "counted_bytes", "matmul_tflops", "copy_gbytes_s", "roof_ms", "fraction_of_roofline", "speedup_left",
    "own_roof_ms", "own_speedup_left",
)  # fmt: skip
Ceilings = tuple[float, float]


class Placed(NamedTuple):
    """A cell, its device, that device's ceilings, and where it stands below them."""

    case: Case
    device: str
    ceilings: Ceilings
    standing: Standing


def show_roofline(csv_paths: Sequence[Path], profiles: Sequence[Path], out: Path | None, overwrite: bool) -> None:
    """Print a table a device and dtype, and write it to `out`; raises UsageError if no cell can be placed."""
    if out is not None:
        check_output(out, [*csv_paths, *profiles], overwrite)
    counted: dict[Key, float] = {}
    for path in profiles:
        counted |= read_memory_bytes(path / COUNTERS_FILE if path.is_dir() else path)
    cells = read_cells(csv_paths)
    groups: list[tuple[str, list[Placed]]] = []
    for (device, dtype), group in cells.groupby(["device", "dtype"], sort=False):
        found, note = _ceilings(group, str(device))
        timed = group[(group["status"] == "ok") & group["median_ms"].notna()] if found else group[:0]
        records: list[Any] = timed.to_dict("records")
        cases = [(_case(row), row["median_ms"]) for row in records]
        rows = [
            Placed(case, str(device), found, standing(case, median_ms, *found, counted.get(key_of(case))))
            for case, median_ms in cases
            if found
        ]
        groups.append((f"{device}, {dtype}: {note}", rows))
    placed = [row for _, rows in groups for row in rows]
    if out is not None and placed:
        with written(out) as file:
            file.write(_csv_text(placed).encode())
    console = make_console()
    for title, rows in groups:
        _say(console, title)
        if rows:
            console.print(_table(rows))
    if not placed:
        raise UsageError(
            "no cell can be placed: there is none with a time on a device whose ceilings are known; "
            "`mtabench env --measure` measures them"
        )
    _say(
        console,
        "roof: the least time of the useful work at these ceilings; left: the time over it, what any algorithm could "
        "win; own left: the same for what this implementation executes and moves",
    )
    if out is not None:
        _say(console, f"roofline: {out}")


def _ceilings(cells: Any, device: str) -> tuple[Ceilings | None, str]:
    """A product in TFLOP/s and a copy in GB/s of the device of these cells, and in words where they come from."""
    found = known_ceilings(cells)
    rates, notes = [found.matmul_tflops, found.copy_gbytes_s], [found.note]
    if None in rates:
        try:
            measured = find_device(device).measured
        except UsageError:
            measured = None
        if measured is not None:
            copy, matmul = measured
            taken = [f"{matmul:g} TFLOP/s"] * (rates[0] is None) + [f"{copy:g} GB/s"] * (rates[1] is None)
            rates = [rates[0] or matmul, rates[1] or copy]
            notes.append(f"{' and '.join(taken)} taken from mtabench.model.devices")
    if rates[0] is None or rates[1] is None:
        return None, f"{'; '.join(notes)}: not placed (`mtabench env --measure` measures ceilings)"
    return (rates[0], rates[1]), "; ".join(notes)


def _case(row: Mapping[str, Any]) -> Case:
    """The cell of a row; what was measured on a GPU has a driver."""
    splits = row["splits"]
    taps = (None, None) if math.isnan(row["conv_q"]) else (int(row["conv_q"]), int(row["conv_k"]))
    return Case(
        pass_=row["pass"],
        impl=row["impl"],
        op=row["op"],
        dtype=row["dtype"],
        batch=int(row["batch"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        seq=int(row["seq"]),
        head_dim=int(row["head_dim"]),
        conv_q=taps[0],
        conv_k=taps[1],
        causal=bool(row["causal"]),
        splits=int(splits) if splits.isdigit() else splits or None,
        device="cuda" if row["driver"] or row["cuda"] else "cpu",
    )


def _table(rows: Sequence[Placed]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("pass", "impl"):
        table.add_column(name, no_wrap=True)
    for name in (
        "batch", "seq", "dim", "ms", "useful GF", "executed GF", "least MB", "model MB", "counted MB", "FLOP/B",
        "roof ms", "of roof", "left", "own left",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("roof by", no_wrap=True)
    for case, _, _, one in rows:
        work = (significant(one.useful_flops / 1e9, 3), significant(one.executed_flops / 1e9, 3))
        moved = (one.least_bytes, one.model_bytes, one.counted_bytes)
        table.add_row(
            case.pass_, case.label.replace("splits ", ""), str(case.batch), short(case.seq), str(case.head_dim),
            significant(one.median_ms), *work, *(significant(count / 1e6, 3) if count else "" for count in moved),
            significant(one.intensity, 3), significant(one.roof_ms, 3), f"{one.fraction:.1%}",
            f"{significant(one.speedup_left, 3)}x", f"{significant(one.own_speedup_left, 3)}x",
            "compute" if one.compute_bound else "memory",
        )  # fmt: skip
    return table


def _csv_text(rows: Sequence[Placed]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(OUT_COLUMNS)
    for case, device, ceilings, one in rows:
        values = (
            device, one.median_ms, one.useful_flops, one.executed_flops, one.least_bytes, one.model_bytes,
            one.counted_bytes, *ceilings, one.roof_ms, one.fraction, one.speedup_left, one.own_roof_ms,
            one.own_speedup_left,
        )  # fmt: skip
        writer.writerow([*key_of(case), *map(text_of, values)])
    return text.getvalue()


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
