"""What a cell is called whose implementation raised."""

import torch

from mtabench.errors import UnsupportedError
from mtabench.implementations._own_settings import SideEffectError

OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory")


class WrongResultError(Exception):
    """A result that is wrong, found while it was timed."""


def failure(error: BaseException) -> tuple[str, str]:
    """Status and reason of a cell whose implementation raised; a note of the error says where in a person's file."""
    text = str(error).strip()
    reason = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in text.lower() for words in OUT_OF_MEMORY_TEXTS
    ):
        return "oom", f"out of memory: {reason}"
    if isinstance(error, (WrongResultError, SideEffectError)):
        return "wrong", text
    if isinstance(error, TimeoutError):
        return "timeout", reason
    if isinstance(error, UnsupportedError):
        return "unsupported", text
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", [])[:1])
    return "error", (f"{type(error).__name__}: {reason}" if text else reason) + notes


def bare(error: Exception) -> Exception:
    """The exception without its tracebacks, whose frames would keep tensors alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
