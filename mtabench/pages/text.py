"""What comes from a results file, made fit for a page: printable, bounded, and never NaN."""

from __future__ import annotations

import math
from typing import Any

from mtabench.escaping import printable

MOST_CHARACTERS = 400


def shown_text(value: object, most: int = MOST_CHARACTERS) -> str:
    """A text on one line, cut after `most` characters; what is not printable is made visible."""
    text = "" if value is None else str(value)
    clean = printable(" ".join(text[: most + 1].split()))
    return f"{clean[: most - 1]}…" if len(clean) > most else clean


def shown_number(value: Any) -> float | int | None:
    """A number for JSON: whole numbers as such; None for what is empty, NaN or infinite."""
    if value is None or value == "":
        return None
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
