"""The command `mtabench verify`: check results, and time nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from mtabench.checking.verify import DTYPES_CHECKED, CheckFilter, CheckRow, count_checks, run_checks
from mtabench.commands import WRONG_RESULT
from mtabench.console import has_width, say, warnings_at_end
from mtabench.environment import let_triton_interpret, resolve_device
from mtabench.errors import NothingCheckedError, UsageError
from mtabench.escaping import printable
from mtabench.json_output import others_to_stderr, print_json
from mtabench.problem import axes
from mtabench.problem.operations import PLAIN
from mtabench.prose import all_or_one, plural
from mtabench.registry import chosen, every, names
from mtabench.sweeps.measuring_options import check_seed
from mtabench.sweeps.plan import CONV_NONE, Options, check_op, is_mta, parse_head_dims
from mtabench.tables import print_lines, print_prose

NOTHING = (
    "nothing was checked: no implementation that was asked for can run here; "
    "--head-dim, --kv-heads, --seq and --causal choose shapes"
)
CHECK_LINE = "{:<17} {:<24} {:<36} {:>8} {:>8}  {}"
NARROW_LINE = "  {:<24} {:>8} {:>8}  "  # below the name and the shape, on a terminal without room for a CHECK_LINE
WIDE = 104
AMOUNT = re.compile(r"(?<=off by )[^\s;,]+|(?<=allowed is )[^\s;,]+|\S+(?= % too)")  # the same fault has many


def run(options: Options, causal: bool | None, as_json: bool) -> int:
    """Check implementations and print a line a check, as it ends; WRONG_RESULT if any result is wrong.

    `causal` is that of all shapes, or None for that of each.

    Raises UsageError for options that do not fit, and NothingCheckedError where none could run.
    """
    if as_json:
        with others_to_stderr():
            device, seed, _, found = _checking(options, causal)
            rows = list(found)
        return _print_json(rows, device, seed)
    console, (_, seed, planned, found) = Console(), _checking(options, causal)
    if planned.interpreted:
        checks = plural(planned.interpreted, "check")
        print_prose(console, f"Triton's interpreter on the CPU runs {checks}, which takes minutes")
    lines = _Lines(console)
    with warnings_at_end(), console.status("") as status:
        for row in found:
            lines.add(row)
            status.update(f"{lines.total} of {planned.checks} checks")
    if not lines.total:
        raise NothingCheckedError(NOTHING)
    lines.add_counts()
    said = (
        f"{lines.wrong} of {lines.total} checks failed" if lines.wrong else f"{all_or_one(lines.total, 'check')} passed"
    )
    print_prose(console, f"{said}; --seed {seed} draws the same inputs again")
    return WRONG_RESULT * (lines.wrong > 0)


class _Lines:
    """A line a check, below a line of names. What is wrong with many is said once, with a mark."""

    def __init__(self, console: Console) -> None:
        self.total = self.wrong = 0
        self._console, self._above = console, ""
        self._narrow = has_width(console) and console.width < WIDE
        self._faults: dict[str, list[str]] = {}  # the reasons of failed checks, by what is left without amounts
        if self._narrow:
            say(console, NARROW_LINE.format("check", "error", "allowed") + "result")
        else:
            say(console, CHECK_LINE.format("name", "check", "shape", "error", "allowed", "result"))

    def add(self, row: CheckRow) -> None:
        if not row.shape:
            print_prose(self._console, f"not checked: {row.reason}", f"{row.implementation:<17} ")
            return
        self.total += 1
        self.wrong += not row.ok
        error, allowed = ("" if x is None else f"{x:.2g}" for x in (row.rel_error, row.tolerance))
        result = row.reason or "ok" if row.ok else self._fault(row.reason)
        style = "" if row.ok else "bold red"
        if self._narrow:
            above = f"{row.implementation}, {row.shape}"
            if above != self._above:
                print_prose(self._console, above, style="bold")
            self._above = above
            print_prose(self._console, result, NARROW_LINE.format(row.check, error, allowed), style)
        else:
            text = CHECK_LINE.format(row.implementation, row.check, row.shape, error, allowed, result)
            print_lines(self._console, [Text(printable(text), style)])

    def _fault(self, reason: str) -> str:
        """The reason, or its mark if it was said before."""
        fault = AMOUNT.sub("", reason)
        known = fault in self._faults
        self._faults.setdefault(fault, []).append(reason)
        mark = f"[{list(self._faults).index(fault) + 1}]"
        return f"wrong: {mark}" if known else f"wrong: {mark} {reason}"

    def add_counts(self) -> None:
        """How many checks failed for each reason that several had, with the least and the most of its amounts."""
        for number, reasons in enumerate(self._faults.values(), start=1):
            if len(reasons) > 1:
                print_prose(self._console, f"{len(reasons)} checks: {_spanned(reasons)}", f"[{number}] ")


def _spanned(reasons: Sequence[str]) -> str:
    """Reasons that differ only in their amounts as one."""
    spans = []
    for amounts in zip(*map(AMOUNT.findall, reasons), strict=True):
        ordered = sorted(set(amounts), key=float)
        spans.append(" to ".join(dict.fromkeys((ordered[0], ordered[-1]))))
    spelled = iter(spans)
    return AMOUNT.sub(lambda _: next(spelled), reasons[0])


class _Planned(NamedTuple):
    """How many checks there are, at most, and how many of them run in Triton's interpreter."""

    checks: int
    interpreted: int


