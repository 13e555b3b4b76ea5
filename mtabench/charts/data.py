"""What charts are drawn from: cells of results files, checked, each once, sorted into what one chart can show."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mtabench.errors import UsageError
from mtabench.measuring.settled import settled
from mtabench.problem.axes import short
from mtabench.problem.operations import OPERATION_COLUMNS
from mtabench.prose import plural
from mtabench.results.cell_names import name_of
from mtabench.results.results_file import COLUMNS, KEY_COLUMNS, MEASURED_COLUMNS, NUMERIC_COLUMNS, read_results

SETTING = ("device", "dtype", "layers", "heads", "kv_heads", "causal", "batch_name")
MEASURES = tuple(name for name in MEASURED_COLUMNS if name in NUMERIC_COLUMNS)
MOST_IMPLEMENTATIONS = 60
MOST_SETTINGS = 100
SLUG_LENGTH = 40


def read_cells(csv_paths: Iterable[str | Path]) -> pd.DataFrame:
    """The cells of all files in one frame, as `read_results` gives them; a row that several files have counts once.

    `folder` is where its file lies, and `row` its place there. A measure of 0, which no logarithmic axis holds, is NaN.
    A cell that is `ok` without a time has the status `no time`. `unsettled` says whether its time did not settle.
    `half` is half the 95 % interval of its logarithm, about half the interval as a part of it; 0 if unknown.

    Raises UsageError where `read_results` does, and if there is no file. So it does for a cell of one device with
    different rows, and for more implementations than charts can distinguish.
    """
    paths = list(map(Path, csv_paths))
    frames = [read_results(path).assign(file=number, folder=str(path.parent)) for number, path in enumerate(paths)]
    if not frames:
        raise UsageError("no results file was given; expected at least one CSV file")
    frame = pd.concat(frames)
    frame = frame.assign(row=frame.index).reset_index(drop=True)
    cells = frame.drop_duplicates(COLUMNS).reset_index(drop=True)
    _refuse_two_rows(cells, paths)
    cells[list(MEASURES)] = cells[list(MEASURES)].where(cells[list(MEASURES)] > 0)
    cells.loc[(cells["status"] == "ok") & cells["median_ms"].isna(), "status"] = "no time"
    records: list[Any] = cells[list(MEASURES)].to_dict("records")
    cells["unsettled"] = [settled(row) is False for row in records]
    cells["half"] = np.log(cells["ci95_high_ms"] / cells["ci95_low_ms"]) / 2
    cells["half"] = cells["half"].where(cells["samples"] != 1).fillna(0.0)
    count = cells["impl"].nunique()
    if count > MOST_IMPLEMENTATIONS:
        raise UsageError(
            f"these results name {count} implementations, and charts hold at most {MOST_IMPLEMENTATIONS}; "
            "give fewer files"
        )
    return cells.copy()  # in few blocks of memory, of which a chart makes hundreds of parts


def _refuse_two_rows(cells: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Raise UsageError for a cell that a device has several rows of: a chart would show one of them and not say so."""
    key = [*KEY_COLUMNS, "device"]
    second = cells[cells.duplicated(key)]
    if second.empty:
        return
    two = next(rows for _, rows in cells.groupby(key, dropna=False, sort=False) if len(rows) > 1)
    records: list[Any] = two.to_dict("records")
    first, again = records[:2]
    names = [paths[number] for number in (first["file"], again["file"])]
    cell = f"{name_of(again)} of {again['device'] or 'an unnamed device'}"
    more = f" and {plural(len(second) - 1, 'more cell')}" if len(second) > 1 else ""
    if names[0] == names[1]:
        raise UsageError(f"{names[0]} has the cell {cell} twice{more}; a results file has one row a cell")
    merge = shlex.join(["mtabench", "results", "merge", *map(str, names), "--latest", "--out", "ALL.csv"])
    raise UsageError(f"{names[0]} and {names[1]} both have {cell}{more}; give one of them, or first `{merge}`")


