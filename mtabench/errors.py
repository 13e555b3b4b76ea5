"""Errors that reach a person: one sentence each, and the exit code that goes with it.

Raised anywhere in the suite, turned into a message once, at the command-line boundary.
"""

import difflib
from collections.abc import Sequence


def near_names(typed: str, known: Sequence[str]) -> list[str]:
    """The names that may be meant: those that begin as typed, else those that are spelled much the same."""
    begin = [name for name in known if typed and name.startswith(typed.lower())]
    return begin[:3] or difflib.get_close_matches(typed.lower(), known, n=3, cutoff=0.65)


def hint_at(typed: str, known: Sequence[str], expected: str = "expected one of") -> str:
    """What a name that is not known may mean, or all that are known, as the end of a sentence."""
    near = near_names(typed, known)
    return f"did you mean {' or '.join(near)}?" if near else f"{expected} {', '.join(known)}"


def first_line(error: Exception) -> str:
    """The first line of an error's text; its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class MtabenchError(Exception):
    """Something a person can act on; `str(error)` is one sentence, `exit_code` ends the process."""

    exit_code = 1


class NothingTimedError(MtabenchError):
    """A sweep that ended without a single time: nothing can be compared with it."""

    exit_code = 5


class NothingCheckedError(MtabenchError):
    """A verification of which no check could run: it says nothing about any result."""

    exit_code = 5


class UnsupportedError(MtabenchError):
    """What an implementation cannot do, seen only when it was called: a cell without a time, and nothing wrong."""


class UsageError(MtabenchError):
    """Wrong usage: what was given, what is expected, what to type instead."""

    exit_code = 2
