"""All implementations that `mtabench.implementations` holds: found by name and operation, in groups, and as a table.

One name stands for an implementation of several operations, an entry each: `eager` is the definition of any. Beside
them is what a person has: functions in files. `chosen` loads what --impl names of these; nothing else loads any, so
that no name in a results file runs code.
"""

import faulthandler
import importlib
import pkgutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mtabench import implementations
from mtabench.errors import UsageError, hint_at
from mtabench.implementations import Implementation
from mtabench.implementations._user_code import Loaded, is_reference, load, parse_reference
from mtabench.implementations._user_kernels import implementation_from
from mtabench.problem.axes import parse_names
from mtabench.problem.case import Case

BASELINE = "eager"
USUAL_OPS = ("conv-attention", "attention")  # of a sweep that names none


def _found() -> tuple[Implementation, ...]:
    """The entries of all files of the folder, in order."""
    files = [file.name for file in pkgutil.iter_modules(implementations.__path__) if not file.name.startswith("_")]
    modules = [importlib.import_module(f"{implementations.__name__}.{name}") for name in files]
    entries = [entry for module in modules for entry in module.ENTRIES]
    return tuple(sorted(entries, key=lambda entry: (entry.order, entry.name)))


IMPLEMENTATIONS = _found()
# Names of --impl that stand for several.
GROUPS = {
    group: tuple(dict.fromkeys(entry.name for entry in IMPLEMENTATIONS if group in entry.groups))
    for group in dict.fromkeys(group for entry in IMPLEMENTATIONS for group in entry.groups)
}
# What --impl loaded in this process, by name.
_LOADED: dict[str, tuple[Loaded, Implementation]] = {}


def names() -> list[str]:
    """Names of all implementations, in order, each once."""
    return list(dict.fromkeys(implementation.name for implementation in IMPLEMENTATIONS))


def model_names() -> list[str]:
    """Names of those that whole models run with, in order, each once."""
    return list(dict.fromkeys(one.name for one in IMPLEMENTATIONS if one.of_models))


def implementation_of(case: Case) -> Implementation:
    """The implementation of a case: of its name, and of its operation if there is one; raises UsageError as `find`."""
    entries = every(case.impl)
    entries = [entry for entry in entries if entry.of_models == (case.layers is not None)] or entries
    return next((entry for entry in entries if entry.op == case.op), entries[0])


def find(name: str) -> Implementation:
    """The first implementation called `name`; raises UsageError with the nearest names if there is none."""
    return every(name)[0]


def every(name: str) -> list[Implementation]:
    """The implementations called `name`, one an operation; raises UsageError with the nearest names without any."""
    if entries := [implementation for implementation in IMPLEMENTATIONS if implementation.name == name]:
        return entries
    if name in _LOADED:
        return [_LOADED[name][1]]
    if ":" in name:
        raise UsageError(f"{name!r} is a function of a file; give its path as well, as --impl ./mine.py:attention")
    if name in GROUPS:
        raise UsageError(
            f"{name!r} stands for several implementations, and one is expected here: {', '.join(GROUPS[name])}"
        )
    hint = hint_at(name, [*names(), *GROUPS])
    raise UsageError(f"no implementation is called {name!r}; {hint} (`mtabench list` shows all)")


def is_known(name: str) -> bool:
    """Whether an implementation has this name here; a results file may be of another version, or of a person's file."""
    return name in _LOADED or name in names()


def chosen(typed: Iterable[str]) -> list[Implementation]:
    """The implementations that these names, of groups too, stand for, each once; raises UsageError as `find`.

    A text such as `./mine.py:attention` runs that file.
    """
    single = [one for name in typed for one in GROUPS.get(name, (name,))]
    if any(map(is_reference, single)) and not faulthandler.is_enabled():
        with suppress(Exception):  # without a file behind stderr
            faulthandler.enable(all_threads=False)  # a crash says at which line of a file
    return [entry for name in dict.fromkeys(map(name_of, single)) for entry in every(name)]


def name_of(typed: str) -> str:
    """The name of an implementation as typed; loads it if a file has it. Raises UsageError."""
    if not is_reference(typed):
        return typed
    reference = parse_reference(typed)
    if reference.name in (*names(), *GROUPS):
        raise UsageError(f"--impl {typed}: {reference.name} is one of mtabench's own names; choose another")
    return _keep(load(reference))


def _keep(loaded: Loaded) -> str:
    """Have the registry find what was loaded; its name. Raises UsageError if another has it already."""
    known = _LOADED.get(loaded.name)
    if known is None:
        _LOADED[loaded.name] = loaded, implementation_from(loaded)
    elif known[0].value is not loaded.value:
        raise UsageError(
            f"two functions would be called {loaded.name}, {known[0].typed} and {loaded.typed}; "
            f"name one of them, as --impl other={loaded.typed.rpartition('=')[2]}"
        )
    return loaded.name


def load_again(typed: str | None) -> None:
    """In another process of a sweep: load what its --impl loads, if anything; raises UsageError as `chosen`."""
    for text in parse_names(typed, "--impl") if typed else ():
        name_of(text)


def typed_as(name: str) -> str:
    """What to type for an implementation of this name: the path of a loaded function, else the name."""
    return _LOADED[name][0].typed if name in _LOADED else name


def loaded_files() -> list[Path]:
    """The files of what --impl loaded in this process."""
    return [loaded.file for loaded, _ in _LOADED.values()]


def default_names(pass_: str, device: str, ops: Iterable[str] = USUAL_OPS) -> list[str]:
    """What a sweep measures without --impl: whatever runs there, but for what is measured by name alone."""
    computed = set(ops)
    usual = (
        entry.name
        for entry in IMPLEMENTATIONS
        if pass_ in entry.passes and device in entry.devices and not entry.by_name and entry.op in computed
    )
    return list(dict.fromkeys(usual))


def libraries(pass_: str, device: str, op: str) -> list[Implementation]:
    """Other projects' kernels of an operation, the best first, by-name kernels later, kernels storing scores last."""
    found = (
        entry
        for entry in IMPLEMENTATIONS
        if entry.yardstick and entry.op == op and pass_ in entry.passes and device in entry.devices
    )
    return sorted(found, key=lambda entry: (entry.work == "dense", entry.by_name, -entry.order))
