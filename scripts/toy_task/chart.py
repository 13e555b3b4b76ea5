"""The chart of a run: error against training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from toy_task.sequences import BLOCK
from toy_task.training import HELD_OUT, WATCHED
from training_files import line_of, name_ends, save_chart

from mtabench.charts.style import LIGHT, applied, own_styles

_STYLES = own_styles()
ATTENTIONS = {
    "conv": _STYLES["triton"], "plain": _STYLES["sdpa-flash"], "mta": _STYLES["hopper"], "mta-eager": _STYLES["eager"],
}  # fmt: skip


def finding(finals: pd.Series) -> str:
    """One sentence: the mean error rate of each attention."""
    shares = [f"{x * 100:.2g} %" if x < 0.1 else f"{x * 100:.0f} %" for x in finals]
    first, *others = finals.index
    words = [f"{title(first)[0].upper()}{title(first)[1:]} errs on {shares[0]} of sequences"]
    return ", ".join(words + [f"{title(name)} on {share}" for name, share in zip(others, shares[1:], strict=True)])


def title(name: str) -> str:
    """An attention in words."""
    return {"mta": "fused MTA", "mta-eager": "eager MTA"}.get(name, f"{name} attention")


def draw_chart(csv_path: Path) -> list[Path]:
    """Draw error against steps from the results file, as PNG and SVG beside it; returns their paths."""
    rows = pd.read_csv(csv_path)
    last = rows.drop_duplicates(["attention", "seed"], keep="last")
    finals = last.groupby("attention", sort=False)["error_rate"].mean()
    run = rows.iloc[-1]
    texts: dict[str, Any] = {"x": 0.012, "ha": "left"}
    with applied(LIGHT):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        curves = []
        for name in finals.index:
            errors = rows[rows["attention"] == name].pivot(index="step", columns="seed", values="error_rate") * 100
            look = {"color": ATTENTIONS[name].colour, "linestyle": ATTENTIONS[name].dashes}
            axes.plot(errors.index, errors, linewidth=0.7, alpha=0.6, **look)
            axes.plot(errors.index, errors.mean(axis=1), linewidth=2.4, **look)
            curves.append(line_of(name, title(name), errors.mean(axis=1)))
        axes.set(xlabel="training step", ylabel="wrong answers (% of held-out sequences)", ylim=(-2, 102))
        axes.grid(axis="y", color=LIGHT.grid, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(finding(finals), fontsize=12, fontweight="bold", **texts)
        caption = (
            f"Toy task of arXiv 2504.00927, answer: {run['variant']}; {run['blocks']} blocks of {BLOCK} letters; "
            f"{run['layers']} layers, width {run['width']}, {run['heads']} heads; batches of {run['batch']} sequences\n"
            f"thin: one of {rows['seed'].nunique()} seeds, bold: their mean; {WATCHED} held-out sequences, "
            f"{HELD_OUT} after the last step; {run['device']}, PyTorch {run['torch']}"
        )
        figure.supxlabel(caption, fontsize=7, color=LIGHT.quiet, linespacing=1.5, **texts)
        name_ends(figure, {axes: curves}, ATTENTIONS)
        return save_chart(figure, csv_path)
