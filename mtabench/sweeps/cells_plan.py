"""The cells of a results file as those of a sweep; and the plan of any sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from mtabench import registry
from mtabench.errors import UsageError
from mtabench.problem import axes
from mtabench.problem.case import MODEL, MODES, Case
from mtabench.results.results_file import read_results
from mtabench.sweeps.measuring_options import check_measuring
from mtabench.sweeps.model_plan import find_model_baseline, make_model_plan, settle_model
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
    "pass_", "cells", "impl", "device", "baseline", "timer", "cache", "rounds", "time_limit", "isolate", "cell_timeout",
    "seed",
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
    names = None if options.impl is None else axes.parse_names(options.impl, "--impl")
    wanted = None if names is None else [impl.name for impl in registry.chosen(names)]
    _read(path, options.pass_, wanted, "cpu")  # so that a slip is told before torch is imported to look for the device
    options, device = (settle_model if options.pass_ == MODEL else settle)(options, device)
    cases = _read(path, options.pass_, wanted, device)
    measured = list(dict.fromkeys(case.impl for case in cases))
    if options.pass_ == MODEL:
        baseline, notes = find_model_baseline(options.baseline, measured)
        splits = None
    else:
        baseline, notes = find_baseline(options.baseline, map(registry.implementation_of, cases))
        of_baseline = list(dict.fromkeys(case.splits for case in cases if case.impl == baseline))
        splits = find_baseline_splits(baseline, of_baseline or [None])
    shown = {
        "device": device, "cells of": str(path), "impl": ", ".join(measured),
        "seq": ", ".join(axes.short(seq) for seq in sorted({case.seq for case in cases})),
        "head dim": ", ".join(str(head_dim) for head_dim in sorted({case.head_dim for case in cases})),
        "dtype": ", ".join(dict.fromkeys(case.dtype for case in cases)),
    }  # fmt: skip
    return Plan(options.pass_, device, cases, baseline, splits, options, shown, notes)


def _check_beside(options: Options, path: Path) -> None:
    """Raise UsageError if an axis is typed as well."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in BESIDE and field.default is not MISSING and value != field.default:
            name = field.name.replace("_", "-") if field.name != "causal" else "no-causal"
            raise UsageError(f"--cells {path} has the axes of its cells; leave out --{name}, or --cells")


def _read(path: Path, pass_: str, wanted: Sequence[str] | None, device: str) -> tuple[Case, ...]:
    """The cells of the file; those of a shape follow each other, as they take turns in the same rounds."""
    passes = MODES if pass_ == MODEL else (pass_,)
    rows = read_results(path).to_dict("records")
    cases = [Case.of_row({str(name): value for name, value in row.items()}, device) for row in rows]
    of_pass = [case for case in cases if case.pass_ in passes]
    if not of_pass:
        others = list(dict.fromkeys(case.pass_ for case in cases))
        instead = MODEL if others[0] in MODES else others[0]
        raise UsageError(
            f"{path} has no cell of {pass_}, but of {', '.join(others)}; give mtabench {instead} --cells {path}"
        )
    known = list(dict.fromkeys(case.impl for case in of_pass))
    _check_names(path, known, wanted)
    found = [case for case in of_pass if wanted is None or case.impl in wanted]
    for case in found:
        check_kv_heads(case.heads, case.kv_heads)
    shapes = dict.fromkeys(case.shape_key for case in found)
    return tuple(dict.fromkeys(case for shape in shapes for case in found if case.shape_key == shape))


def _check_names(path: Path, known: Sequence[str], wanted: Iterable[str] | None) -> None:
    """Raise UsageError for an implementation that the file has no cell of, or for one of its that is none here."""
    for name in known if wanted is None else wanted:
        if name not in known:
            raise UsageError(f"{path} has no cell of --impl {name}; its cells are of {', '.join(known)}")
        if not registry.is_known(name):
            here = ",".join(filter(registry.is_known, known))
            instead = f"give --impl {here}" if here else "name another file"
            raise UsageError(f"{path} has cells of {name}, which is no implementation here; {instead}")
