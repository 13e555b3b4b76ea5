"""What goes into each chart: cells of results files sorted into settings, panels, lines and failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from mtabench.axes import short
from mtabench.errors import UsageError
from mtabench.results import KEY_COLUMNS, read_results

SETTING = ("device", "dtype", "heads", "kv_heads", "causal", "batch_name")
STATUS_WORDS = {"oom": "out of memory"}


@dataclass(frozen=True)
class Line:
    """One implementation in one panel: `y` from `low` to `high` at sequence lengths `x`, NaN where failed.

    Against splits: one sequence length at splits `x`, with the splits and the time of `auto` if they are known.
    """

    impl: str
    label: str
    yardstick: bool
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    auto: tuple[float, float] | None = None


@dataclass(frozen=True)
class Failure:
    """Neighbouring places on the x axis at which one line has no time, all for the same reason."""

    impl: str
    label: str
    word: str
    xs: tuple[int, ...]


@dataclass(frozen=True)
class Panel:
    """One head dim and convolution."""

    title: str
    lines: tuple[Line, ...]
    failures: tuple[Failure, ...]


def read_cells(csv_paths: Iterable[str | Path]) -> pd.DataFrame:
    """The cells of all files in one frame, as `read_results` gives them, each cell once: the latest.

    Raises UsageError where `read_results` does, or if there is no file.
    """
    frames = [read_results(path).assign(file=number) for number, path in enumerate(csv_paths)]
    if not frames:
        raise UsageError("no results file was given; expected at least one CSV file")
    frame = pd.concat(frames, ignore_index=True)
    latest = frame.sort_values("started_utc", kind="stable").drop_duplicates([*KEY_COLUMNS, "device"], keep="last")
    return latest.sort_index().reset_index(drop=True)


def settings(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Split the cells of one pass into what one chart can show, each with the end of its file's name."""
    if cells.empty:
        return
    parts = []
    for _, group in cells.groupby(list(SETTING[:-1]), sort=False):
        parts += [part.assign(batch_name=name) for name, part in _same_batch(group)]
    cells = pd.concat(parts)
    differing = [name for name in SETTING if cells[name].nunique() > 1]
    for values, group in cells.groupby(list(SETTING), sort=False):
        words = [_slug(name, value) for name, value in zip(SETTING, values, strict=True) if name in differing]
        yield "".join(f"-{word}" for word in words), group


def _slug(name: str, value: object) -> str:
    """A setting as part of a file name."""
    if name == "causal":
        return "causal" if value else "full"
    if name in ("heads", "kv_heads"):
        return f"{value:g}{name.replace('_', '')}"
    return "".join(c if c.isalnum() else "-" for c in str(value).lower().replace(" ", "")).strip("-")


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


def panels(cells: pd.DataFrame, speedup: bool) -> list[Panel]:
    """One panel a head dim and convolution, plain attention in each; `y` is in ms, or a ratio."""
    convolved = cells[cells["op"] != "attention"]
    own = convolved if len(convolved) else cells
    keys = sorted(set(own[["head_dim", "conv_q", "conv_k"]].fillna(0).itertuples(index=False, name=None)))
    return [_panel(cells, key, speedup) for key in keys]


def _panel(cells: pd.DataFrame, key: tuple, speedup: bool) -> Panel:
    head_dim, conv_q, conv_k = key
    conv = (cells["conv_q"].fillna(0) == conv_q) & (cells["conv_k"].fillna(0) == conv_k)
    mine = _one_splits(cells[(cells["head_dim"] == head_dim) & (conv | (cells["op"] == "attention"))])
    baseline = baseline_name(cells)
    base_rows = mine[(mine["impl"] == baseline) & (mine["status"] == "ok")]
    base_ms = base_rows.groupby(["batch", "seq"])["median_ms"].first()
    lines: list[Line] = []
    failures: list[Failure] = []
    for (impl, label), group in mine.groupby(["impl", "label"], sort=False):
        group = group.sort_values("seq")
        yardstick = bool((group["op"] == "attention").all())
        failures += _failures(str(impl), str(label), group, group["seq"])
        if (group["status"] == "ok").any():
            lines.append(_line(str(impl), str(label), yardstick, group, speedup, baseline, base_ms))
    return Panel(_title(head_dim, conv_q, conv_k), tuple(lines), tuple(failures))


def split_panels(cells: pd.DataFrame) -> list[Panel]:
    """One panel an implementation, head dim and convolution whose splits were swept; a line a sequence length."""
    swept = cells[cells["splits"] != ""].fillna({"conv_q": 0, "conv_k": 0})
    shown = []
    for _, group in swept.groupby(["head_dim", "conv_q", "conv_k", "impl"]):
        numbers = group[group["splits"] != "auto"]
        if numbers.loc[numbers["status"] == "ok", "splits"].nunique() < 2:
            continue
        lines: list[Line] = []
        failures: list[Failure] = []
        for seq in sorted(set(numbers["seq"])):
            line, failed = _split_line(f"seq {short(int(seq))}", group[group["seq"] == seq])
            lines.append(line)
            failures += failed
        first = group.iloc[0]
        title = f"{first['impl']}, {_title(first['head_dim'], first['conv_q'], first['conv_k'])}"
        shown.append(Panel(title, tuple(lines), tuple(failures)))
    return shown


