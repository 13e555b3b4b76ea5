"""Charts inside an HTML page: the lines of `mtabench plot`, in light and dark, whose parts name their rows."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from chart_cells import conv_cell, oom, plain_cell, write

from mtabench.charts.data import read_cells
from mtabench.charts.style import own_styles
from mtabench.report.data import SVG, embedded_charts

UNSETTLED = {"ci95_low_ms": 0.5, "ci95_high_ms": 9.0}


def pictures(tmp_path, cells, kinds=("time",)):
    return [
        ElementTree.fromstring(panel["svg"])
        for chart in embedded_charts(read_cells([write(tmp_path / "a.csv", cells)]), kinds)
        for panel in chart["panels"]
    ]


def points(picture):
    """The drawn points by row, as (x, y) in the picture."""
    uses = [use for use in picture.iter(f"{{{SVG}}}use") if "data-row" in use.attrib]
    return {int(use.get("data-row")): (float(use.get("x")), float(use.get("y"))) for use in uses}


@pytest.fixture
def sweep():
    """Eager fails at the second length and is hollow at the third; triton was measured in another order."""
    return [
        conv_cell("triton", 4096, 4.0), conv_cell("triton", 1024, 1.0), conv_cell("triton", 2048, 2.0),
        conv_cell("eager", 1024, 4.0), oom("eager", 2048), conv_cell("eager", 4096, 4.0, **UNSETTLED),
        plain_cell("sdpa-flash", 1024, 1.0),
    ]  # fmt: skip


def test_each_point_names_the_row_that_it_shows(tmp_path, sweep):
    (picture,) = pictures(tmp_path, sweep)
    found = points(picture)
    assert sorted(found) == [0, 1, 2, 3, 5, 6]
    across = {round(found[row][0], 1): sweep[row]["seq"] for row in found}
    assert [across[x] for x in sorted(across)] == [1024, 2048, 4096]
    assert found[0][1] == pytest.approx(found[3][1]) == pytest.approx(found[5][1])  # 4 ms
    assert found[1][1] == pytest.approx(found[6][1])  # 1 ms
    assert found[1][1] > found[2][1] > found[0][1]


def test_lines_bands_and_names_are_marked_with_the_rows_of_their_line(tmp_path, sweep):
    (picture,) = pictures(tmp_path, sweep)
    marked = [one for one in picture.iter() if one.get("data-rows") == "1 2 0"]
    assert len(marked) == 5  # band, intervals, line, name, and what leads to it
    assert "triton" in "".join(text for one in marked for text in one.itertext())


def test_colours_are_pairs_for_light_and_dark_and_texts_are_text(tmp_path, sweep):
    ((picture, *_),) = (pictures(tmp_path, sweep),)
    svg = ElementTree.tostring(picture, encoding="unicode")
    style = own_styles()["triton"]
    assert f"light-dark({style.colour}, {style.dark_colour})" in svg
    assert not re.search(r"#00[0-9a-f]{4}(?!\w)", re.sub(r"light-dark\([^)]*\)", "", svg))
    assert re.search(r"<(\w+:)?text[^>]*>eager<", svg)
    assert not list(picture.iter(f"{{{SVG}}}style"))  # it would hold for the whole page


def test_names_of_a_stranger_are_text(tmp_path):
    name = "</svg><script>alert(1)</script>"
    (picture,) = pictures(tmp_path, [conv_cell(name, 1024, 1.0)])
    assert not list(picture.iter(f"{{{SVG}}}script"))
    assert "script" in "".join(picture.itertext())
