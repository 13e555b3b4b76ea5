"""What the person reads on standard output: lines, numbers, and how wide a terminal is."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.status import Status

from mtabench.escaping import in_log, printable

PIPE_WIDTH = 160
SMALL_RATE = 1e-3  # TFLOP/s


class PipeTolerantWriter:
    """Standard output for a command that goes on when its reader is gone, as after `| head`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.is_broken = False

    def write(self, text: str) -> int:
        """As the file's."""
        with self._tolerant():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """As the file's."""
        with self._tolerant():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.is_broken = True
            _drop(self._file)

    def report(self, text: str) -> None:
        """Name on standard error, if the pipe is broken, where the output can be read."""
        if self.is_broken:
            try:
                print(f"mtabench: nobody read the output to its end; {text}", file=sys.stderr)
            except BrokenPipeError:  # as after `2>&1 | head`
                _drop(sys.stderr)


def _drop(file: TextIO) -> None:
    """Let what is written to a file from now on, or is still in its buffer, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def make_console(writer: PipeTolerantWriter | None = None, quiet: bool = False) -> Console:
    """A console as wide as the terminal; in a pipe or a log, wide enough for the table. `:ok:` in a name stays text."""
    options: dict[str, Any] = {"file": writer, "quiet": quiet, "emoji": False}
    console = Console(**options)
    return console if has_width(console) else Console(**options, width=PIPE_WIDTH)


def has_width(console: Console) -> bool:
    """Whether a person sees the width; a reader searches pipes and logs, so there sentences stay whole."""
    return console.is_terminal or "COLUMNS" in os.environ


def say(console: Console, text: str) -> None:
    """Lines as they are: paths are neither wrapped nor coloured, so that they can be copied.

    Nothing in them is obeyed by a terminal or by GitHub's runner.
    """
    shown = "\n".join(map(printable, text.split("\n")))
    console.print(in_log(shown), soft_wrap=True, markup=False, highlight=False, emoji=False)


@contextmanager
def warnings_at_end() -> Iterator[None]:
    """Within, warnings are kept, and printed on standard error at the end, once a line of code that warns.

    What is imported and called gives them amid a command's lines, and over the bar of a terminal.
    """
    kept: dict[str, dict[str, None]] = {}

    def keep(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        texts = kept.setdefault(f"{category.__name__} at {filename}, line {lineno}", {})
        texts[" ".join(str(message).split())] = None

    with warnings.catch_warnings():
        # Of PyTorch's thread for a backward, which sets the context itself then.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        warnings.showwarning = keep  # type: ignore[assignment]
        try:
            yield
        finally:
            for place, (first, *others) in kept.items():
                more = f" (and {len(others)} like it)" if others else ""
                print(in_log(printable(f"mtabench: {place}: {first}{more}")), file=sys.stderr)


def show_step(status: Status, line: str) -> None:
    """What a command works on: in its status on a terminal, as a line on standard error in a log."""
    if status.console.is_terminal:
        status.update(line)
    else:
        print(line, file=sys.stderr, flush=True)


def significant(value: float, digits: int = 4, *, zeros: bool = False) -> str:
    """A number with so many digits that count, with `zeros` also those at its end, and never in the form 1e+03."""
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".") if zeros else f"{value:.{digits}g}"


def flop_unit(tflops: Iterable[float]) -> tuple[str, float]:
    """The unit for rates given in TFLOP/s, and the factor to it: GFLOP/s if one would be less than a thousandth."""
    return ("GFLOP/s", 1e3) if min((rate for rate in tflops if rate), default=1.0) < SMALL_RATE else ("TFLOP/s", 1.0)
