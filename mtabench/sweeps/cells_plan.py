"""The cells of a results file as those of a sweep; and the plan of any sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path

from mtabench import registry
from mtabench.errors import UsageError
from mtabench.problem import axes
from mtabench.problem.case import MODEL, MODES, Case
from mtabench.results.results_file import read_results
from mtabench.sweeps.measuring_options import check_measuring
from mtabench.sweeps.model_plan import find_model_baseline, make_model_plan
from mtabench.sweeps.plan import (
    Options,
    Plan,
    check_kv_heads,
    find_baseline,
    find_baseline_splits,
    make_plan,
    settle,
)

# Options that stand beside the cells of a file: which of its implementations, where and how they are measured.
BESIDE = (
    "pass_", "cells", "impl", "device", "baseline", "timer", "cache", "rounds", "time_limit", "target", "isolate",
    "cell_timeout", "seed",
)  # fmt: skip


def any_plan(options: Options, device: str | None = None) -> Plan:
    """The plan of a sweep: of the cells of a file if it names one, of models if `pass_` is MODEL, else of kernels.

    Raises UsageError as `make_plan`.
    """
    if options.cells is not None:
        return make_cells_plan(options, options.cells, device)
    return make_model_plan(options, device) if options.pass_ == MODEL else make_plan(options, device)


def make_cells_plan(options: Options, path: Path, device: str | None = None) -> Plan:
    """The cells of a results file, of this pass and of --impl if that is typed, to be measured here.

    Raises UsageError, in one sentence, for axes beside it, and for a file without such cells.
    """
    check_measuring(options)
    _check_beside(options, path)
    wanted = None if options.impl is None else axes.parse_names(options.impl, "--impl")
    found = _read(path, options.pass_, wanted)  # so that a slip is told before torch is imported to look for the device
    here = device is None
    options, device = settle(options, device)
    cases = tuple(replace(case, device=device) for case in found)
    measured = list(dict.fromkeys(case.impl for case in cases))
    if options.pass_ == MODEL:
        baseline, notes = find_model_baseline(options.baseline, measured)
        splits = None
    else:
        baseline, notes = find_baseline(options.baseline, cases, here)
        of_baseline = list(dict.fromkeys(case.splits for case in cases if case.impl == baseline))
        splits = find_baseline_splits(baseline, of_baseline or [None])
    return Plan(options.pass_, device, cases, baseline, splits, options, notes)


def _check_beside(options: Options, path: Path) -> None:
    """Raise UsageError if an axis is typed as well."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in BESIDE and field.default is not MISSING and value != field.default:
            name = field.name.replace("_", "-") if field.name != "causal" else "no-causal"
            raise UsageError(f"--cells {path} has the axes of its cells; leave out --{name}, or --cells")


def _read(path: Path, pass_: str, wanted: Sequence[str] | None) -> tuple[Case, ...]:
    """The cells of the file, for a CPU; those of a shape follow each other, as they take turns in the same rounds."""
    passes = MODES if pass_ == MODEL else (pass_,)
    rows = read_results(path).to_dict("records")
    cases = [Case.of_row({str(name): value for name, value in row.items()}, "cpu") for row in rows]
    of_pass = [case for case in cases if case.pass_ in passes]
    if not of_pass:
        others = list(dict.fromkeys(case.pass_ for case in cases))
        instead = MODEL if others[0] in MODES else others[0]
        raise UsageError(
            f"{path} has no cell of {pass_}, but of {', '.join(others)}; give mtabench {instead} --cells {path}"
        )
    known = list(dict.fromkeys(case.impl for case in of_pass))
    names = known if wanted is None else _named(path, known, wanted)
    _check_known(path, known, names)
    found = [case for case in of_pass if case.impl in names]
    for case in found:
        check_kv_heads(case.heads, case.kv_heads)
    shapes = dict.fromkeys(case.shape_key for case in found)
    return tuple(dict.fromkeys(case for shape in shapes for case in found if case.shape_key == shape))


def _named(path: Path, known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The implementations of the file that --impl names; raises UsageError if it has no cell of one, or of a group."""
    names: list[str] = []
    for one in wanted:
        found = [impl.name for impl in registry.chosen([one]) if impl.name in known]
        if not found:
            raise UsageError(f"{path} has no cell of --impl {one}; its cells are of {', '.join(known)}")
        names += found
    return names


def _check_known(path: Path, known: Sequence[str], names: Iterable[str]) -> None:
    """Raise UsageError for an implementation that is none here."""
    for name in names:
        if registry.is_known(name):
            continue
        here = ",".join(filter(registry.is_known, known))
        instead = f"give --impl {here}" if here else "name another file"
        if ":" in name:
            instead = f"name its file, as --impl ./{name.partition(':')[0]}.py:{name.partition(':')[2]}"
        raise UsageError(f"{path} has cells of {name}, which is no implementation here; {instead}")
