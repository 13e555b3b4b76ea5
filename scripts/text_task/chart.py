"""The chart of a run: loss against training steps, and how far each curve is from the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from training_files import line_of, loss_panels, name_ends, save_chart

from mtabench.charts.style import LIGHT, SPARE_STYLES, applied, own_styles

_STYLES = own_styles()
STYLES = {"reference": _STYLES["eager"], "triton": _STYLES["triton"], "float32": SPARE_STYLES[0]}
TITLES = {"reference": "eager", "triton": "fused, by Triton", "float32": "eager in float32"}


def losses_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The loss of each step, a column a run, in the order of the file."""
    return rows.pivot(index="step", columns="backend", values="loss")[list(rows["backend"].unique())]


def finding(losses: pd.DataFrame) -> str:
    """One sentence: the mean loss of the last tenth of the steps."""
    last = losses.tail(max(1, len(losses) // 10)).mean()
    words = [f"{last[name]:.3f} {TITLES.get(name, name)}" for name in losses]
    return f"Loss of the last {max(1, len(losses) // 10)} steps: {'; '.join(words)}"


def draw_chart(csv_path: Path) -> list[Path]:
    """Draw the curves of the results file, as PNG and SVG beside it; returns their paths."""
    rows = pd.read_csv(csv_path)
    losses, run = losses_of(rows), rows.iloc[-1]
    first, *others = losses
    texts: dict[str, Any] = {"x": 0.012, "ha": "left"}
    with applied(LIGHT):
        figure = Figure(figsize=(7.2, 5.4), layout="constrained")
        upper, lower = loss_panels(figure)
        for name in losses:
            colour = STYLES[name].colour
            wide = {"linewidth": 3.6, "alpha": 0.45} if name == first else {"linewidth": 1.2}
            upper.plot(losses.index, losses[name], color=colour, **wide)
            if name in others:
                lower.plot(losses.index, losses[name] - losses[first], linewidth=1.0, color=colour)
        upper.set(ylabel="loss (nats a byte)")
        lower.set(xlabel="training step", ylabel=f"minus {TITLES[first]}")
        lower.axhline(0, color=LIGHT.quiet, linewidth=0.6)
        figure.suptitle(finding(losses), fontsize=11, fontweight="bold", **texts)
        caption = (
            f"A byte model of {run['layers']} layers with multi-token attention, width {run['dim']}, {run['heads']} "
            f"heads; {run['batch']} pieces of {run['seq']} bytes a step\nof this repository's text, the same for all; "
            f"{run['device']}, PyTorch {run['torch']}, commit {run['git_sha']}"
        )
        figure.supxlabel(caption, fontsize=7, color=LIGHT.quiet, linespacing=1.5, **texts)
        apart = [line_of(name, TITLES[name], losses[name] - losses[first]) for name in others]
        name_ends(
            figure, {upper: [line_of(name, TITLES[name], losses[name]) for name in losses], lower: apart}, STYLES
        )  # fmt: skip
        return save_chart(figure, csv_path)
