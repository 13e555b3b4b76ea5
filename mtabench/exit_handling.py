"""How the process of a command ends: exit codes, errors as one sentence, Ctrl-C or SIGTERM, a reader that is gone."""

import errno
import getpass
import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from select import POLLERR, poll
from typing import Any, NoReturn

from mtabench.errors import MtabenchError, UsageError
from mtabench.escaping import in_log, printable
from mtabench.prose import wrapped

# What a path may be that no check of an option foresaw: in a folder that this user may not enter, or too long.
UNREACHABLE = (errno.EACCES, errno.ENAMETOOLONG)
STOPPED = 130  # by Ctrl-C, SIGTERM or SIGHUP
JUDGES = ("ab", "compare", "inspect", "verify")  # their exit codes say what they found, once they have ended


def _name_the_account() -> None:
    """Give an account without a name or a home, as containers have them, what PyTorch and Triton look for."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # which of them depends on Python's version
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = os.path.join(tempfile.gettempdir(), f"home-{os.getuid()}")


def run_and_exit(command: Callable[[], Any]) -> NoReturn:
    """Run a Typer command, whose result is the exit code; an error that a person can act on is one sentence."""
    for name in ("stdout", "stderr"):  # closed, as by `>&-`: the next file that is opened would take its place
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is shown as its number
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # 0 means not known; Rich would print nothing at all
        del os.environ["COLUMNS"]
    os.environ["MPLBACKEND"] = "agg"  # a notebook's backend is not installed here, and nothing is shown on a screen
    _name_the_account()
    with _noting_stops() as stops:
        try:
            code = command()
            if sys.stdout is not None:
                sys.stdout.flush()
        except MtabenchError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            code = STOPPED
        except SystemExit as end:
            # Without a reader, Rich raises it for a BrokenPipeError, and Typer wraps standard output.
            if not isinstance(end.__context__, BrokenPipeError) and type(sys.stdout).__name__ != "PacifyFlushWrapper":
                raise
            code = _unread()
        except Exception as error:
            if stops or type(error).__name__ == "Abort":  # Typer's, of a KeyboardInterrupt
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
def _noting_stops() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C was pressed, or SIGTERM or SIGHUP came, which are taken as Ctrl-C.

    Torch and numpy swallow a KeyboardInterrupt in the middle of their imports, and break later in other ways.
    """
    stops: list[int] = []

    def handle(number: int, frame: object) -> None:
        stops.append(number)
        raise KeyboardInterrupt

    # They are others where a signal is ignored, as Ctrl-C by a shell's background jobs.
    usual = {
        signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL
    }  # fmt: skip
    taken = {number: was for number, was in usual.items() if signal.getsignal(number) is was}
    for number in taken:
        signal.signal(number, handle)
    try:
        yield stops
    finally:
        for number, was in taken.items():
            signal.signal(number, was)


def _reader_is_gone(error: OSError) -> bool:
    """Whether the pipe that broke is standard output, and not one to a process or worker of our own."""
    if error.errno != errno.EPIPE or sys.stdout is None:
        return False
    ends = poll()
    ends.register(sys.stdout.fileno(), 0)
    return any(found & POLLERR for _, found in ends.poll(0))


def _output_ended(error: OSError) -> int:
    """Report that the disk below standard output is full; nothing if its reader, such as head, has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends, and says so
    if error.errno == errno.ENOSPC:
        _fail(f"cannot write {error.filename or 'the output'}: {error.strerror}", 1)
    return _unread()


def _unread() -> int:
    """The exit code of a command whose reader is gone: no error, unless the command judges results."""
    return int(any(word in JUDGES for word in sys.argv[1:2]))


def _with_hint(message: str, error: Exception) -> str:
    """Typer's message, and which help says what there is."""
    context = getattr(error, "ctx", None)
    path = context.command_path.removeprefix("mtabench").strip() if context else ""
    command = " ".join(filter(None, ("mtabench", path, "--help")))
    return f"{message.removesuffix('.')} (`{command}` shows what there is)"


def _fail(message: str, code: int) -> NoReturn:
    text = printable(f"mtabench: {' '.join(message.split())}")
    if sys.stderr is not None and sys.stderr.isatty():
        text = "\n".join(wrapped(text, shutil.get_terminal_size().columns))
    print(in_log(text), file=sys.stderr)
    sys.exit(code)
