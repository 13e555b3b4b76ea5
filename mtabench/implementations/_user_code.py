"""Code of the person who measures: a function in a Python file.

A file is run where a person names it, by `load` alone. No name in a results file leads here.
"""

import difflib
import functools
import importlib
import importlib.util
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mtabench.errors import UsageError
from mtabench.implementations._own_settings import SideEffectError, own_settings

EXAMPLE = "--impl ./mine.py:attention"
MOST_OFFERED = 6
JUDGE = "mtabench.sweeps.sweep"  # with all that it imports: code that replaces some of it before would not be noticed

_REFERENCE = re.compile(r"(?:(?P<name>[^=/]*)=)?(?P<path>[^=]*?\.py)(?::(?P<attribute>.*))?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,79}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A function in a file, as typed: `[NAME=]PATH.py:FUNCTION`. `name` stands in results, charts and tables."""

    typed: str
    name: str
    path: Path
    attribute: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a reference leads to; `file` is where its code stands."""

    name: str
    typed: str
    value: Any
    file: Path
    module: ModuleType

    @property
    def words(self) -> str:
        """It for a person, in errors."""
        return f"--impl {self.typed}"

    def settings(self) -> AbstractContextManager[None]:
        """Within, the process has the settings of its module, which its functions share."""
        return own_settings(self.module.__name__)


def is_reference(text: str) -> bool:
    """Whether a text of --impl means a file, rather than a name that is known."""
    return "/" in text or "=" in text or ".py" in text


def parse_reference(text: str) -> Reference:
    """The reference in a text; raises UsageError for one that is none."""
    found = _REFERENCE.fullmatch(text)
    if not found:
        raise UsageError(f"--impl {text} names no function in a Python file; expected PATH.py:FUNCTION, as {EXAMPLE}")
    path = Path(found["path"])
    if not path.is_file():
        raise UsageError(f"--impl {text}: there is no file {path}; expected one with a function, as {EXAMPLE}")
    attribute = found["attribute"] or ""
    if not attribute:
        raise UsageError(f"--impl {text} names no function in {path}; type it behind a colon, as {EXAMPLE}")
    name = f"{path.stem}:{attribute}" if found["name"] is None else found["name"]
    check_name(name, f"--impl {text}", shlex.quote(f"my-kernel={found['path']}:{attribute}"))
    return Reference(text, name, path, attribute)


def check_name(name: str, given: str, instead: str) -> None:
    """Raise UsageError for a name that results, charts and command lines could not hold."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{given} would be called {name!r}; a name has letters, digits and _ . : + - alone, 80 at most: "
            f"give it another, as --impl {instead}"
        )


def load(reference: Reference) -> Loaded:
    """Run the file, once a process, and get the function; raises UsageError for what the person can mend."""
    module = _module_of(reference.path.resolve(), str(reference.path))
    value = getattr(module, reference.attribute, None)
    if value is None:
        raise UsageError(f"{reference.path} has no {reference.attribute}; {_offered(module, reference)}")
    return Loaded(reference.name, reference.typed, value, reference.path.resolve(), module)


def line_in(error: BaseException, file: Path) -> str:
    """Where an error came from in a person's own code, `mine.py, line 12`: the innermost place; else an empty text."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{Path(error.filename).name}, line {error.lineno}"
    return _place(traceback.extract_tb(error.__traceback__), file)


def was_raised_in(error: BaseException, file: Path) -> bool:
    """Whether a line of a person's own code raised an error, and none of what it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(_place(frames[-1:], file))


def _place(frames: Sequence[traceback.FrameSummary], file: Path) -> str:
    """The innermost of these frames that is in a person's own code, else an empty text."""
    own = []  # of that file, or of one beside it or below
    for frame in frames:
        path = Path(frame.filename)
        if path == file or (file.parent in path.parents and "site-packages" not in path.parts):
            own.append(frame)
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""


@functools.cache
def _module_of(file: Path, shown: str) -> ModuleType:
    """The module that a file makes. What lies beside the file can be imported by it, behind all that is installed."""
    name = f"mtabench_user_{re.sub(r'[^A-Za-z0-9_]', '_', file.stem)}"
    while name in sys.modules:
        name += "_"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module
    try:
        with _importing(name):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        where = line_in(error, file)
        raise UsageError(f"{shown} cannot be imported: {_text(error)}{f' ({where})' * bool(where)}") from error
    return module


@contextmanager
def _importing(module: str) -> Iterator[None]:
    """Within, code is imported. What it sets for the whole process holds for what is in the module alone."""
    import torch  # here, since the seconds that it takes are not the file's

    importlib.import_module(JUDGE)
    with own_settings(module), torch.set_grad_enabled(True):
        yield


def _text(error: BaseException) -> str:
    if isinstance(error, SideEffectError):
        return str(error)
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _offered(module: ModuleType, reference: Reference) -> str:
    """What to type instead of a name that is not there."""
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    near = difflib.get_close_matches(reference.attribute, own, n=1, cutoff=0.6)
    if near:
        return f"did you mean {reference.path}:{near[0]}?"
    return f"it defines {', '.join(own[:MOST_OFFERED])}" if own else "it defines no function"
