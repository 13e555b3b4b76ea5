"""Sentences: counted things in them, and their lines for a terminal."""

import re
import textwrap

LEAST_WIDTH = 20  # below, words would stand alone


def wrapped(text: str, width: int, mark: str = "") -> list[str]:
    """Prose in lines that break between words, after `mark` and then as far to the right; 5 % and `a b` stay whole."""
    room = max(LEAST_WIDTH, width - len(mark))
    joined = re.sub(f" %|`[^`]{{,{room}}}`", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    found = textwrap.wrap(joined, room, break_on_hyphens=False, break_long_words=False)
    marks = [mark, *[" " * len(mark)] * len(found)]
    return [lead + line.replace("\N{NO-BREAK SPACE}", " ") for lead, line in zip(marks, found, strict=False)]


def plural(count: int, noun: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def all_or_one(count: int, noun: str) -> str:
    """`all 2 cells`, `1 cell`."""
    return f"{'' if count == 1 else 'all '}{plural(count, noun)}"
