"""The chart of the study: error on the toy task by letters of the query, and what convolutions win on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from low_rank_task.models import FULL, PLAIN, RANKS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from training_files import name_ends, named, save_chart

from mtabench.charts.labels import Named
from mtabench.charts.style import LIGHT, applied
from mtabench.styles import own_styles

_STYLES = own_styles()
STYLES = dict(
    zip(RANKS, (_STYLES[name] for name in ("sdpa-flash", "eager", "triton", "cuda-conv", "hopper")), strict=True)
)
TITLES = {rank: f"rank {rank}" for rank in RANKS} | {PLAIN: "plain", FULL: "full"}
SCORES = {"toy": "error_rate", "text": "held_out_loss"}


def best_curves(rows: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """The score by step of each rank, a column a seed, at the rate whose mean score is the least after the last step.

    `rows` are those of one task and query.
    """
    score = SCORES[rows["task"].iloc[0]]
    own = rows[rows["truncated"].isna()]
    last = own[own["step"] == own["step"].max()]
    best = last.groupby(["rank", "rate"])[score].mean().groupby("rank").idxmin()
    curves = {}
    for rank, rate in best:
        curves[rank] = own[(own["rank"] == rank) & (own["rate"] == rate)].pivot(
            index="step", columns="seed", values=score
        )
    return curves


def finding(curves: dict[int, pd.DataFrame]) -> str:
    """The mean error of each rank after the last step, in %."""
    shares = {rank: curve.iloc[-1].mean() * 100 for rank, curve in curves.items()}
    finals = (f"{TITLES[rank]} {share:.{0 if share >= 10 else 1}f}" for rank, share in shares.items())
    return f"Wrong answers in %: {', '.join(finals)}"


def draw_panel(axes: Axes, rows: pd.DataFrame) -> list[Named]:
    """Draw one task and query, on text how far from the plain model's of the same seed; the curves, to be named."""
    curves = best_curves(rows)
    is_toy, means = rows["task"].iloc[0] == "toy", []
    for rank, curve in curves.items():
        shown = curve * 100 if is_toy else curve - curves[PLAIN]
        look = {"color": STYLES[rank].colour, "linestyle": STYLES[rank].dashes}
        axes.plot(shown.index, shown, linewidth=0.7, alpha=0.6, **look)
        axes.plot(shown.index, shown.mean(axis=1), linewidth=2.0, **look)
        means.append(named(rank, TITLES[rank], shown.mean(axis=1)))
    if is_toy:
        axes.set_ylim(-2, 102)
    axes.set_xlabel("training step")
    axes.set_ylabel("wrong answers (%)" if is_toy else "held-out loss minus plain's (nats)")
    letters = rows["query"].iloc[0]
    axes.set_title(f"toy task, queries of {letters} letters" if is_toy else "language model", fontsize=8.5)
    axes.grid(axis="y", color=LIGHT.grid, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return means


def draw_chart(csv_path: Path) -> list[Path]:
    """Draw the results file, as PNG and SVG beside it; returns their paths."""
    rows = pd.read_csv(csv_path)
    panels = [part for _, part in rows.groupby(["task", "query"], sort=False)]
    run = rows.iloc[-1]
    texts: dict[str, Any] = {"x": 0.012, "ha": "left"}
    with applied(LIGHT):
        figure = Figure(figsize=(7.2, 0.9 + 2.6 * (len(panels) + 1 >> 1)), layout="constrained")
        grid = figure.subplots(len(panels) + 1 >> 1, min(2, len(panels)), squeeze=False).flat
        curves = {axes: draw_panel(axes, part) for axes, part in zip(grid, panels, strict=False)}
        for axes in list(grid)[len(panels) :]:
            axes.set_axis_off()
        figure.suptitle(finding(best_curves(panels[0])), fontsize=11, fontweight="bold", **texts)
        caption = (
            f"Convolutions of 6 x 11 taps, each rank at its best of the rates {', '.join(rates_of(rows))}; "
            f"thin: one of {rows['seed'].nunique()} seeds, bold: their mean\n"
            f"The title is of the first panel; {run['device']}, PyTorch {run['torch']}, commit {run['git_sha']}"
        )
        figure.supxlabel(caption, fontsize=7, color=LIGHT.quiet, linespacing=1.5, **texts)
        name_ends(figure, curves, STYLES)
        return save_chart(figure, csv_path)


def rates_of(rows: pd.DataFrame) -> list[str]:
    """The rates of the convolutions over the others', as texts."""
    return [f"{rate:g}" for rate in sorted(rows.loc[rows["rank"] != PLAIN, "rate"].unique())]
