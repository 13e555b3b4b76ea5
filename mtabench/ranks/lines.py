"""Rows of cells that ranks shared, in sentences. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mtabench.problem.axes import short


def rank_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line a row with a time: efficiency, and how its time compares with what the link allows."""
    lines = []
    for row in rows:
        if not row.get("ranks") or not row.get("median_ms"):
            continue
        ranks, median = int(row["ranks"]), float(row["median_ms"])
        bound, link = float(row["communication_ms"]), float(row["link_gbytes_s"])
        what = f"{row['impl']}, seq {short(int(row['seq']))}, {ranks} ranks"
        if row.get("efficiency"):
            alone = median * float(row["speedup"])
            told = f"{100 * float(row['efficiency']):.1f} % efficiency: {median:.4g} ms, and {alone:.4g} ms on one rank"
        else:
            told = f"{median:.4g} ms; one rank has no time to compare with"
        passed = bound * link / 1e3
        lines.append(
            f"{what}: {told}; a rank passes on {passed:.3g} GB, which takes {bound:.3g} ms "
            f"at the {link:.3g} GB/s measured between ranks"
        )
    return lines
