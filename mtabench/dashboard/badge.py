"""A badge: the state of things in three words, for shields.io and as a picture of our own."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping

from mtabench.palette import BADGE

LABEL = "performance"
COLOURS = {  # by shields.io's names
    "red": BADGE["bad"], "yellow": BADGE["warn"], "brightgreen": BADGE["good"], "lightgrey": BADGE["quiet"],
}  # fmt: skip
CHARACTER, MARGIN, HEIGHT = 6.6, 6, 20  # pixels; of DejaVu Sans at 11, a little more than usual


def badge(counts: Mapping[str, int]) -> dict[str, object]:
    """The endpoint of shields.io (https://shields.io/badges/endpoint-badge) for the counts of the dashboard's data."""
    message, colour = _message(counts)
    return {"schemaVersion": 1, "label": LABEL, "message": message, "color": colour}


def badge_svg(counts: Mapping[str, int]) -> str:
    """The same as a small picture."""
    message, colour = _message(counts)
    left, right = (round(len(text) * CHARACTER + 2 * MARGIN) for text in (LABEL, message))
    attributes = {"width": f"{left + right}", "height": f"{HEIGHT}", "role": "img", "aria-label": f"{LABEL}: {message}"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **attributes})
    ElementTree.SubElement(root, "title").text = f"{LABEL}: {message}"
    clip = ElementTree.SubElement(root, "clipPath", {"id": "round"})
    ElementTree.SubElement(clip, "rect", {"width": f"{left + right}", "height": f"{HEIGHT}", "rx": "3"})
    parts = ElementTree.SubElement(root, "g", {"clip-path": "url(#round)"})
    for x, width, fill in ((0, left, BADGE["label"]), (left, right, COLOURS[colour])):
        ElementTree.SubElement(parts, "rect", {"x": f"{x}", "width": f"{width}", "height": f"{HEIGHT}", "fill": fill})
    style = {"font-family": "Verdana,DejaVu Sans,sans-serif", "font-size": "11", "text-anchor": "middle"}
    texts = ElementTree.SubElement(root, "g", {"fill": BADGE["text"], **style})
    for middle, width, text in ((left / 2, left, LABEL), (left + right / 2, right, message)):
        place = {"x": f"{middle:g}", "y": "14", "textLength": f"{width - 2 * MARGIN}"}
        ElementTree.SubElement(texts, "text", place).text = text
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _message(counts: Mapping[str, int]) -> tuple[str, str]:
    parts = [f"{counts[name]} {name}" for name in ("slower", "broken") if counts[name]]
    if parts:
        return ", ".join(parts), "red"
    if counts["maybe_slower"]:
        return f"{counts['maybe_slower']} maybe slower", "yellow"
    return ("nothing slower", "brightgreen") if counts["compared"] else ("nothing compared", "lightgrey")
