"""From options as typed to the cells of a sweep: parsing, defaults, checks. Touches no file."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from mta_kernels.operation import Operation
from mtabench.errors import UsageError
from mtabench.implementations._user_code import is_reference
from mtabench.options import Options
from mtabench.problem import axes
from mtabench.problem.case import KERNEL_PASSES, Case
from mtabench.problem.operations import (
    NONE,
    OPS,
    PLAIN,
    Taps,
    make_operation,
    mixings,
    op_of,
    page_size_text,
    taps_text,
)
from mtabench.registry import (
    BASELINE,
    GROUPS,
    USUAL_OPS,
    Implementation,
    chosen,
    default_names,
    every,
    libraries,
    name_of,
)
from mtabench.sweeps.measuring_options import check_measuring, check_seed

# What a sweep takes where neither an option nor a preset says otherwise.
DEFAULTS = {
    ("cuda", "fwd"): {"seq": "1k..16k", "dtype": "bf16", "heads": "16", "tokens": "16k"},
    ("cuda", "bwd"): {"seq": "1k..16k", "dtype": "bf16", "heads": "16", "tokens": "16k"},
    ("cuda", "decode"): {"seq": "4k..128k", "dtype": "bf16", "heads": "16", "batch": "1"},
    ("cpu", "fwd"): {"seq": "256..1k", "dtype": "fp32", "heads": "4", "batch": "1"},
    ("cpu", "bwd"): {"seq": "256..1k", "dtype": "fp32", "heads": "4", "batch": "1"},
    ("cpu", "decode"): {"seq": "1k..16k", "dtype": "fp32", "heads": "4", "batch": "1"},
}
AXES = (
    "seq", "head_dim", "conv", "mix", "post_conv", "norm", "gate", "impl", "batch", "tokens", "heads", "kv_heads",
    "dtype",
)  # fmt: skip
COMMON_DEFAULTS = {"head_dim": "64", "conv": "6x11", "mix": NONE, "post_conv": NONE, "norm": NONE, "gate": NONE}
MTA_DEFAULTS = {"mix": "heads"}
CONV_NONE = "--conv none leaves plain attention, which is --op attention; other steps are for --op mta"


def usual_axes(pass_: str) -> str:
    """For a person, the axes of a sweep for which nothing is typed: a line a device."""
    lines = []
    for device, where in (("cuda", "a GPU"), ("cpu", "a CPU")):
        axes_of_all = {name: text for name, text in COMMON_DEFAULTS.items() if text != NONE}
        words = " ".join(
            f"--{name.replace('_', '-')} {text}" for name, text in (DEFAULTS[device, pass_] | axes_of_all).items()
        )
        lines.append(f"Without options, on {where}: {words}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells of a sweep in the order measured; `notes` are texts for a person.

    `baseline_splits` are the splits of the baseline's cells that speedups refer to, None if it has none. `seed`
    draws the inputs and what is checked of the results; the options have it too, as if it had been typed.
    """

    pass_: str
    device: str
    cases: tuple[Case, ...]
    baseline: str | None
    baseline_splits: int | str | None
    options: Options
    notes: tuple[str, ...]

    @property
    def seed(self) -> int:
        """The seed that was typed, or drawn."""
        assert self.options.seed is not None
        return self.options.seed

    @property
    def axes(self) -> dict[str, str]:
        """What the cells have of each axis, for a person; cells need not have every combination."""
        cases = self.cases
        in_pages = any(case.page_size for case in cases)
        of_axes: dict[str, list[object]] = {
            "device": [self.device],
            "cells of": [self.options.cells],
            "mode": [case.pass_ for case in cases if case.layers],
            "impl": [case.impl for case in cases],
            "layers": [case.layers for case in cases],
            "steps": [case.steps for case in cases],
            "seq": [axes.short(case.seq) for case in cases],
            "batch": [axes.short(case.batch) for case in cases],
            "heads": [f"{case.heads}" + f" on {case.kv_heads}" * (case.kv_heads < case.heads) for case in cases],
            "head dim": [case.head_dim for case in cases],
            "dtype": [case.dtype for case in cases],
            "splits": [case.splits for case in cases],
            "page size": [page_size_text(case.pass_, case.page_size) for case in cases] if in_pages else [],
            "causal": ["yes" if case.operation.causal else "no" for case in cases if case.pass_ in ("fwd", "bwd")],
        }
        texts = {name: [str(x) for x in dict.fromkeys(found) if x] for name, found in of_axes.items()}
        return {name: ("; " if name == "steps" else ", ").join(found) for name, found in texts.items() if found}

    def is_baseline(self, case: Case) -> bool:
        """Whether speedups of its problem refer to this cell."""
        return case.impl == self.baseline and case.splits in (None, self.baseline_splits)


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes as values. `batches` is empty if `tokens` sets the batch; no `kv_heads`: as many as heads.

    `impls` has an entry an implementation and operation that the steps make.
    """

    seqs: list[int]
    head_dims: list[int]
    convs: list[Taps | None]
    mixes: list[str]
    post_convs: list[Taps | None]
    norms: list[str]
    gates: list[str]
    heads: list[int]
    kv_heads: int | None
    dtypes: list[str]
    batches: list[int]
    tokens: int | None
    splits: list[int | str]
    page_sizes: list[int | None]
    impls: list[Implementation]

    def operations(self, heads: int, head_dim: int, causal: bool) -> list[Operation]:
        """Every combination of steps; raises UsageError for mixings that do not divide the heads."""
        steps = product(self.convs, self.mixes, self.post_convs, self.norms, self.gates)
        made = (make_operation(*of_one, heads=heads, head_dim=head_dim, causal=causal) for of_one in steps)
        return list(dict.fromkeys(made))


def make_plan(options: Options, device: str | None = None) -> Plan:
    """Expand the options into cells; raises UsageError, in one sentence, for what a sweep could not do.

    `device`, "cuda" or "cpu", is for cells that will not run here; None chooses by the options.
    """
    _parse(options, "cpu")  # reports a typing error before torch is imported to look for the device
    here = device is None
    options, device = settle(options, device)
    given = _parse(options, device)
    for heads in given.heads:
        check_kv_heads(heads, given.kv_heads)
        for mix in given.mixes:
            mixings(mix, heads)
    cases = tuple(_cases(options, given, device))
    baseline, notes = find_baseline(options.baseline, cases, here)
    notes += _note_on_pages(baseline, given)
    of_baseline = (_splits_of(impl, options.pass_, given) for impl in given.impls if impl.name == baseline)
    # Its entries that split no keys have one cell each.
    baseline_splits = find_baseline_splits(baseline, max(of_baseline, key=len, default=[None]))
    return Plan(options.pass_, device, cases, baseline, baseline_splits, options, notes)


def check_axes(options: Options) -> None:
    """Raise UsageError for options that a sweep of this pass, or any check, would refuse; needs no torch."""
    if options.pass_ in KERNEL_PASSES:
        _parse(options, "cpu")
        return
    check_op(options.op)
    is_mta(options)
    if options.seed is not None:
        check_seed(options.seed)
    for name, text in _texts(options, "cpu").items():
        parse = {"head_dim": axes.parse_head_dims, "dtype": axes.parse_dtypes}.get(name)
        if parse is not None:
            parse(text)
        elif name in ("seq", "heads", "kv_heads", "batch", "tokens"):
            axes.parse_ints(text, f"--{name.replace('_', '-')}")
    for name in axes.parse_names(options.impl, "--impl") if options.impl is not None else ():
        if not is_reference(name) and name not in GROUPS:
            every(name)


def settle(options: Options, device: str | None) -> tuple[Options, str]:
    """The options with a seed, and the device, of a sweep; raises UsageError for a timer that the device has not."""
    if device is None:
        from mtabench.environment import resolve_device

        device = resolve_device(options.device)
    if device == "cpu" and options.timer not in ("auto", "cpu"):
        raise UsageError(f"--timer {options.timer} measures on a GPU, and this sweep runs on the CPU")
    return replace(options, seed=check_seed(options.seed)), device


def check_kv_heads(heads: int, kv_heads: int | None) -> None:
    """Raise UsageError for KV heads that do not divide the heads."""
    if kv_heads and heads % kv_heads:
        raise UsageError(
            f"{heads} heads cannot share {kv_heads} KV heads; "
            "--heads must be a multiple of --kv-heads, so that each KV head serves as many query heads"
        )


def _parse(options: Options, device: str) -> _Axes:
    """Every axis read on its own, with the defaults of that device."""
    if options.pass_ not in KERNEL_PASSES:
        raise UsageError(f"there is no pass {options.pass_!r}; expected one of {', '.join(KERNEL_PASSES)}")
    check_measuring(options)
    check_op(options.op)
    texts = _texts(options, device)
    convs = axes.parse_optional_convs(texts["conv"], "--conv")
    if None in convs and not is_mta(options):
        raise UsageError(CONV_NONE)
    page_sizes = axes.parse_page_sizes(options.page_size)
    if page_sizes != [None] and options.pass_ != "decode":
        raise UsageError(f"--page-size {options.page_size} is of a cache, and {options.pass_} reads none; leave it out")
    mixes, post_convs = axes.parse_mixes(texts["mix"]), axes.parse_optional_convs(texts["post_conv"], "--post-conv")
    norms, gates = axes.parse_norms(texts["norm"]), axes.parse_gates(texts["gate"])
    return _Axes(
        seqs=axes.parse_ints(texts["seq"], "--seq"),
        head_dims=axes.parse_head_dims(texts["head_dim"]),
        convs=convs,
        mixes=mixes,
        post_convs=post_convs,
        norms=norms,
        gates=gates,
        heads=axes.parse_ints(texts["heads"], "--heads"),
        kv_heads=axes.parse_int(texts["kv_heads"], "--kv-heads") if "kv_heads" in texts else None,
        dtypes=axes.parse_dtypes(texts["dtype"]),
        batches=axes.parse_ints(texts["batch"], "--batch") if "batch" in texts else [],
        tokens=axes.parse_int(texts["tokens"], "--tokens") if "tokens" in texts else None,
        splits=axes.parse_splits(options.splits),
        page_sizes=page_sizes,
        impls=_impls(options, device, _ops(options, product(convs, map(_of_any, mixes), post_convs, norms, gates))),
    )


def check_op(op: str | None) -> None:
    """Raise UsageError for an operation that there is not."""
    if op is not None and op not in OPS:
        raise UsageError(f"--op {op!r} is not known; expected one of {', '.join(OPS)}")


def is_mta(options: Options) -> bool:
    """Whether all steps can be typed; raises UsageError for those that are and cannot."""
    if options.layer is not None and options.preset is None:
        raise UsageError(f"--layer {options.layer} is of a model; name it as well, such as --preset mta-1b")
    steps = {
        "--layer": options.layer, "--mix": options.mix, "--post-conv": options.post_conv, "--norm": options.norm,
        "--gate": options.gate,
    }  # fmt: skip
    typed = [f"{name} {text}" for name, text in steps.items() if text is not None]
    if typed and options.op not in (("mta", None) if options.layer else ("mta",)):
        instead = "give --op mta" if options.op is None else f"give --op mta in the place of --op {options.op}"
        raise UsageError(f"{typed[0]} is for the whole multi-token attention; {instead}, or leave it out")
    return options.op == "mta" or options.layer is not None


def _ops(options: Options, steps: Iterable[tuple]) -> tuple[str, ...]:
    """The operations that cells are of: the one named, or those that the steps make, with plain attention beside."""
    if not is_mta(options):
        return USUAL_OPS if options.op is None else (options.op,)
    made = {op_of(make_operation(*of_one, heads=1, head_dim=1)) for of_one in steps}
    if made == {PLAIN}:
        raise UsageError(
            "without --mix, --conv, --post-conv, --norm and --gate plain attention is left; "
            "name a step, or give --op attention"
        )
    return tuple(op for op in OPS if op in made | {PLAIN})


def _of_any(mix: str) -> str:
    """A mixing that any number of heads can have in the place of this one."""
    return NONE if set(mix.split("+")) == {NONE} else "heads"


def _impls(options: Options, device: str, ops: tuple[str, ...]) -> list[Implementation]:
    """The implementations named, or the usual ones, of these operations."""
    if options.impl is None:
        names = default_names(options.pass_, device, ops)
    else:
        names = list(dict.fromkeys(impl.name for impl in chosen(axes.parse_names(options.impl, "--impl"))))
    for name in names:
        others = {impl.op for impl in every(name) if not impl.of_models}
        if not others:
            raise UsageError(f"--impl {name} runs whole models: `mtabench model --impl {name}` measures it")
        if not others & set(ops):
            op = "mta" if is_mta(options) else options.op or USUAL_OPS[0]
            raise UsageError(f"--op {op} excludes {name}, which computes {' and '.join(others)}; drop one of them")
    return [impl for name in names for impl in every(name) if impl.op in ops and not impl.of_models]


def _texts(options: Options, device: str) -> dict[str, str]:
    """The axes as typed, with a preset, then the defaults, in the places where nothing was typed."""
    texts = COMMON_DEFAULTS | (MTA_DEFAULTS if is_mta(options) else {}) | DEFAULTS.get((device, options.pass_), {})
    if options.preset is not None:
        preset = axes.find_preset(options.preset)
        texts |= {"seq": str(preset.seq), "heads": str(preset.heads), "head_dim": str(preset.head_dim)}
        texts |= {"conv": taps_text(*preset.conv)} if options.layer is None else preset.layer(options.layer)
    if options.batch is not None or options.tokens is not None:
        texts = {name: text for name, text in texts.items() if name not in ("batch", "tokens")}
    typed = {name: getattr(options, name) for name in AXES}
    return texts | {name: text for name, text in typed.items() if text is not None}


def _cases(options: Options, given: _Axes, device: str) -> Iterator[Case]:
    """Cells that share a shape follow each other: they alternate in the same rounds."""
    decode = options.pass_ == "decode"
    for dtype, head_dim, heads, seq in product(given.dtypes, given.head_dims, given.heads, given.seqs):
        for batch in given.batches or [max(1, (given.tokens or 1) // seq)]:
            operations = given.operations(heads, head_dim, causal=decode or options.causal)
            for impl, operation, page_size, splits in _rivals_then_yardsticks(options.pass_, given, operations):
                yield Case(
                    pass_=options.pass_,
                    impl=impl.name,
                    operation=operation,
                    dtype=dtype,
                    batch=batch,
                    heads=heads,
                    kv_heads=given.kv_heads or heads,
                    seq=seq,
                    head_dim=head_dim,
                    splits=splits,
                    device=device,
                    page_size=page_size,
                )


def _rivals_then_yardsticks(
    pass_: str, given: _Axes, operations: Sequence[Operation]
) -> Iterator[tuple[Implementation, Operation, int | None, int | str | None]]:
    """What is measured of one shape: each operation by its rivals, then plain attention once.

    Of each implementation its page sizes, and its splits.
    """
    plain = Operation(None, operations[0].scale, operations[0].causal)
    rivals = [operation for operation in operations if operation != plain]
    for operation in (*rivals, plain):
        for impl in given.impls:
            if impl.op == op_of(operation):
                page_sizes = given.page_sizes if impl.pages else [None]
                for page_size, splits in product(page_sizes, _splits_of(impl, pass_, given)):
                    yield impl, operation, page_size, splits


def _splits_of(impl: Implementation, pass_: str, given: _Axes) -> Sequence[int | str | None]:
    """The splits of an implementation's cells; one cell without where it does not split keys."""
    return given.splits if pass_ == "decode" and impl.splits else [None]