def _split_line(label: str, cells: pd.DataFrame) -> tuple[Line, list[Failure]]:
    """The times of one sequence length against splits, and what failed."""
    auto = cells[(cells["splits"] == "auto") & (cells["splits_used"] != "") & (cells["status"] == "ok")]
    mark = (float(auto["splits_used"].iloc[0]), float(auto["median_ms"].iloc[0])) if len(auto) else None
    numbers = cells[cells["splits"] != "auto"]
    numbers = numbers.assign(x=numbers["splits"].astype(int)).sort_values("x")
    line = Line(label, label, False, numbers["x"].to_numpy(float), *_times(numbers), auto=mark)
    return line, list(_failures(label, label, numbers, numbers["x"]))


def _title(head_dim: float, conv_q: float, conv_k: float) -> str:
    return f"head dim {head_dim:g}" + (f", convolution {conv_q:g}x{conv_k:g}" if conv_q else ", plain attention")


def _one_splits(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of a panel, of each implementation those of one line: auto, or the fastest splits if it is missing.

    The column `label` names the implementation, and its splits unless auto chose them.
    """
    parts = []
    for impl, group in cells.groupby("impl", sort=False):
        splits, label = set(group["splits"]), str(impl)
        if "auto" in splits:
            group = group[group["splits"] == "auto"]
        elif len(splits) > 1:
            ranked = group.assign(failed=group["status"] != "ok").sort_values(["failed", "median_ms"], kind="stable")
            group, label = ranked.drop_duplicates(["batch", "seq"]).drop(columns="failed"), f"{impl}, best splits"
        elif splits != {""}:
            label = f"{impl}, splits {splits.pop()}"
        parts.append(group.assign(label=label))
    return pd.concat(parts)


def _line(
    impl: str,
    label: str,
    yardstick: bool,
    cells: pd.DataFrame,
    speedup: bool,
    baseline: str,
    base_ms: pd.Series,
) -> Line:
    """The line of one implementation; it breaks where a cell failed or has no baseline."""
    median, p10, p90 = _times(cells)
    y, low, high = median, p10, p90
    if speedup:
        # Plain attention is no rival and has no speedup in the file: its line is the ratio to this baseline.
        computed = base_ms.reindex(pd.MultiIndex.from_frame(cells[["batch", "seq"]])).to_numpy(float) / median
        rated = cells["speedup"].where(cells["status"] == "ok").to_numpy(float)
        y = computed if yardstick or impl == baseline else rated
        low, high = y * median / p90, y * median / p10
    if impl == baseline and speedup:
        label = f"{label} (the baseline)"
    if yardstick:
        label = f"{label} (plain attention)"
    return Line(impl, label, yardstick, cells["seq"].to_numpy(float), y, low, high)


def _times(cells: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median, 10th and 90th percentile in ms, NaN where a cell failed."""
    ok = cells["status"] == "ok"
    median, p10, p90 = (cells[name].where(ok).to_numpy(float) for name in ("median_ms", "p10_ms", "p90_ms"))
    return median, p10, p90


def _failures(impl: str, label: str, cells: pd.DataFrame, xs: pd.Series) -> Iterator[Failure]:
    """Runs of neighbouring cells with one and the same status other than ok."""
    rows = zip(cells["status"], xs, strict=True)
    for status, run in groupby(rows, key=lambda row: row[0]):
        if status != "ok":
            yield Failure(impl, label, STATUS_WORDS.get(status, status), tuple(int(x) for _, x in run))


def baseline_name(cells: pd.DataFrame) -> str:
    """What the speedups of these cells compare with, or an empty text if there are none."""
    names = [name for name in cells["baseline"].unique() if name]
    return names[0] if names else ""


def caption(cells: pd.DataFrame, length: int) -> str:
    """What was measured, where and with which versions, in lines of at most `length` characters."""
    heads = _texts(cells, "heads")
    if _texts(cells, "kv_heads") != heads:
        heads += f" query and {_texts(cells, 'kv_heads')} KV"
    setting = [
        _texts(cells, "dtype"),
        f"{heads} heads",
        cells["batch_name"].iloc[0].replace("tokens", "tokens a batch"),
    ]
    if (cells["pass"] != "decode").all():
        setting.append("causal" if cells["causal"].all() else "not causal")
    if (cells["cache"] != "").any():
        setting.append(f"{_texts(cells, 'cache')} cache")
    setting.append("medians, with bands from the 10th to the 90th percentile")
    versions = [f"{name} {_texts(cells, name)}" for name in ("driver", "cuda", "torch", "triton", "mtabench")]
    versions = [_texts(cells, "device"), *(text for text in versions if not text.endswith(" "))]
    revisions = [sha[:9] for sha in _texts(cells, "git_sha").split(", ") if sha]
    if revisions:
        changed = " with local changes" if (cells["git_dirty"] == "true").any() else ""
        versions.append(f"git {', '.join(revisions)}{changed}")
    paragraphs = [setting, versions]
    if (cells["op"] == "attention").any():
        paragraphs.insert(1, ["dashed grey: plain attention, which does less work; a yardstick, not a rival"])
    return "\n".join(line for paragraph in paragraphs for line in _lines(paragraph, length))


def _lines(parts: list[str], length: int) -> list[str]:
    """The parts set one after the other, in lines of at most `length` characters that break between parts."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > length:
            lines.append(part)
        else:
            lines[-1] += f" · {part}"
    return lines


def _texts(cells: pd.DataFrame, name: str) -> str:
    """The values of a column, joined: one where all rows agree."""
    values = dict.fromkeys(cells[name])
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values if value != "")
