"""What comes from a results file, made fit for a page: printable and bounded."""

from __future__ import annotations

from mtabench.escaping import printable

MOST_CHARACTERS = 400


def shown_text(value: object, most: int = MOST_CHARACTERS) -> str:
    """A text on one line, cut after `most` characters; what is not printable is made visible."""
    text = "" if value is None else str(value)
    clean = printable(" ".join(text[: most + 1].split()))
    return f"{clean[: most - 1]}…" if len(clean) > most else clean
