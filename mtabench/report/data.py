"""A results file made ready to be shown: bounded, printable, its cells sorted into the panels of a chart.

A results file may come from a stranger. No path in it is opened, and a command in it is offered for measuring a cell
again only if it is one that mtabench itself writes.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from mtabench.console import flop_unit
from mtabench.errors import UsageError
from mtabench.measuring.settled import settled
from mtabench.pages.text import MOST_CHARACTERS, shown_number, shown_text
from mtabench.problem.operations import NONE, PLAIN, PLAIN_LACKS, STEPS, by_value, page_size_text, taps_text
from mtabench.results.results_file import COLUMNS, NUMERIC_COLUMNS, find_samples, read_results, samples_path
from mtabench.results.runs import Rounds, read_run
from mtabench.results.shown import percent

# What a chart of time against sequence length holds fixed.
PANEL_AXES = ("pass", "device", "dtype", "batch", "heads", "kv_heads", "head_dim", "layers", *STEPS, "causal")
SHAPE_AXES = (*(axis for axis in PANEL_AXES if axis not in STEPS), "seq")
MOST_PANELS = 100  # rows beyond them are in no chart

COMMAND = re.compile(
    r"mtabench (fwd|bwd|decode|model)"
    r"( --impl ([A-Za-z0-9_][A-Za-z0-9_.:+-]*=)?(\.{0,2}/)?[A-Za-z0-9_][A-Za-z0-9_./+-]*(\.py:[A-Za-z0-9_]+)?"
    r"| --(seq|head-dim|batch|heads|kv-heads|dtype|device|op|mix|conv|post-conv|norm|gate|splits|page-size"
    r"|timer|cache|rounds|time-limit|cell-timeout|seed|ranks|mode|layers|dim|attention) [A-Za-z0-9][A-Za-z0-9_.+/-]*"
    r"| --(causal|no-causal|isolate))*"
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """How the samples of a cell lie: by round in ms, the medians of the rounds, and the values under columns.SPREAD.

    Of these `spread_percent` is from the 10th to the 90th percentile and `drift_percent` from the lowest to the highest
    median of a round, both as parts of the median.
    """

    rounds: Rounds
    medians: list[float]
    values: Row


@dataclass(frozen=True, slots=True)
class Report:
    """The results file at `path` as it is shown.

    `rows` have the columns of the file as numbers, None, or printable texts of bounded length, `page_size` with
    `none` for a contiguous cache, and besides: `conv` and `post_conv` (such as "6x11"), `label` (the cell in the
    words that tell it from the others here), `settled` (whether its time did, None without one), `command` (what
    measures it again, or ""), `panels` (numbers of the panels it belongs to) and `charted` (False for the splits
    that are not drawn). `spreads` has an entry a row, None without samples; `no_samples` says why if none has.
    """

    path: Path
    name: str
    rows: Sequence[Row]
    panels: Sequence[str]
    spreads: Sequence[Spread | None]
    no_samples: str

    @property
    def implementations(self) -> list[str]:
        """Names in the order of the file, conv attention first."""
        rows = sorted(self.rows, key=is_plain)
        return list(dict.fromkeys(row["impl"] for row in rows))

    @property
    def rate(self) -> tuple[str, float]:
        """The unit that suits the rates of arithmetic here, and the factor to it from TFLOP/s."""
        return flop_unit(row["useful_tflops"] for row in self.rows if row["useful_tflops"])

    def varying(self, axes: Iterable[str]) -> list[str]:
        """Those axes that tell cells of this file apart, without those that another axis settles."""
        return _varying(self.rows, axes)


def shape_key(row: Row) -> tuple[Any, ...]:
    """The values of SHAPE_AXES."""
    return tuple(row[axis] for axis in SHAPE_AXES)


def is_plain(row: Mapping[str, Any]) -> bool:
    """Whether a row is of plain attention, the yardstick."""
    return bool(row["op"] == PLAIN)


def is_timed(row: Mapping[str, Any]) -> bool:
    """Whether a row has a time that can be believed."""
    return row["status"] == "ok" and (row["median_ms"] or 0) > 0


def yardstick(rows: Iterable[Row]) -> str:
    """The plain attention that is the fastest in most shapes; empty if none is timed."""
    fastest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if is_plain(row) and is_timed(row) and row["charted"]:
            other = fastest.setdefault(shape_key(row), row)
            if row["median_ms"] < other["median_ms"]:
                fastest[shape_key(row)] = row
    counts = Counter(row["impl"] for row in fastest.values())
    return max(sorted(counts), key=counts.__getitem__, default="")


def read_report(path: Path) -> Report:
    """Read a results file and the samples beside it. Raises UsageError where `read_results` does.

    Without samples, or with samples at odds with the rows, the report is made all the same and says so.
    """
    table = read_results(path)
    rows = [_shown_row({str(name): value for name, value in row.items()}) for row in table.to_dict("records")]
    distinct = _varying(rows, (*PANEL_AXES, "seq", "splits"))
    for row in rows:
        row["label"] = ", ".join([row["impl"], *(axis_text(axis, row[axis]) for axis in distinct if row[axis] != "")])
    panels = _sort_into_panels(rows)
    _choose_charted(rows)
    spreads, no_samples = _read_spreads(path, rows)
    return Report(path, shown_text(path.name), rows, panels, spreads, no_samples)


def axis_text(axis: str, value: object) -> str:
    """A value of an axis in words, such as `head dim 64`."""
    if axis == "causal":
        return "causal" if value == "yes" else "not causal"
    if axis in ("pass", "dtype", "device"):
        return str(value)
    return f"{axis.replace('kv_', 'KV ').replace('_', ' ')} {value}"


def _shown_row(record: Mapping[str, Any]) -> Row:
    row: Row = {
        name: shown_number(record[name]) if name in NUMERIC_COLUMNS else shown_text(record[name]) for name in COLUMNS
    }
    row["causal"] = "yes" if record["causal"] else "no"
    row["page_size"] = page_size_text(row["pass"], row["page_size"])
    row |= {name: taps_text(row[f"{name}_q"], row[f"{name}_k"]) for name in ("conv", "post_conv")}
    known = len(record["repro"]) <= MOST_CHARACTERS and COMMAND.fullmatch(record["repro"])
    row["command"] = record["repro"] if known else ""
    row["settled"] = settled(row)
    return row


def _varying(rows: Sequence[Row], axes: Iterable[str]) -> list[str]:
    """The axes with more than one value. A batch that follows from the sequence length, and KV heads that follow from
    the heads, tell nothing that those do not."""
    followed = {"batch": ("pass", "seq"), "kv_heads": ("heads",)}

    def distinct(*names: str) -> int:
        of_step = len(names) == 1 and names[0] in PLAIN_LACKS
        return len({tuple(row[name] for name in names) for row in rows if not (of_step and is_plain(row))})

    found = [axis for axis in axes if distinct(axis) > 1]
    return [
        axis for axis in found if axis not in followed or distinct(*followed[axis], axis) > distinct(*followed[axis])
    ]


def _sort_into_panels(rows: Sequence[Row]) -> list[str]:
    """Give every row the numbers of its panels, and return their titles. Plain attention is in all that it fits."""
    varying = _varying(rows, PANEL_AXES)
    axes = [axis for axis in PANEL_AXES if axis in varying or axis in ("head_dim", *STEPS)]
    without_steps = [axis for axis in axes if axis not in STEPS]
    key_of, shape_of = itemgetter(*axes), itemgetter(*without_steps)
    conv_shapes = {shape_of(row) for row in rows if not is_plain(row)}
    own = {key_of(row): shape_of(row) for row in rows if not (is_plain(row) and shape_of(row) in conv_shapes)}
    numbers = {key: number for number, key in enumerate(sorted(own, key=by_value)[:MOST_PANELS])}
    fitting: dict[Any, list[int]] = defaultdict(list)
    for key, number in numbers.items():
        fitting[own[key]].append(number)
    for row in rows:
        key = key_of(row)
        row["panels"] = fitting.get(shape_of(row), []) if is_plain(row) else [numbers[key]] if key in numbers else []
    told = [
        [(axis, value) for axis, value in zip(axes, key, strict=True) if value != NONE or axis in varying]
        for key in numbers
    ]
    return [", ".join(axis_text(axis, value) for axis, value in pairs if value != "") for pairs in told]


def _choose_charted(rows: Sequence[Row]) -> None:
    """Of several splits of an implementation at one place, charts show auto, or the fastest if it is missing."""
    places: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        row["charted"] = False
        places[row["impl"], row["op"], *(row[step] for step in STEPS), shape_key(row)].append(row)
    for there in places.values():
        usual = [row for row in there if row["splits"] in ("", "auto")]
        timed = [row for row in there if is_timed(row)]
        chosen = usual[-1] if usual else min(timed, key=lambda row: row["median_ms"]) if timed else there[-1]
        chosen["charted"] = True


def _read_spreads(path: Path, rows: Sequence[Row]) -> tuple[list[Spread | None], str]:
    """What the samples say of each row, and why not if there are none."""
    nothing: list[Spread | None] = [None] * len(rows)
    if not any(is_timed(row) for row in rows):
        return nothing, "no cell has a time"
    if not find_samples(path).exists():
        return nothing, f"there is no file {shown_text(samples_path(path).name)} beside {shown_text(path.name)}"
    try:
        cells = read_run(path).cells
    except UsageError as error:
        return nothing, shown_text(error, most=1000)
    return [_spread(cell.rounds, row) if cell.ok else None for cell, row in zip(cells.values(), rows, strict=True)], ""


def _spread(rounds: Rounds, row: Row) -> Spread:
    medians = [statistics.median(samples) for samples in rounds]
    samples = [sample for one in rounds for sample in one]
    median = statistics.median(samples)
    known = row["p10_ms"] is not None and row["p90_ms"] is not None
    values = {
        "median_ms": row["median_ms"],
        "low_ms": min(samples),
        "high_ms": max(samples),
        "spread_percent": percent((row["p90_ms"] - row["p10_ms"]) / median if known else None),
        "drift_percent": percent((max(medians) - min(medians)) / median),
        "rounds": len(rounds),
        "samples": len(samples),
    }
    return Spread(rounds, medians, values)
