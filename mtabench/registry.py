"""All implementations that `mtabench.implementations` holds: found by name and operation, in groups, and as a table.

One name stands for an implementation of several operations, an entry each: `eager` is the definition of any.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable

from mtabench import implementations
from mtabench.errors import UsageError
from mtabench.implementations import Implementation
from mtabench.problem.case import Case
from mtabench.static.sources import Source

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


def names() -> list[str]:
    """Names of all implementations, in order, each once."""
    return list(dict.fromkeys(implementation.name for implementation in IMPLEMENTATIONS))


def implementation_of(case: Case) -> Implementation:
    """The implementation of a case: of its name, and of its operation if there is one; raises UsageError as `find`."""
    entries = every(case.impl)
    return next((entry for entry in entries if entry.op == case.op), entries[0])


def find(name: str) -> Implementation:
    """The first implementation called `name`; raises UsageError with the nearest names if there is none."""
    return every(name)[0]


def every(name: str) -> list[Implementation]:
    """The implementations called `name`, one an operation; raises UsageError with the nearest names without any."""
    if entries := [implementation for implementation in IMPLEMENTATIONS if implementation.name == name]:
        return entries
    if name in GROUPS:
        raise UsageError(
            f"{name!r} stands for several implementations, and one is expected here: {', '.join(GROUPS[name])}"
        )
    near = _near(name, [*names(), *GROUPS])
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join([*names(), *GROUPS])}"
    raise UsageError(f"no implementation is called {name!r}; {hint} (`mtabench list` shows all)")


def _near(typed: str, known: list[str]) -> list[str]:
    """The names that may be meant: those that begin as typed, else those that are spelled much the same."""
    begin = [name for name in known if typed and name.startswith(typed.lower())]
    return begin[:3] or difflib.get_close_matches(typed.lower(), known, n=3, cutoff=0.6)


def chosen(typed: Iterable[str]) -> list[Implementation]:
    """The implementations that these names, of groups too, stand for, each once; raises UsageError as `find`."""
    single = [one for name in typed for one in GROUPS.get(name, (name,))]
    return [entry for name in dict.fromkeys(single) for entry in every(name)]


def splitting_names() -> list[str]:
    """Names of the implementations whose decode takes a number of splits."""
    return [implementation.name for implementation in IMPLEMENTATIONS if implementation.splits_used]


def default_names(pass_: str, device: str, ops: Iterable[str] = USUAL_OPS) -> list[str]:
    """What a sweep measures without --impl: whatever runs there, but for what is measured by name alone."""
    computed = set(ops)
    usual = (
        entry.name
        for entry in IMPLEMENTATIONS
        if pass_ in entry.passes and device in entry.devices and not entry.by_name and entry.op in computed
    )
    return list(dict.fromkeys(usual))


def sources() -> dict[str, Source]:
    """What `mtabench inspect` compiles, by name, in order."""
    found = {source for implementation in IMPLEMENTATIONS for source in implementation.sources}
    return {source.name: source for source in sorted(found, key=lambda source: (source.order, source.name))}
