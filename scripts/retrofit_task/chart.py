"""The chart of a run: held-out loss against steps, and how far multi-token attention's is from plain attention's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from training_files import line_of, loss_panels, name_ends, save_chart

from mtabench.charts.panels import Line
from mtabench.charts.style import LIGHT, applied, own_styles

_STYLES = own_styles()
STYLES = {"plain": _STYLES["sdpa-flash"], "mta": _STYLES["triton"]}
TITLES = {"plain": "plain", "mta": "multi-token"}


def losses_of(rows: pd.DataFrame, attention: str) -> pd.DataFrame:
    """The held-out loss after each step of an attention's second training, a column a seed."""
    own = rows[(rows["phase"] == "finetune") & (rows["attention"] == attention)]
    return own.pivot(index="step", columns="seed", values="held_out_loss")


def finding(losses: dict[str, pd.DataFrame]) -> str:
    """One sentence: the mean losses before the first step and after the last."""
    plain, mta = (losses[name].mean(axis=1) for name in ("plain", "mta"))
    return (
        f"Held-out loss {plain.iloc[0]:.3f}; after {plain.index[-1]} steps {plain.iloc[-1]:.3f} plain, "
        f"{mta.iloc[-1]:.3f} with multi-token attention"
    )


def draw_chart(csv_path: Path) -> list[Path]:
    """Draw the curves of the results file, as PNG and SVG beside it; returns their paths."""
    rows = pd.read_csv(csv_path)
    losses, run = {name: losses_of(rows, name) for name in STYLES}, rows.iloc[-1]
    texts: dict[str, Any] = {"x": 0.012, "ha": "left"}
    with applied(LIGHT):
        figure = Figure(figsize=(7.2, 5.4), layout="constrained")
        upper, lower = loss_panels(figure)
        drawn = [(upper, name, table) for name, table in losses.items()]
        curves: dict[Axes, list[Line]] = {upper: [], lower: []}
        for axes, name, table in (*drawn, (lower, "mta", losses["mta"] - losses["plain"])):
            look = {"color": STYLES[name].colour, "linestyle": STYLES[name].dashes}
            axes.plot(table.index, table, linewidth=0.7, alpha=0.6, **look)
            axes.plot(table.index, table.mean(axis=1), linewidth=2.2, **look)
            curves[axes].append(line_of(name, TITLES[name], table.mean(axis=1)))
        upper.set(ylabel="held-out loss (nats a token)")
        lower.set(xlabel="training step after it was put in", ylabel="minus plain")
        lower.axhline(0, color=LIGHT.quiet, linewidth=0.6)
        figure.suptitle(finding(losses), fontsize=10.5, fontweight="bold", **texts)
        before = f", trained for {run['pretrain_steps']} steps before" if run["pretrain_steps"] else ""
        seeds = rows["seed"].nunique()
        lines = f"thin: one of {seeds} seeds, bold: their mean; " if seeds > 1 else ""
        caption = (
            f"Model {run['model']!r} of {run['layers']} layers, width {run['dim']}{before}; --parts {run['parts']} in "
            f"one layer of {run['every']}; {run['batch']} pieces of {run['seq']} tokens a step,\nthe same for both; "
            f"{lines}{run['device']}, PyTorch {run['torch']}, commit {run['git_sha']}"
        )
        figure.supxlabel(caption, fontsize=7, color=LIGHT.quiet, linespacing=1.5, **texts)
        name_ends(figure, curves, STYLES)
        return save_chart(figure, csv_path)