def _checking(options: Options, causal: bool | None) -> tuple[str, int, _Planned, Iterator[CheckRow]]:
    """The device, the seed, and the checks that were asked for, which are made as they are taken."""
    impl, dtype, seed, asked = options.impl, options.dtype, check_seed(options.seed), _asked(options, causal)
    where = resolve_device(options.device)
    let_triton_interpret(where)
    entries = chosen(names() if impl is None else axes.parse_names(impl, "--impl"))
    wanted = list(dict.fromkeys(entry.name for entry in entries))
    for name in wanted if impl is not None and asked.op is not None else ():
        if asked.op not in (computed := [entry.op for entry in every(name)]):
            raise UsageError(
                f"--op {asked.op} excludes {name}, which computes {' and '.join(computed)}; drop one of them"
            )
    dtypes = None if dtype is None else axes.parse_dtypes(dtype)
    checked = DTYPES_CHECKED[where]
    for name in dtypes or ():
        if name not in checked:
            raise UsageError(f"--dtype {name} is not checked on {where}; expected one or more of {', '.join(checked)}")
    slow = [name for name in wanted if where == "cpu" and any(entry.interpreted for entry in every(name))]
    planned = _Planned(*(count_checks(names, where, dtypes, asked) for names in (wanted, slow)))
    return where, seed, planned, run_checks(wanted, where, seed, dtypes, asked)


def _asked(options: Options, causal: bool | None) -> CheckFilter:
    """The operations and shapes that are to be checked; raises UsageError as a sweep does for steps that do not fit."""
    check_op(options.op)
    whole = is_mta(options)
    if options.op == PLAIN and options.conv is not None:
        raise UsageError(f"--conv {options.conv} is no step of --op {PLAIN}; leave one of them out")
    convs = None if options.conv is None else axes.parse_optional_convs(options.conv, "--conv")
    if None in (convs or ()) and not whole:
        raise UsageError(CONV_NONE)
    return CheckFilter(
        options.op,
        convs,
        None if options.mix is None else axes.parse_mixes(options.mix),
        None if options.post_conv is None else axes.parse_optional_convs(options.post_conv, "--post-conv"),
        None if options.norm is None else axes.parse_norms(options.norm),
        None if options.gate is None else axes.parse_gates(options.gate),
        None if options.head_dim is None else parse_head_dims(options.head_dim),
        None if options.kv_heads is None else axes.parse_ints(options.kv_heads, "--kv-heads"),
        None if options.seq is None else axes.parse_ints(options.seq, "--seq"),
        causal,
    )


def _print_json(rows: Sequence[CheckRow], device: str, seed: int) -> int:
    """Print what `run` prints, for programs, and return what it returns."""
    checks = [asdict(row) | {"reason": row.reason or None} for row in rows if row.shape]
    others = [{"implementation": row.implementation, "reason": row.reason} for row in rows if not row.shape]
    failed = sum(not row.ok for row in rows if row.shape)
    print_json("verify", {"device": device, "seed": seed, "failed": failed, "checks": checks, "not_checked": others})
    if not checks:
        raise NothingCheckedError(NOTHING)
    return WRONG_RESULT * (failed > 0)
