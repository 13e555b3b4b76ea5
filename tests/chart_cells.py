"""Results files written for the tests of the charts, and what stands on the figures that are drawn from them."""

from itertools import combinations

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from mtabench.charts import KINDS
from mtabench.charts.chart import make_figure
from mtabench.charts.data import read_cells, settings
from mtabench.charts.style import LIGHT, Look, applied, styles_of
from mtabench.results.columns import SCHEMA_VERSION
from mtabench.results.results_file import COLUMNS

DEFAULTS = {
    "schema_version": SCHEMA_VERSION, "run_id": "r1", "started_utc": "2026-01-02T03:04:05Z",
    "pass": "fwd", "dtype": "bf16", "batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 64,
    "causal": "true", "status": "ok", "cache": "cold", "device": "Test GPU", "driver": "1.2",
    "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0", "mtabench": "0.1.0",
    "git_sha": "abcdef0123456789", "git_dirty": "false",
}  # fmt: skip


def conv_cell(impl, seq, ms, *, speedup="", **more):
    more = {"conv_q": 6, "conv_k": 11, "baseline": "eager" if speedup else "", **more}
    return {**timed(ms), "op": "conv-attention", "impl": impl, "seq": seq, "speedup": speedup, **more}


def plain_cell(impl, seq, ms, **more):
    return {**timed(ms), "op": "attention", "impl": impl, "seq": seq, **more}


def timed(ms):
    return {"median_ms": ms, "p10_ms": 0.9 * ms, "p90_ms": 1.2 * ms} if ms else {}


def oom(impl, seq, **more):
    return conv_cell(impl, seq, None, status="oom", reason="it does not fit", **more)


def grid(speedups, **more):
    """Eager and triton at shapes given as (seq, head dim): speedup; eager takes 64 ms."""
    for (seq, head_dim), speedup in speedups.items():
        yield conv_cell("eager", seq, 64.0, speedup=1, head_dim=head_dim, **more)
        yield conv_cell("triton", seq, 64.0 / speedup, speedup=speedup, head_dim=head_dim, **more)


def write(path, cells):
    rows = [{**DEFAULTS, **cell} for cell in cells]
    pd.DataFrame(rows, columns=[*COLUMNS], dtype=object).to_csv(path, index=False)
    return path


def charts_of(cells, kind):
    """The charts of one kind that cells give, for their first pass."""
    of_pass = cells[cells["pass"] == cells["pass"].iloc[0]]
    return list(filter(None, (KINDS[kind].chart(setting) for _, setting in settings(of_pass))))


def figures(path, kind, theme=LIGHT):
    """The figures of the charts of one kind that a file gives."""
    cells = read_cells([path])
    look = Look(theme, styles_of(zip(cells["impl"], cells["op"] == "attention", strict=True)))
    with applied(theme):
        return [make_figure(chart, look) for chart in charts_of(cells, kind)]


def title_of(path, kind):
    """The title of the one chart of this kind, which takes a part of the time of its figure."""
    (chart,) = charts_of(read_cells([path]), kind)
    return typed(chart.title)


def figure(path, kind, theme=LIGHT):
    """The one figure of this kind."""
    (one,) = figures(path, kind, theme)
    return one


def typed(text):
    """A text in one line and as one would type it."""
    signs = {"\n": " ", "\N{NO-BREAK SPACE}": " ", "\N{MULTIPLICATION SIGN}": "x", "\N{DOWNWARDS ARROW}": "down"}
    return text.translate(str.maketrans(signs))


def said(artists):
    """What these texts say."""
    return [typed(artist.get_text()) for artist in artists]


def title(shown):
    """The figure's title."""
    return typed(shown.get_suptitle())


def texts(shown):
    """All texts on a figure that can be seen, without ticks' texts."""
    ticks = {id(label) for axes in shown.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()}
    found = (text for text in shown.findobj(Text) if text.get_visible() and text.get_text().strip())
    return [text for text in found if id(text) not in ticks and text.figure is not None]


def words(shown):
    """The texts on a figure as one."""
    return "\n".join(said(texts(shown)))


def lines(axes):
    """The lines of a panel by their label, as pairs of x and y."""
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def tick_labels(axis):
    """The labels of the ticks that can be seen."""
    low, high = sorted(axis.get_view_interval())
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for label in labels if label.get_visible() and label.get_text()]


def faults(shown):
    """What a person would see at once: texts that leave the figure, and texts that lie on one another."""
    renderer = FigureCanvasAgg(shown).get_renderer()
    visible = [axes for axes in shown.axes if axes.get_visible()]
    seen = texts(shown) + [
        label for axes in visible for axis in (axes.xaxis, axes.yaxis) for label in tick_labels(axis)
    ]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in seen]
    out = [
        f"{text!r} is cut off"
        for text, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > shown.bbox.width + 1 or box.y1 > shown.bbox.height + 1
    ]
    for (text, box), (other, other_box) in combinations(boxes, 2):
        width = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
        height = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
        if width > 1 and height > 1:
            out.append(f"{text!r} lies on {other!r}")
    return out
