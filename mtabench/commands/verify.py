"""The command `mtabench verify`: check results, and time nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console

from mtabench.checking.verify import DTYPES_CHECKED, CheckFilter, CheckRow, run_checks
from mtabench.commands import WRONG_RESULT
from mtabench.console import say, warnings_at_end
from mtabench.environment import let_triton_interpret, resolve_device
from mtabench.errors import NothingCheckedError, UsageError
from mtabench.json_output import others_to_stderr, print_json
from mtabench.problem import axes
from mtabench.problem.operations import PLAIN
from mtabench.prose import all_or_one, plural
from mtabench.registry import chosen, every, names
from mtabench.sweeps.measuring_options import check_seed
from mtabench.sweeps.plan import CONV_NONE, Options, check_op, is_mta
from mtabench.tables import print_prose

NOTHING = (
    "nothing was checked: no implementation that was asked for can run here; "
    "--head-dim, --kv-heads, --seq and --causal choose shapes"
)
CHECK_LINE = "  {:<24} {:>8} {:>8}  "  # below the implementation and the shape


def run(options: Options, causal: bool | None, as_json: bool) -> int:
    """Check implementations and print a line a check, as it ends; WRONG_RESULT if any result is wrong.

    `causal` holds for all shapes, or None for each shape's own.

    Raises UsageError for options that do not fit, and NothingCheckedError where none could run.
    """
    if as_json:
        with others_to_stderr():
            device, seed, found = _checking(options, causal)
            rows = list(found)
        return _print_json(rows, device, seed)
    console, (_, seed, found) = Console(), _checking(options, causal)
    say(console, CHECK_LINE.format("check", "error", "allowed") + "result")
    rows, above = [], ""
    with warnings_at_end(), console.status("") as status:
        for row in found:
            if not row.shape:
                print_prose(console, f"not checked: {row.reason}", f"{row.implementation:<17} ")
                continue
            if above != (above := f"{row.implementation}, {row.shape}"):
                print_prose(console, above, style="bold")
            rows.append(row)
            numbers = ("" if x is None else f"{x:.2g}" for x in (row.rel_error, row.tolerance))
            result = row.reason or "ok" if row.ok else f"wrong: {row.reason}"
            print_prose(console, result, CHECK_LINE.format(row.check, *numbers), "" if row.ok else "bold red")
            status.update(plural(len(rows), "check"))
    if not rows:
        raise NothingCheckedError(NOTHING)
    wrong = sum(not row.ok for row in rows)
    outcome = f"{wrong} of {len(rows)} checks failed" if wrong else f"{all_or_one(len(rows), 'check')} passed"
    print_prose(console, f"{outcome}; --seed {seed} draws the same inputs again")
    return WRONG_RESULT * (wrong > 0)


def _checking(options: Options, causal: bool | None) -> tuple[str, int, Iterator[CheckRow]]:
    """The device, the seed, and the wanted checks, which run as the caller takes them."""
    impl, dtype, seed, filters = options.impl, options.dtype, check_seed(options.seed), _filters(options, causal)
    where = resolve_device(options.device)
    let_triton_interpret(where)
    entries = chosen(names() if impl is None else axes.parse_names(impl, "--impl"))
    wanted = list(dict.fromkeys(entry.name for entry in entries))
    for name in wanted if impl is not None and filters.op is not None else ():
        if filters.op not in (computed := [entry.op for entry in every(name)]):
            raise UsageError(
                f"--op {filters.op} excludes {name}, which computes {' and '.join(computed)}; drop one of them"
            )
    dtypes = None if dtype is None else axes.parse_dtypes(dtype)
    checked = DTYPES_CHECKED[where]
    for name in dtypes or ():
        if name not in checked:
            raise UsageError(f"--dtype {name} is not checked on {where}; expected one or more of {', '.join(checked)}")
    return where, seed, run_checks(wanted, where, seed, dtypes, filters)


def _filters(options: Options, causal: bool | None) -> CheckFilter:
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
        None if options.head_dim is None else axes.parse_head_dims(options.head_dim),
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
