"""How the process of a command ends: exit codes, errors as one sentence, Ctrl-C, a reader that is gone."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from select import POLLERR, poll
from typing import Any, NoReturn

import typer

from mtabench.errors import MtabenchError, UsageError
from mtabench.escaping import in_log, printable

# What a path may be that no check of an option foresaw: in a folder that this user may not enter, or too long.
UNREACHABLE = (errno.EACCES, errno.ENAMETOOLONG)
STOPPED = 130  # by Ctrl-C


def run_and_exit(command: Callable[[], Any]) -> NoReturn:
    """Run a Typer command, whose result is the exit code; an error that a person can act on is one sentence."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is shown as its number
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # not known, says whoever set it; Rich would print nothing at all
        del os.environ["COLUMNS"]
    with _noting_ctrl_c() as pressed:
        try:
            code = command()
            if sys.stdout is not None:
                sys.stdout.flush()
        except MtabenchError as error:
            _fail(str(error), error.exit_code)
        except typer.Abort:
            code = STOPPED
        except Exception as error:
            if pressed:
                code = STOPPED
            # Typer's own usage errors: which class they are depends on its version, what they offer does not.
            elif hasattr(error, "format_message"):
                _fail(_with_hint(error.format_message(), error), getattr(error, "exit_code", 2))
            elif isinstance(error, OSError) and (error.errno == errno.ENOSPC or _reader_is_gone(error)):
                code = _output_ended(error)
            elif isinstance(error, OSError) and error.errno in UNREACHABLE and error.filename:
                _fail(f"cannot reach {error.filename}: {error.strerror}; give another path", UsageError.exit_code)
            else:
                raise
    if code == STOPPED:
        _fail("stopped", STOPPED)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _noting_ctrl_c() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C was pressed.

    Torch and numpy swallow a KeyboardInterrupt in the middle of their imports, and break later in other ways.
    """
    pressed: list[int] = []
    usual = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    if usual is signal.default_int_handler:  # it is not where Ctrl-C is ignored, as by a shell's background jobs
        signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        if usual is signal.default_int_handler:
            signal.signal(signal.SIGINT, usual)


def _reader_is_gone(error: OSError) -> bool:
    """Whether the pipe that broke is standard output, and not one to a process or worker of our own."""
    if error.errno != errno.EPIPE or sys.stdout is None:
        return False
    ends = poll()
    ends.register(sys.stdout.fileno(), 0)
    return any(found & POLLERR for _, found in ends.poll(0))


def _output_ended(error: OSError) -> int:
    """Say that the disk below standard output is full; nothing if who read it, such as head, has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends, and says so
    if error.errno == errno.ENOSPC:
        _fail(f"cannot write {error.filename or 'the output'}: {error.strerror}", 1)
    return 1


def _with_hint(message: str, error: Exception) -> str:
    """Typer's message, and which help says what there is."""
    context = getattr(error, "ctx", None)
    path = context.command_path.removeprefix("mtabench").strip() if context else ""
    command = " ".join(filter(None, ("mtabench", path, "--help")))
    return f"{message.removesuffix('.')} (`{command}` shows what there is)"


def _fail(message: str, code: int) -> NoReturn:
    print(in_log(printable(f"mtabench: {' '.join(message.split())}")), file=sys.stderr)
    sys.exit(code)
