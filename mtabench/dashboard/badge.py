"""A badge: the state of things in three words, for shields.io and as a picture of our own."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from mtabench.palette import BADGE

LABEL = "performance"
COLOURS = {  # by shields.io's names
    "red": BADGE["bad"], "yellow": BADGE["warn"], "brightgreen": BADGE["good"], "lightgrey": BADGE["quiet"],
}  # fmt: skip
CHARACTER, MARGIN, HEIGHT = 6.6, 6, 20  # pixels; of DejaVu Sans at 11, a little more than usual
SVG = f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{{width}}" height="{HEIGHT}" role="img" aria-label="{{name}}">\
<title>{{name}}</title><clipPath id="round"><rect width="{{width}}" height="{HEIGHT}" rx="3" /></clipPath>\
<g clip-path="url(#round)">{{rects}}</g>\
<g fill="{BADGE["text"]}" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" \
text-anchor="middle">{{texts}}</g>\
</svg>
"""


def badge(counts: Mapping[str, int]) -> dict[str, object]:
    """The endpoint of shields.io (https://shields.io/badges/endpoint-badge) for the counts of the dashboard's data."""
    message, colour = _message(counts)
    return {"schemaVersion": 1, "label": LABEL, "message": message, "color": colour}


def badge_svg(counts: Mapping[str, int]) -> str:
    """The same as a small picture."""
    message, colour = _message(counts)
    left, right = (round(len(text) * CHARACTER + 2 * MARGIN) for text in (LABEL, message))
    parts = ((0, left, BADGE["label"], LABEL), (left, right, COLOURS[colour], message))
    rects = "".join(f'<rect x="{x}" width="{width}" height="{HEIGHT}" fill="{fill}" />' for x, width, fill, _ in parts)
    texts = "".join(
        f'<text x="{x + width / 2:g}" y="14" textLength="{width - 2 * MARGIN}">{escape(text)}</text>'
        for x, width, _, text in parts
    )
    return SVG.format(width=left + right, name=escape(f"{LABEL}: {message}"), rects=rects, texts=texts)


def _message(counts: Mapping[str, int]) -> tuple[str, str]:
    parts = [f"{counts[name]} {name}" for name in ("slower", "broken") if counts[name]]
    if parts:
        return ", ".join(parts), "red"
    if counts["maybe_slower"]:
        return f"{counts['maybe_slower']} maybe slower", "yellow"
    return ("nothing slower", "brightgreen") if counts["compared"] else ("nothing compared", "lightgrey")
