"""The command `mtabench inspect`: what to compile, for which targets, and what to say of it."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mtabench.console import make_console, say, show_step
from mtabench.errors import MtabenchError, UsageError
from mtabench.problem import axes
from mtabench.prose import plural
from mtabench.results.outputs import check_outputs, write_text
from mtabench.static import baseline as comparing
from mtabench.static import records, runs, tables
from mtabench.static.compiling import short_name
from mtabench.static.limits import DEFAULT_TARGETS, TARGETS, Limits, limits_of
from mtabench.static.plans import SOURCES
from mtabench.static.records import Inspection, Kernel
from mtabench.static.shapes import ALL_SHAPES, Shape, chosen_shapes
from mtabench.tables import print_columns, print_prose

NOT_COMPARABLE = 5


def run(
    target: str | None, kernel: str | None, asked: Mapping[str, Any], all_shapes: bool, baseline: Path | None,
    accept: bool, json_file: Path | None, overwrite: bool = False,
) -> int:  # fmt: skip
    """Compile and show, or compare with a baseline; the exit code. What was compiled is written to `json_file`.

    With a baseline its targets and shapes are what is compiled, as far as the options do not narrow them, and `accept`
    writes what came of it into the baseline.
    Exit codes: 0; 1 if a kernel got worse; 5 if nothing can be compared, or other compilers made the baseline.
    """
    base = None if baseline is None else records.read_json(baseline)
    if json_file is not None:
        check_outputs({"--json-file": json_file}, [baseline] if baseline else [], overwrite)
    if accept and (
        baseline is None or all_shapes or target or kernel or any(value is not None for value in asked.values())
    ):
        raise UsageError("--accept replaces a whole baseline: it needs --baseline FILE, and no target, kernel or shape")
    names = tuple(map(short_name, axes.parse_names(kernel, "--kernel"))) if kernel is not None else ()
    targets = _targets(target, base)
    shapes = chosen_shapes(asked, base.shapes if base else ALL_SHAPES if all_shapes else None)
    if importlib.util.find_spec("triton") is None:
        raise MtabenchError(
            "inspect compiles with Triton, which is not installed: pip install triton (it is for Linux)"
        )
    found = _compiled(targets, shapes, names)
    for name in names:
        if found.launched and not any(name in launched for launched in found.launched):
            raise UsageError(
                f"--kernel {name!r} is part of no name of a kernel that is launched for these targets and shapes; "
                f"there are {', '.join(found.launched)}"
            )
    if json_file is not None:
        write_text(json_file, records.json_text(found))
    console = make_console()
    if base is None or baseline is None:
        _show(console, found, targets)
        return 0
    comparison = comparing.compare(base, found, {limits.target for limits in targets}, names)
    _show_findings(console, comparison)
    return _accept(console, found, baseline) if accept else _gate(console, comparison, baseline)


def _targets(text: str | None, base: Inspection | None) -> list[Limits]:
    """Those asked for, else those of the baseline, else the default ones."""
    if text is not None:
        names: Sequence[str] = TARGETS if text == "all" else axes.parse_names(text, "--target")
    elif base is not None:
        names = [name for name in TARGETS if name in {kernel.target for kernel in base.kernels}]
    else:
        names = DEFAULT_TARGETS
    found = list(dict.fromkeys(map(limits_of, names)))
    if not found:
        raise UsageError(f"the baseline has no kernel for a target that is known; known are {', '.join(TARGETS)}")
    return found


def _compiled(targets: Sequence[Limits], shapes: Sequence[Shape], names: Sequence[str]) -> Inspection:
    """What came of compiling, with a line on standard error for each shape of a target as it ends."""
    total = len(targets) * len(shapes)
    done = 0

    def progress(limits: Limits, shape: Shape, kernels: Sequence[Kernel]) -> None:
        nonlocal done
        done += 1
        show_step(status, f"[{done}/{total}] {limits.target}: {shape.name}: {plural(len(kernels), 'kernel')}")

    with Console(stderr=True).status(f"[0/{total}] compiling") as status:
        return runs.inspect(targets, shapes, SOURCES, names=names, progress=progress)


def _show(console: Console, found: Inspection, targets: Sequence[Limits]) -> None:
    for title, columns, reasons in tables.tables(found.kernels, targets):
        print_prose(console, title, style="bold")
        print_columns(console, columns)
        console.print()
        for mark, reason in reasons:
            print_prose(console, reason, f"{mark} ")
    print_prose(console, tables.LEGEND)
    say(console, tables.summary(found.kernels))


def _show_findings(console: Console, found: comparing.KernelComparison) -> None:
    for verdict in (comparing.WORSE, comparing.SKIP, comparing.NEW, comparing.BETTER):
        for finding in found.findings:
            if finding.verdict == verdict:
                say(console, f"{verdict}: {finding.line}")


def _gate(console: Console, found: comparing.KernelComparison, path: Path) -> int:
    """Say what came of it, and how to accept it."""
    accept = f"to accept what is there now: mtabench inspect --baseline {path} --accept"
    if found.toolchains:
        say(
            console,
            f"not gated: these kernels were compiled with {found.toolchains}, so a change may be the compiler's; "
            f"look at the lines above, if there are any, and {accept}",
        )
        return NOT_COMPARABLE
    if found.worse:
        say(
            console,
            f"{found.worse} for the worse among {plural(found.common, 'kernel')} compared with {path}; {accept}",
        )
        return 1
    if not found.common:
        say(console, f"nothing could be compared: {path} has none of these kernels; {accept}")
        return NOT_COMPARABLE
    say(console, f"kernels as good as in {path}, or better: {found.common}")
    return 0


def _accept(console: Console, found: Inspection, path: Path) -> int:
    """Write the baseline; raises MtabenchError where it would lose kernels that cannot be compiled here."""
    for row in found.kernels:
        if row.status == records.SKIPPED:
            raise MtabenchError(f"{path} is left as it is: {row.kernel} cannot be compiled here: {row.reason}")
    write_text(path, records.json_text(found))
    say(console, f"kernels that {path} holds now: {len(found.kernels)}")
    return 0
