"""What the device can do at most, for the roofline and the memory limit: from the rows, or from ceilings.json.

A row's `fraction_of_roofline` is the larger of its `useful_tflops` over the matrix rate M and its `gbytes_s` over
the copy bandwidth C. So `useful_tflops / fraction_of_roofline` is the roof at the row's arithmetic intensity I, the
smaller of M and C * I: flat where M binds, proportional to I where C binds. Two rows of one run that differ in
intensity and have a roof of the same height therefore pin M, and two with the same `gbytes_s / fraction_of_roofline`
pin C. Rows of one intensity alone do not say which of the two binds, and pin neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from mtabench.charts.text import number

FILE_NAME = "ceilings.json"
SAME = 1e-4  # relative; rows have six digits
APART = 1.01  # intensities that differ


class Ceilings(NamedTuple):
    """Rates in TFLOP/s and GB/s, None where nothing is known, and for the caption where they come from."""

    matmul_tflops: float | None
    copy_gbytes_s: float | None
    note: str


def intensity(cells: pd.DataFrame) -> pd.Series:
    """Useful FLOPs over the fewest bytes that must move, in FLOP/byte."""
    return cells["useful_tflops"] / cells["gbytes_s"] * 1e3


def known_ceilings(cells: pd.DataFrame) -> Ceilings:
    """The ceilings of cells of one device and dtype.

    First what the rows of each run pin, of several runs the highest. What no run pins is looked up in `ceilings.json`
    beside the results, for the same driver and torch. Raises UsageError if that file is not one of ceilings.
    """
    pinned = [_pinned(run) for _, run in cells.groupby("run_id", sort=False)]
    rates: list[float | None] = []
    texts = []
    kept: list[tuple[float, float]] | None = None
    for index, (what, unit) in enumerate((("matrix products", "TFLOP/s"), ("copy bandwidth", "GB/s"))):
        source, found = "from the rows", [rate for rates_of_run in pinned if (rate := rates_of_run[index])]
        if not found:
            kept = _kept(cells) if kept is None else kept
            source, found = f"from {FILE_NAME}", [rates_of_place[index] for rates_of_place in kept]
        rates.append(max(found, default=None))
        texts.append(f"{what} {number(max(found))} {unit} {source}" if found else f"{what} unknown")
        if found and max(found) > 1.001 * min(found):
            texts[-1] += f" (of several runs, the least {number(min(found))})"
    if rates == [None, None]:
        return Ceilings(None, None, f"the device's ceilings are unknown: neither the rows nor a {FILE_NAME} tell them")
    return Ceilings(rates[0], rates[1], f"the device's measured ceilings: {'; '.join(texts)}")


def _pinned(run: pd.DataFrame) -> tuple[float | None, float | None]:
    """The matrix rate and the copy bandwidth that the rows of one run pin."""
    rows = run[run["fraction_of_roofline"].notna() & run["useful_tflops"].notna() & run["gbytes_s"].notna()]
    fraction, at = rows["fraction_of_roofline"], intensity(rows)
    return _level(rows["useful_tflops"] / fraction, at), _level(rows["gbytes_s"] / fraction, at)


def _level(heights: pd.Series, intensities: pd.Series) -> float | None:
    """The greatest height, if rows of different intensity have it."""
    top = heights >= heights.max() * (1 - SAME)
    if not top.any() or intensities[top].max() < APART * intensities[top].min():
        return None
    return float(np.median(heights[top]))


def _kept(cells: pd.DataFrame) -> list[tuple[float, float]]:
    """What `ceilings.json` beside the results says of the places where the cells were measured."""
    places = cells[["folder", "device", "driver", "torch", "dtype"]].drop_duplicates()
    found = []
    for folder, device, driver, torch, dtype in places.itertuples(index=False, name=None):
        path = Path(folder) / FILE_NAME
        if path.exists():
            from mtabench.measuring.kept_ceilings import read_ceilings  # here, because it loads torch

            kept = read_ceilings(path, {"device": device, "driver": driver, "torch": torch}).get(dtype)
            found += [(kept.matmul_tflops, kept.copy_gbytes_s)] if kept else []
    return found