def find_baseline(name: str | None, cases: Sequence[Case], here: bool) -> tuple[str | None, tuple[str, ...]]:
    """What speedups of these cells of kernels refer to, and a note on those without; `name` if typed.

    Else it is BASELINE, or of plain attention alone the best library kernel, which can run some of them if that is
    `here`. Raises UsageError for a baseline that is not measured.
    """
    ops = {op: list(dict.fromkeys(case.impl for case in cases if case.op == op)) for op in (case.op for case in cases)}
    if name is not None:
        name = name_of(name)
        every(name)
        if not any(name in names for names in ops.values()):
            raise UsageError(f"--baseline {name} is not measured in this sweep; add it to --impl")
    elif set(ops) == {PLAIN}:
        name = _library(cases, here)
    elif any(BASELINE in names for names in ops.values()):
        name = BASELINE
    if name is None:
        first = libraries(cases[0].pass_, cases[0].device, PLAIN)[:1] if set(ops) == {PLAIN} else []
        usual = first[0].name if first else BASELINE
        return None, (f"no speedups: {usual} is not among --impl, and no --baseline is given",)
    without = [op for op, names in ops.items() if op != PLAIN and name not in names]
    return name, (f"no speedups of {' and '.join(without)}, which {name} does not compute",) if without else ()


