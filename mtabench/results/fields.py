"""What any program may write into a field of a results file: each check gives the text as mtabench writes it.

A check raises ValueError with what it expects. Numbers are bounded, so that no sum, ratio or axis made of a few of them
overflows.
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Literal, NamedTuple

from mtabench.errors import UsageError
from mtabench.problem.operations import NORMS, gate_of, group_sizes, norm_of

Check = Callable[[str], str]

LEAST, MOST = 1e-100, 1e100

_COUNT = re.compile(r"(\d{1,12})(\.0*)?", re.ASCII)  # spreadsheets and pandas write 6 as 6.0
_QUANTITY = re.compile(r"\d{1,120}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_SHA = re.compile(r"[0-9a-f]{4,64}")


def count(text: str) -> str:
    """A whole number from 1 on."""
    match = _COUNT.fullmatch(text)
    if not match or not int(match[1]):
        raise ValueError("a whole number from 1 on, of at most 12 digits")
    return str(int(match[1]))


def quantity(text: str) -> str:
    """A number that is not negative, in decimal notation."""
    if not _QUANTITY.fullmatch(text) or not (LEAST <= float(text) <= MOST or float(text) == 0):
        raise ValueError(f"a number that is 0 or from {LEAST:g} to {MOST:g}, such as 1.25 or 3e-05")
    return text


def positive(text: str) -> str:
    """A quantity that is not 0."""
    if not _QUANTITY.fullmatch(text) or not LEAST <= float(text) <= MOST:
        raise ValueError(f"a number from {LEAST:g} to {MOST:g}, such as 1.25 or 3e-05")
    return text


def flag(text: str) -> str:
    """`true` or `false`, in any case: spreadsheets and pandas have their own."""
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower()


def splits(text: str) -> str:
    """A number of splits, or `auto`."""
    if text == "auto":
        return text
    try:
        return count(text)
    except ValueError as error:
        raise ValueError(f"auto, or {error}") from None


def time_utc(text: str) -> str:
    """A time in UTC."""
    try:
        if not _TIME.fullmatch(text):
            raise ValueError
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("a time in UTC such as 2026-01-02T03:04:05Z") from None
    return text


def revision(text: str) -> str:
    """A git revision in hexadecimal digits."""
    if not _SHA.fullmatch(text):
        raise ValueError("a git revision of hexadecimal digits")
    return text


def one_of(*words: str) -> Check:
    """The check for one of these words."""

    def check(text: str) -> str:
        if text not in words:
            raise ValueError(", ".join(words))
        return text

    return check


def optional(check: Check) -> Check:
    """The same check, which lets an empty field pass: unknown."""
    return lambda text: check(text) if text else ""


def typed(parse: Callable[[str], object], expected: str) -> Check:
    """The check for what an option takes that is parsed so."""

    def check(text: str) -> str:
        try:
            parse(text)
        except UsageError:
            raise ValueError(expected) from None
        return text.lower()

    return check


mix = typed(group_sizes, "heads, a number of heads a group, none, or two of these such as heads+4")
norm = typed(norm_of, NORMS.removeprefix("expected "))
gate = typed(gate_of, "one, full or none")


class Field(NamedTuple):
    """What a column may hold: its check (None: any text), and what its texts stand for.

    A `numeric` column is of floats in a frame, NaN where empty, and any other of texts.
    """

    check: Check | None = None
    numeric: bool = False
    kind: Literal["text", "number", "whole", "flag"] = "text"

    def value(self, text: str) -> str | int | float | bool | None:
        """A checked text as the value that it stands for, None where nothing is known."""
        if not text:
            return None
        if self.kind == "flag":
            return text == "true"
        if self.kind == "whole":
            return int(text)
        return float(text) if self.kind == "number" else text


TEXT = Field()
NUMBER = Field(optional(quantity), numeric=True, kind="number")
TIME_MS = Field(optional(positive), numeric=True, kind="number")
COUNT = Field(optional(count), numeric=True, kind="whole")
FLAG = Field(optional(flag), kind="flag")
