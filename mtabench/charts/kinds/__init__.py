"""Kinds of chart, a file each: it is listed, drawn and in the help of `--kind` as soon as it stands here with a `KIND`.

A kind of the name `two-words` is the file `two_words.py`. Importing this package imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtabench.charts.chart import Kind


def load() -> dict[str, Kind]:
    """All kinds by name, in the order in which they are drawn."""
    modules = {path.stem: path for path in Path(__file__).parent.glob("[!_]*.py")}
    kinds = {name.replace("_", "-"): import_module(f"{__name__}.{name}").KIND for name in sorted(modules)}
    return dict(sorted(kinds.items(), key=lambda item: item[1].place))
