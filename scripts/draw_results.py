"""Draws the charts in results/ anew, as SVG: each from the committed file that its name begins with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from mtabench.charts import draw

RESULTS = Path(__file__).parents[1] / "results/nvidia-h200"
WHOLE = ("fwd", "bwd", "decode")  # of these files every kind of chart is drawn
SINGLE = {  # of these one, under another name than `mtabench plot` gives it
    "hopper-bwd": ("time", "bwd-time", "hopper-bwd-time"),
    "mta-mix-fwd": ("overhead", "fwd-overhead", "mta-mix-fwd-overhead"),
    "mta-all-fwd": ("overhead", "fwd-overhead", "mta-all-fwd-overhead"),
    "mta-all-bwd": ("overhead", "bwd-overhead", "mta-all-bwd-overhead"),
    "decode-splits": ("splits", "decode-splits", "decode-splits"),
    "ladder": ("ladder", "fwd-ladder", "ladder"),
    "model-1b-train": ("share", "train-share", "model-1b-train-share"),
    "model-300m-train": ("share", "train-share", "model-300m-train-share"),
    "model-1b-prefill": ("share", "prefill-share", "model-1b-prefill-share"),
}
DARK = {"fwd": "overhead"}  # the README's chart, which a dark page shows in dark colours


def drawn(folder: Path) -> Iterator[Path]:
    """Draw them into a folder, and give the path of each."""
    for name in WHOLE:
        yield from draw([RESULTS / f"{name}.csv"], folder, formats=["svg"])
    for name, kind in DARK.items():
        yield from draw([RESULTS / f"{name}.csv"], folder, [kind], ["dark"], ["svg"])
    for name, (kind, stem, better) in SINGLE.items():
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            for path in draw([RESULTS / f"{name}.csv"], aside, [kind], formats=["svg"]):
                assert path.stem == stem
                yield path.replace(folder / f"{better}{path.suffix}")


if __name__ == "__main__":
    from text_task import chart as text_task
    from toy_task import chart as toy_task

    toys = [path for name in ("toy-all", "mta-toy") for path in toy_task.draw_chart(RESULTS / f"{name}.csv")]
    for path in (*drawn(RESULTS), *toys, *text_task.draw_chart(RESULTS / "mta-text.csv")):
        print(path)
