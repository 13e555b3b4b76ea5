"""The plan of any sweep: of the cells of a results file, or of whole models by options as typed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from pathlib import Path

from mtabench import registry
from mtabench.errors import UsageError
from mtabench.problem import axes
from mtabench.problem.case import MODEL, MODES, Case
from mtabench.problem.layers import ATTENTIONS, parse_attention
from mtabench.problem.operations import PLAIN, Taps, make_operation, op_of
from mtabench.registry import Implementation, chosen, default_names, every
from mtabench.results.results_file import read_results
from mtabench.sweeps.measuring_options import check_measuring
from mtabench.sweeps.plan import Options, Plan, check_kv_heads, find_baseline, find_baseline_splits, make_plan, settle

# Options that stand beside the cells of a file: which of its implementations, where and how they are measured.
BESIDE = (
    "pass_", "cells", "impl", "device", "baseline", "timer", "cache", "rounds", "time_limit", "target", "isolate",
    "cell_timeout", "seed",
)  # fmt: skip
DEFAULTS = {
    "cuda": {"preset": "mta-1b", "seq": "2k", "batch": "8", "dtype": "bf16"},
    "cpu": {"layers": "4", "heads": "4", "dim": "128", "seq": "128", "batch": "2", "dtype": "fp32"},
}
COMMON = {"mode": "train", "attention": ATTENTIONS, "conv": "6x11"}
SIZES = ("layers", "heads", "dim")
PLAIN_MODEL = "plain"  # what speedups refer to


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
    found = _read(path, options.pass_, wanted)  # reports a typing error before torch is imported to look for the device
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
    """The cells of the file, for a CPU; cells of a shape follow each other, as they alternate in the same rounds."""
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


@dataclass(frozen=True, slots=True)
class _Size:
    layers: int
    heads: int
    head_dim: int


def make_model_plan(options: Options, device: str | None = None) -> Plan:
    """Expand the options into cells; raises UsageError, in one sentence, for what a sweep could not do."""
    check_measuring(options)
    _ModelAxes.of(options, "cpu")  # a slip of the fingers is refused before torch is imported to look for the device
    options, device = settle(options, device)
    given = _ModelAxes.of(options, device)
    names = list(dict.fromkeys(impl.name for impl in given.impls))
    baseline, notes = find_model_baseline(options.baseline, names)
    cases = tuple(given.cases(device))
    return Plan(MODEL, device, cases, baseline, None, options, notes)


def find_model_baseline(name: str | None, measured: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """What speedups of models refer to, and a note if there will be none; `name` if typed. Raises UsageError."""
    if name is not None and name not in measured:
        raise UsageError(f"--baseline {name} is not measured in this sweep; add it to --impl")
    if name is None and PLAIN_MODEL not in measured:
        return None, (f"no speedups: {PLAIN_MODEL} is not among --impl, and no --baseline is given",)
    return name or PLAIN_MODEL, ()


@dataclass(frozen=True, slots=True)
class _ModelAxes:
    """The axes as values."""

    modes: list[str]
    sizes: list[_Size]
    attentions: list[str]
    conv: Taps
    seqs: list[int]
    batches: list[int]
    dtypes: list[str]
    impls: list[Implementation]

    @classmethod
    def of(cls, options: Options, device: str) -> _ModelAxes:
        """Every axis read on its own, with the defaults of that device where nothing was typed."""
        typed = {name: text for name in (*DEFAULTS["cpu"], "preset", *COMMON) if (text := getattr(options, name))}
        if "preset" in typed and (own := [name for name in SIZES if name in typed]):
            raise UsageError(f"--{own[0]} is part of --preset {typed['preset']}; give one of the two")
        usual = DEFAULTS[device]
        if "preset" in typed or any(name in typed for name in SIZES):
            usual = {name: text for name, text in usual.items() if name not in (*SIZES, "preset")}
        texts = COMMON | usual | typed
        modes = axes.parse_names(texts["mode"], "--mode")
        for mode in modes:
            if mode not in MODES:
                raise UsageError(f"there is no mode {mode!r}; expected one or more of {', '.join(MODES)}")
        attentions = axes.parse_names(texts["attention"], "--attention")
        parsed = [parse_attention(text) for text in attentions]
        if len(set(parsed)) < len(parsed):
            raise UsageError(f"--attention {texts['attention']} names one attention twice; conv is the same as conv/1")
        convs = axes.parse_convs(texts["conv"])
        if len(convs) > 1:
            raise UsageError(f"--conv {texts['conv']} names {len(convs)} convolutions; a sweep of models takes one")
        return cls(
            modes=modes,
            sizes=_sizes(texts),
            attentions=attentions,
            conv=convs[0],
            seqs=axes.parse_ints(texts["seq"], "--seq"),
            batches=axes.parse_ints(texts["batch"], "--batch"),
            dtypes=axes.parse_dtypes(texts["dtype"]),
            impls=_impls(options.impl, modes, device),
        )

    def cases(self, device: str) -> Iterator[Case]:
        """Models of one shape follow each other, the plain one first: they take turns in the same rounds."""
        axes_of_shapes = product(self.modes, self.dtypes, self.sizes, self.seqs, self.batches)
        for mode, dtype, size, seq, batch in axes_of_shapes:
            plain = make_operation(None, "", None, heads=size.heads, head_dim=size.head_dim), None
            for operation, conv_every in (plain, *(self._attention(text, size) for text in self.attentions)):
                for impl in self.impls:
                    if impl.op == op_of(operation) and mode in impl.passes:
                        yield Case(
                            pass_=mode, impl=impl.name, operation=operation, dtype=dtype, batch=batch,
                            heads=size.heads, kv_heads=size.heads, seq=seq, head_dim=size.head_dim, splits=None,
                            device=device, layers=size.layers, conv_every=conv_every,
                        )  # fmt: skip

    def _attention(self, text: str, size: _Size) -> tuple:
        name, conv_every = parse_attention(text)
        if conv_every is not None and conv_every // 2 >= size.layers:
            raise UsageError(
                f"--attention {text} convolves layer {conv_every // 2 + 1} first, and the model has {size.layers}; "
                f"give more --layers, or --attention {name}"
            )
        steps = {"conv": (self.conv, "", None), "mix": (None, "heads", None), "mta": (self.conv, "heads", self.conv)}
        return make_operation(*steps[name], heads=size.heads, head_dim=size.head_dim), conv_every


def _sizes(texts: dict[str, str]) -> list[_Size]:
    if "preset" in texts:
        presets = [axes.find_preset(name) for name in axes.parse_names(texts["preset"], "--preset")]
        return [_Size(preset.layers, preset.heads, preset.head_dim) for preset in presets]
    missing = [name for name in SIZES if name not in texts]
    if missing:
        raise UsageError(f"--{missing[0]} is missing; a model is --layers, --heads and --dim, or a --preset")
    layers, heads, dim = (axes.parse_int(texts[name], f"--{name}") for name in SIZES)
    if dim % (16 * heads) or dim // heads > 256:
        raise UsageError(
            f"--dim {dim} with --heads {heads} is {dim / heads:g} a head; expected a multiple of 16, at most 256, "
            f"such as --dim {64 * heads}"
        )
    return [_Size(layers, heads, dim // heads)]


def _impls(text: str | None, modes: list[str], device: str) -> list[Implementation]:
    """The implementations named, or all that run models there."""
    known = [name for mode in modes for name in default_names(mode, device, ("conv-attention", PLAIN, "mta"))]
    names = list(dict.fromkeys(known))
    if text is not None:
        names = list(dict.fromkeys(impl.name for impl in chosen(axes.parse_names(text, "--impl"))))
    for name in names:
        if not any(impl.of_models for impl in every(name)):
            raise UsageError(f"--impl {name} is a kernel; models run by {', '.join(dict.fromkeys(known))}")
        passes = {pass_ for impl in every(name) if impl.of_models for pass_ in impl.passes}
        if not passes & set(modes):
            raise UsageError(f"--impl {name} has the modes {', '.join(passes)} alone, and --mode is {', '.join(modes)}")
    return [impl for name in names for impl in every(name) if impl.of_models]
