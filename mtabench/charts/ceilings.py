"""What the device can do at most, for the roofline and the memory limit: from the rows, or from ceilings.json.

A row of decode, which only reads, names the bandwidth of reading: `read_gbytes_s`. In any other row,
`fraction_of_roofline` is the larger of two ratios: `useful_tflops` over the matrix rate M, and `gbytes_s` over the copy
bandwidth C. So it is in decode rows older than that column. So `useful_tflops / fraction_of_roofline` is the roof at
the row's arithmetic intensity I, the smaller of M and C * I. It is flat where M binds, proportional to I where C binds.
Two rows of one run with different intensities and equally high roofs therefore pin M. Two with the same `gbytes_s /
fraction_of_roofline` pin C. Rows of one intensity alone do not say which of the two binds, and pin neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from mtabench.charts.text import number
from mtabench.console import flop_unit
from mtabench.problem.case import CACHED_PASSES

if TYPE_CHECKING:
    from mtabench.measuring.ceilings import Ceilings

COPYING, READING = "copy bandwidth", "read bandwidth"
FILE_NAME = "ceilings.json"
SAME = 1e-4  # relative; rows have six digits
APART = 1.01  # intensities that differ


class Memory(NamedTuple):
    """The roof that memory sets: a rate in GB/s, None where it is unknown, and what it is the rate of."""

    gbytes_s: float | None
    name: str


class DrawnCeilings(NamedTuple):
    """Rates in TFLOP/s and GB/s, None where nothing is known, and for the caption where they come from."""

    matmul_tflops: float | None
    copy_gbytes_s: float | None
    read_gbytes_s: float | None
    note: str

    def memory(self, pass_: str) -> Memory:
        """The one that holds for cells of a pass: of reading for decode where that is known, else of a copy."""
        if pass_ in CACHED_PASSES and self.read_gbytes_s is not None:
            return Memory(self.read_gbytes_s, READING)
        return Memory(self.copy_gbytes_s, COPYING)


def intensity(cells: pd.DataFrame) -> pd.Series:
    """Useful FLOPs over the fewest bytes that must move, in FLOP/byte."""
    return cells["useful_tflops"] / cells["gbytes_s"] * 1e3


def known_ceilings(cells: pd.DataFrame) -> DrawnCeilings:
    """The ceilings of cells of one device and dtype, as far as they hold for these cells.

    The note has them in the unit that suits the cells' rates. First what the rows of each run say or pin, of several
    runs the highest. Rates that no run gives come from `ceilings.json` beside the results, for the same driver and
    torch. Raises UsageError if that file is not one of ceilings.
    """
    decode = cells["pass"].isin(CACHED_PASSES)
    read_rates = cells[decode].groupby("run_id", sort=False)["read_gbytes_s"].max().dropna().tolist()
    products = [_pinned(run, "useful_tflops") for _, run in cells.groupby("run_id", sort=False)]
    copying = cells[cells["read_gbytes_s"].isna()].groupby("run_id", sort=False)
    copies = [_pinned(run, "gbytes_s") for _, run in copying]
    kept = cache(lambda: _kept(cells))
    flops = flop_unit(cells["useful_tflops"].dropna())
    found = {
        "matmul_tflops": _rate("matrix products", flops, products, lambda: [one.matmul_tflops for one in kept()]),
        "copy_gbytes_s": _rate(COPYING, ("GB/s", 1.0), copies, lambda: [one.copy_gbytes_s for one in kept()]),
        "read_gbytes_s": _rate(READING, ("GB/s", 1.0), read_rates, lambda: [one.read_gbytes_s for one in kept()]),
    }
    if not decode.any() or found["read_gbytes_s"][0] is None:
        del found["read_gbytes_s"]
    elif decode.all():
        del found["copy_gbytes_s"]
    rates = {name: rate for name, (rate, _) in found.items()}
    note = f"the device's measured ceilings: {'; '.join(text for _, text in found.values())}"
    if not any(rates.values()):
        note = f"the device's ceilings are unknown: neither the rows nor a {FILE_NAME} tell them"
    elif decode.any() and rates.get("copy_gbytes_s") and "read_gbytes_s" not in rates:
        note += "; reading alone, which may be faster, was not measured"
    return DrawnCeilings(rates.get("matmul_tflops"), rates.get("copy_gbytes_s"), rates.get("read_gbytes_s"), note)


def _rate(
    what: str, shown: tuple[str, float], of_runs: Iterable[float | None], kept: Callable[[], Iterable[float | None]]
) -> tuple[float | None, str]:
    """The highest rate that a run gives, or else a kept one, and in words what it is and where it comes from.

    `shown` is the unit in the words, and the factor to it.
    """
    unit, factor = shown
    source, found = "from the rows", [rate for rate in of_runs if rate]
    if not found:
        source, found = f"from {FILE_NAME}", [rate for rate in kept() if rate]
    if not found:
        return None, f"{what} unknown"
    text = f"{what} {number(factor * max(found))} {unit} {source}"
    if max(found) > 1.001 * min(found):
        text += f" (of several runs, the least {number(factor * min(found))})"
    return max(found), text


def _pinned(run: pd.DataFrame, column: str) -> float | None:
    """The ceiling that the rows of one run pin: of matrix products by `useful_tflops`, of a copy by `gbytes_s`."""
    rows = run[run["fraction_of_roofline"].notna() & run["useful_tflops"].notna() & run["gbytes_s"].notna()]
    return _level(rows[column] / rows["fraction_of_roofline"], intensity(rows))


def _level(heights: pd.Series, intensities: pd.Series) -> float | None:
    """The greatest height, if rows of different intensity have it."""
    top = heights >= heights.max() * (1 - SAME)
    if not top.any() or intensities[top].max() < APART * intensities[top].min():
        return None
    return float(np.median(heights[top]))


def _kept(cells: pd.DataFrame) -> list[Ceilings]:
    """What `ceilings.json` beside the results says of the places where the cells were measured."""
    places = cells[["folder", "device", "driver", "torch", "dtype"]].drop_duplicates()
    found = []
    for folder, device, driver, torch, dtype in places.itertuples(index=False, name=None):
        path = Path(folder) / FILE_NAME
        if path.exists():
            from mtabench.measuring.ceilings import read_ceilings  # here, because it loads torch

            kept = read_ceilings(path, {"device": device, "driver": driver, "torch": torch}).get(dtype)
            found += [kept] if kept else []
    return found
