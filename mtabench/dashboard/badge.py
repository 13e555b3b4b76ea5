"""A badge: the state of things in three words, for shields.io."""

from __future__ import annotations

from collections.abc import Mapping


def badge(counts: Mapping[str, int]) -> dict[str, object]:
    """The endpoint of shields.io (https://shields.io/badges/endpoint-badge) for the counts of the dashboard's data."""
    message, colour = _message(counts)
    return {"schemaVersion": 1, "label": "performance", "message": message, "color": colour}


def _message(counts: Mapping[str, int]) -> tuple[str, str]:
    parts = [f"{counts[name]} {name}" for name in ("slower", "broken") if counts[name]]
    if parts:
        return ", ".join(parts), "red"
    if counts["maybe_slower"]:
        return f"{counts['maybe_slower']} maybe slower", "yellow"
    return ("nothing slower", "brightgreen") if counts["compared"] else ("nothing compared", "lightgrey")
