"""A badge: the state of things in three words, for shields.io."""

from __future__ import annotations

from collections.abc import Mapping


def badge(counts: Mapping[str, int]) -> dict[str, object]:
    """The endpoint of shields.io (https://shields.io/badges/endpoint-badge) for the counts of the dashboard's data."""
    message, colour = ("nothing slower", "brightgreen") if counts["compared"] else ("nothing compared", "lightgrey")
    if counts["maybe_slower"]:
        message, colour = f"{counts['maybe_slower']} maybe slower", "yellow"
    if parts := [f"{counts[name]} {name}" for name in ("slower", "broken") if counts[name]]:
        message, colour = ", ".join(parts), "red"
    return {"schemaVersion": 1, "label": "performance", "message": message, "color": colour}