def settings(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Split the cells of one pass into what one chart can show, each with the end of its file's name.

    One chart shows one value of each of SETTING. Raises UsageError if that makes more charts than anyone can want.
    """
    if cells.empty:
        return
    parts = []
    for _, group in cells.groupby([name for name in SETTING if name != "batch_name"], sort=False):
        parts += [part.assign(batch_name=name) for name, part in _same_batch(group)]
    cells = pd.concat(parts)
    differing = [name for name in SETTING if cells[name].nunique() > 1]
    groups = cells.groupby(list(SETTING), sort=False)
    if groups.ngroups > MOST_SETTINGS:
        raise UsageError(
            f"these results hold {groups.ngroups} combinations of {', '.join(differing).replace('_name', '')}, each a "
            f"chart of its own, and at most {MOST_SETTINGS} are drawn; give fewer files"
        )
    taken: set[str] = set()
    for values, group in groups:
        words = [_slug(name, value) for name, value in zip(SETTING, values, strict=True) if name in differing]
        suffix = stem = "".join(f"-{word}" for word in words)
        while suffix in taken:  # names that differ beyond what a file's name can hold
            suffix = f"{stem}-{len(taken) + 1}"
        taken.add(suffix)
        yield suffix, group


def _slug(name: str, value: object) -> str:
    """A setting as part of a file name."""
    if name == "causal":
        return "causal" if value else "full"
    if name == "layers":
        return f"{value or 'no'}{name}"
    if name in ("heads", "kv_heads"):
        return f"{value:g}{name.replace('_', '')}"
    text = str(value)[: 2 * SLUG_LENGTH].lower().replace(" ", "")
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)[:SLUG_LENGTH].strip("-") or name


def _same_batch(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Cells that make one line: one batch, or batches that shrink as the sequence grows (`--tokens`)."""
    name = _batch_name(cells)
    if name:
        yield name, cells
    elif cells["file"].nunique() > 1:
        for _, group in cells.groupby("file", sort=False):
            yield from _same_batch(group)
    else:
        for batch, group in cells.groupby("batch", sort=False):
            yield f"batch {batch:g}", group


def _batch_name(cells: pd.DataFrame) -> str:
    """`batch 4` or `16k tokens` if one line can hold these cells, else nothing."""
    if cells["batch"].nunique() == 1:
        return f"batch {cells['batch'].iloc[0]:g}"
    tokens = int((cells["batch"] * cells["seq"]).where(cells["batch"] > 1).max())
    one_line = (cells["batch"] == (tokens // cells["seq"]).clip(lower=1)).all()
    return f"{short(tokens)} tokens" if one_line else ""


def one_line_each(cells: pd.DataFrame) -> pd.DataFrame:
    """Of each implementation the cells of one line: of several splits auto, or the fastest if auto is missing.

    The column `label` names the implementation, and its splits unless auto chose them.
    """
    parts = []
    for (impl, *_), group in cells.groupby(["impl", "head_dim", *OPERATION_COLUMNS], sort=False, dropna=False):
        splits, label = set(group["splits"]), str(impl)
        if "auto" in splits:
            group = group[group["splits"] == "auto"]
        elif len(splits) > 1:
            ranked = group.assign(failed=group["status"] != "ok").sort_values(["failed", "median_ms"], kind="stable")
            once = ["batch", "seq", "dtype"]
            group, label = ranked.drop_duplicates(once).drop(columns="failed"), f"{impl}, best splits"
        elif splits != {""}:
            label = f"{impl}, splits {splits.pop()}"
        parts.append(group.assign(label=label))
    return pd.concat(parts).sort_index()


def beside(cells: pd.DataFrame, baselines: pd.DataFrame, on: Sequence[str]) -> pd.DataFrame:
    """For each of the cells the baseline with the same values in `on`, in their order.

    `ms` is its median, NaN if it has none. `half` is the half interval of the ratio of the two times. `unsettled` says
    whether either did not settle.
    """
    names = {"median_ms": "ms", "half": "its_half", "unsettled": "its_unsettled"}
    theirs = baselines.loc[baselines["status"] == "ok", [*on, *names]].rename(columns=names)
    theirs = theirs.assign(**theirs[list(on)].fillna(0)).drop_duplicates(list(on))
    mine = cells[[*on, "half", "unsettled"]].fillna(dict.fromkeys(on, 0))
    both = mine.merge(theirs, on=list(on), how="left").set_axis(cells.index)
    unsettled = both["unsettled"] | both["its_unsettled"].eq(True)
    return both.assign(half=np.hypot(both["half"], both["its_half"].fillna(0)), unsettled=unsettled)


def rivals(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of the operations that have speedups, the baseline's own left out."""
    rated = cells.loc[cells["speedup"].notna(), "op"]
    return cells[(cells["impl"] != baseline_name(cells)) & cells["op"].isin(set(rated))]


def baseline_name(cells: pd.DataFrame) -> str:
    """What the speedups of these cells compare with, or an empty text if there are none."""
    names = [name for name in cells["baseline"].unique() if name]
    return names[0] if names else ""
