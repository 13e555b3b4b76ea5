"""Charts for an HTML page: each panel an SVG picture in light and dark, whose parts name the rows that they show."""

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import pandas as pd

from mtabench.charts import KINDS, charts_of
from mtabench.charts.chart import Chart, make_figure
from mtabench.charts.style import HTML, Look, applied, in_css, styles_of

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
FONT = "system-ui, 'DejaVu Sans', sans-serif"


def embedded_charts(cells: pd.DataFrame, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The charts of these kinds that `read_cells` of one file gives, in JSON's types.

    Of each its kind, title and caption, and of each panel the title and the picture. In a picture, `data-rows` of an
    element are the rows of the results file that it shows, and `data-row` the one.
    """
    look = Look(HTML, styles_of(zip(cells["impl"], cells["op"] == "attention", strict=True)))
    found: list[dict[str, Any]] = []
    for name in kinds:
        for stem, chart in charts_of(cells, name, KINDS[name]):
            caption = [" · ".join(parts) for parts in chart.caption]
            panels = [
                {"title": panel.title, "svg": _picture(chart, panel, look, f"{stem}-{number}")}
                for number, panel in enumerate(chart.panels)
            ]
            found.append({"kind": name, "title": chart.title, "caption": caption, "panels": panels})
    return found


def _picture(chart: Chart, panel: Any, look: Look, name: str) -> str:
    """One panel without its title. `name` keeps the names inside apart from those of other pictures on the page."""
    alone = replace(chart, title="", caption=[], panels=[panel])
    file = io.BytesIO()
    with applied(HTML), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        make_figure(alone, look).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for unwanted in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
        for parent in list(root.iter()):
            for child in parent.findall(unwanted):
                parent.remove(child)
    for element in root.iter():
        kind, *rows = element.get("id", "").split(" ")
        if kind not in ("rows", "points"):
            continue
        del element.attrib["id"]
        element.set("data-rows", " ".join(rows))
        if kind == "points":
            for use, row in zip(element.iter(f"{{{SVG}}}use"), rows, strict=True):
                use.set("data-row", row)
    for text in root.iter(f"{{{SVG}}}text"):
        text.set("style", text.get("style", "").replace("'DejaVu Sans'", FONT))
    root.attrib |= {"role": "img", "aria-label": panel.title}
    for size in ("width", "height"):
        del root.attrib[size]
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return in_css(ElementTree.tostring(root, encoding="unicode"))
