"""The command `mtabench inspect`: what to compile, for which targets, and what to say of it."""

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mtabench.console import make_console, say, show_step
from mtabench.errors import MtabenchError, UsageError
from mtabench.problem import axes
from mtabench.prose import plural
from mtabench.results.outputs import check_outputs, write_text
from mtabench.static import records
from mtabench.static.compiling import inspect, short_name
from mtabench.static.limits import DEFAULT_TARGETS, TARGETS, Limits, limits_of
from mtabench.static.plans import SOURCES
from mtabench.static.records import DOES_NOT_FIT, FAILED, SKIPPED, Inspection, Kernel
from mtabench.static.shapes import ALL_SHAPES, Shape, chosen_shapes
from mtabench.tables import Cell, Column, as_columns, numbered, print_columns, print_prose

NOT_COMPARABLE = 5
LEGEND = (
    "spill: bytes that a thread's spill instructions store+load. shared: KiB a block. blocks, occ.: what an SM holds "
    "at once, and its share of the warps that fit there. limited by: what leaves no room for one more block."
)
RESOURCES = ("kernel", "warps", "stages", "regs", "spill", "shared", "blocks", "occ.", "limited by")
LEFT = ("kernel", "limited by")


def run(
    target: str | None, kernel: str | None, shape_options: Mapping[str, Any], all_shapes: bool, baseline: Path | None,
    accept: bool, json_file: Path | None, overwrite: bool = False,
) -> int:  # fmt: skip
    """Compile and show, or compare with a baseline; the exit code. What was compiled is written to `json_file`.

    With a baseline, compiles its targets and shapes, as far as the options do not narrow them. `accept` writes the
    results into the baseline. Exit codes: 0; 1 if a kernel got worse; 5 if nothing can be compared, or other compilers
    made the baseline.
    """
    base = None if baseline is None else records.read_json(baseline)
    if json_file is not None:
        check_outputs({"--json-file": json_file}, [baseline] if baseline else [], overwrite)
    if accept and (
        baseline is None or all_shapes or target or kernel or any(value is not None for value in shape_options.values())
    ):
        raise UsageError("--accept replaces a whole baseline: it needs --baseline FILE, and no target, kernel or shape")
    names = tuple(map(short_name, axes.parse_names(kernel, "--kernel"))) if kernel is not None else ()
    targets = _targets(target, base)
    shapes = chosen_shapes(shape_options, base.shapes if base else ALL_SHAPES if all_shapes else None)
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
    comparison = records.compare(base, found, {limits.target for limits in targets}, names)
    for verdict in (records.WORSE, records.SKIP, records.NEW, records.BETTER):
        for finding in comparison.findings:
            if finding.verdict == verdict:
                say(console, f"{verdict}: {finding.line}")
    return _accept(console, found, baseline) if accept else _gate(console, comparison, baseline)


def _targets(text: str | None, base: Inspection | None) -> list[Limits]:
    """The targets that the option names, else the baseline's, else the default ones."""
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
    """The results of compiling, with a line on standard error for each shape of a target as it ends."""
    total = len(targets) * len(shapes)
    done = 0

    def progress(limits: Limits, shape: Shape, kernels: Sequence[Kernel]) -> None:
        nonlocal done
        done += 1
        show_step(status, f"[{done}/{total}] {limits.target}: {shape.name}: {plural(len(kernels), 'kernel')}")

    with Console(stderr=True).status(f"[0/{total}] compiling") as status:
        return inspect(targets, shapes, SOURCES, names=names, progress=progress)


def _show(console: Console, found: Inspection, targets: Sequence[Limits]) -> None:
    for title, columns, reasons in _tables(found.kernels, targets):
        print_prose(console, title, style="bold")
        print_columns(console, columns)
        console.print()
        for mark, reason in reasons:
            print_prose(console, reason, f"{mark} ")
    print_prose(console, LEGEND)
    say(console, _summary(found.kernels))


def _gate(console: Console, found: records.KernelComparison, path: Path) -> int:
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


def _tables(
    kernels: Iterable[Kernel], limits: Sequence[Limits]
) -> Iterator[tuple[str, list[Column], list[tuple[str, str]]]]:
    """For each target and shape a title, its table, and reasons with their marks."""
    by_target = {limit.target: limit for limit in limits}
    for (target, shape), group in groupby(kernels, key=lambda kernel: (kernel.target, kernel.shape)):
        rows = list(group)
        limit = by_target[target]
        title = (
            f"{target}: {shape} ({limit.gpu.removeprefix('NVIDIA ')}: {limit.warps_per_sm} warps, "
            f"{limit.shared_per_sm // 1024} KiB an SM, {limit.shared_per_block // 1024} KiB a block)"
        )
        marks = numbered(row.reason for row in rows)
        yield title, _resources(rows, marks), [(mark, reason) for reason, mark in marks.items()]


def _summary(kernels: Sequence[Kernel]) -> str:
    """How many kernels there are, and how many of them have which problem."""
    counts = {
        "spilling": sum(bool(kernel.spill_bytes) for kernel in kernels),
        "not fitting": sum(kernel.status == DOES_NOT_FIT for kernel in kernels),
        "failed": sum(kernel.status == FAILED for kernel in kernels),
        "skipped": sum(kernel.status == SKIPPED for kernel in kernels),
    }
    return f"kernels: {len(kernels)}" + "".join(f", {what}: {count}" for what, count in counts.items())


def _resources(rows: Sequence[Kernel], marks: Mapping[str, str]) -> list[Column]:
    lines: list[list[Cell]] = []
    for row in rows:
        mark = f" {marks[row.reason]}" if row.reason else ""
        if row.registers is None:
            lines.append([row.kernel, *[""] * (len(RESOURCES) - 2), Text(f"{row.status}{mark}", style="bold red")])
            continue
        spills = f"{row.spill_store_bytes}+{row.spill_load_bytes}" if row.spill_bytes else "0"
        fits = row.status != DOES_NOT_FIT
        lines.append(
            [
                row.kernel,
                f"{row.warps}",
                "" if row.stages is None else f"{row.stages}",
                f"{row.registers}",
                Text(spills, style="bold yellow" if row.spill_bytes else ""),
                f"{(row.shared_bytes or 0) / 1024:.1f}",
                f"{row.blocks_per_sm}",
                f"{row.occupancy:.0%}",
                row.limited_by if fits else Text(f"does not fit{mark}", style="bold red"),
            ]
        )
    return as_columns(RESOURCES, lines, LEFT)