def _library(cases: Sequence[Case], here: bool) -> str | None:
    """The best library kernel of those that are measured; `here` if it can run some of its cells on this machine."""
    from mtabench.sweeps.estimate import unsupported_reason

    own = [entry.name for entry in libraries(cases[0].pass_, cases[0].device, PLAIN)]
    measured = {name: cells for name in own if (cells := [case for case in cases if case.impl == name])}
    runs = (
        name for name, cells in measured.items() if not here or any(unsupported_reason(one) is None for one in cells)
    )
    return next(runs, None) if len(measured) > 1 else next(iter(measured), None)


def _note_on_pages(baseline: str | None, given: _Axes) -> tuple[str, ...]:
    """A note if cells in pages have no baseline to compare with."""
    readers = {impl.name for impl in given.impls if impl.pages}
    if baseline is None or baseline in readers or not readers or given.page_sizes == [None]:
        return ()
    return (f"no speedups of caches in pages, which {baseline} does not read",)


def find_baseline_splits(name: str | None, splits: Sequence[int | str | None]) -> int | str | None:
    """Of several splits of the baseline, at least one, speedups refer to auto; raises UsageError without that."""
    if "auto" in splits:
        return "auto"
    if len(splits) > 1:
        numbers = ", ".join(map(str, splits))
        raise UsageError(f"--baseline {name} has splits {numbers} here; add auto to --splits, to which speedups refer")
    return splits[0]
