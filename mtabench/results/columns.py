"""The columns of results files, one entry each: all that the suite knows of a column stands in its entry.

The writer's header, the reader's checks, merging, filters, `show`, `report` and the table in docs/results.md
derive from these entries. A new column is one entry here; `python scripts/generate_docs.py` then writes its line there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from mta_kernels.operation import PAGE_SIZES
from mtabench.console import flop_unit, significant
from mtabench.measuring.settled import UNSETTLED, half_interval_of, mark_of, meaning
from mtabench.problem.case import CACHED_PASSES, DTYPES, PASSES
from mtabench.problem.operations import OPERATION_COLUMNS, OPS, STEPS
from mtabench.problem.work import bytes_moved, executed_flops, only_reads, tokens, useful_flops
from mtabench.registry import implementation_of
from mtabench.results import fields
from mtabench.results.fields import COUNT, FLAG, NUMBER, TEXT, TIME_MS, Field

if TYPE_CHECKING:
    from mtabench.results.rows import CellFacts, TimingFacts

MOST_CHARACTERS = 40  # of a text from a file in one place of a table

Row = Mapping[str, Any]
Text = Callable[[Row], str]
SCHEMA_VERSION = 1
STATUSES = ("ok", "unsupported", "wrong", "oom", "error", "timeout", "invalid")

Merged = Literal["summary", "per time", "sum", "geometric mean", "largest", "median", "first", "least", "joined"]


@dataclass(frozen=True, slots=True)
class Shown:
    """A column in tables: `text` gives what stands in a row, empty where nothing is known.

    Rank 0 stays in the narrowest table; the highest rank is left out first. `decode_rank` is that in a table of decode
    alone. Columns stand in the order of `place`, and of the file where that is equal. `instead` is what some rows have
    in its stead.
    """

    heading: str
    unit: str
    rank: int
    text: Text
    place: int = 5
    decode_rank: int | None = None
    right: bool = True
    legend: Callable[[Sequence[Row]], str] = lambda rows: ""
    wanted: Callable[[Sequence[Row]], bool] = lambda rows: True
    instead: Callable[[Sequence[Row]], Shown | None] = lambda rows: None


def number(name: str, digits: int = 3, factor: float = 1.0, end: str = "") -> Text:
    """The text of a number: so many digits, after multiplication by `factor`."""
    return lambda row: significant(factor * float(row[name]), digits, zeros=True) + end if row[name] else ""


USEFUL = Shown("useful", "TFLOP/s", 4, number("useful_tflops"), decode_rank=6)


def useful_in_unit(rows: Sequence[Row]) -> Shown:
    """The useful rate in the unit that suits the rows."""
    unit, factor = flop_unit(float(row["useful_tflops"]) for row in rows if row["useful_tflops"])
    return replace(USEFUL, unit=unit, text=number("useful_tflops", factor=factor))


def median(row: Row) -> str:
    """The median, marked if it did not settle."""
    return mark_of(row) + number("median_ms", 4)(row)


def unsettled_legend(rows: Sequence[Row]) -> str:
    """What the mark of a median means, if there is one."""
    return f"{UNSETTLED} {why}" if (why := meaning(rows)) else ""


def interval(row: Row) -> str:
    """Half the 95 % interval of the median, in percent."""
    half = half_interval_of(row)
    return "" if half is None else f"{100 * half:.2f}" if half < 0.1 else significant(100 * half, 2, zeros=True)


def percentiles(row: Row) -> str:
    """The 10th and the 90th percentile."""
    return "-".join(significant(float(row[name]), 4, zeros=True) for name in ("p10_ms", "p90_ms") if row[name])


def roof_legend(rows: Sequence[Row]) -> str:
    """What the roof of decode is in files from before reading was measured."""
    of_copies = any(
        row["pass"] in CACHED_PASSES and row["fraction_of_roofline"] and not row["read_gbytes_s"] for row in rows
    )
    return "of decode, what a copy moves; what only reads can be faster" if of_copies else ""


def clocks(rows: Sequence[Row]) -> list[float]:
    """The clocks at which cells ran, in MHz."""
    return [float(row["sm_clock_mhz"]) for row in rows if row["sm_clock_mhz"]]


def clocks_differ(rows: Sequence[Row]) -> bool:
    """Whether some cells ran at a clock so low that it counts; otherwise the range says enough."""
    return min(clocks(rows), default=0.0) < 0.95 * max(clocks(rows), default=0.0)


def cut(text: str) -> str:
    """A text from a file, as long as a table has room for."""
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """A column of results files. Its `name` says its unit; `sentence` is its meaning in docs/results.md.

    `role`: a "cell" column is part of what identifies a cell, filled by `Case.columns`. A "measured"
    column came out of measuring. An "environment" column is a fact of the device or the software; without a `value`,
    `environment.describe` fills it.
    `since` counts the times that the schema had grown when the column came: for a new one, the largest there is plus
    one. Older files lack the column and have it empty.
    `value` fills it in every row and `timed` in the row of a timed cell; code that computes it later sets it there.
    `merged` says how values of several processes become one. By default a measured number becomes the median, and
    anything else the first.
    `heading` is its name in tables, if not that in the file. `shown` puts it into the tables of `show` and `report`.
    """

    name: str
    sentence: str
    field: Field = TEXT
    unit: str = ""
    role: Literal["", "cell", "measured", "environment"] = ""
    since: int = 0
    value: Callable[[CellFacts], object] | None = None
    timed: Callable[[TimingFacts], object] | None = None
    merged: Merged | None = None
    heading: str = ""
    shown: Shown | None = None


def _cell(name: str, sentence: str, field: Field = TEXT, heading: str = "", since: int = 0) -> ResultColumn:
    """A column of what identifies a cell."""
    return ResultColumn(name, sentence, field, role="cell", heading=heading, since=since)


def _environment(name: str, sentence: str, field: Field = TEXT, **more: Any) -> ResultColumn:
    """A column of where and with what a cell was measured."""
    return ResultColumn(name, sentence, field, role="environment", **more)


def _measured(
    name: str, sentence: str, field: Field, unit: str, timed: Callable[[TimingFacts], object] | None, **more: Any
) -> ResultColumn:
    """A column of what came out of measuring a cell; `timed` is None where the row gets it later."""
    return ResultColumn(name, sentence, field, unit, role="measured", timed=timed, **more)


def _summary(name: str, sentence: str, **more: Any) -> ResultColumn:
    """A time in milliseconds that sums up all samples."""
    return _measured(name, sentence, TIME_MS, "ms", attrgetter(f"summary.{name}"), merged="summary", **more)


def _splits_used(cell: CellFacts) -> object:
    """The number that was given; of `auto` what the plan of the call on this GPU says."""
    if cell.status not in ("ok", "invalid", "wrong"):
        return None
    if cell.case.splits != "auto":
        return cell.case.splits
    from mtabench.prediction.plans import splits_of

    return splits_of(cell.case)


def _kernels(cell: CellFacts) -> str | None:
    """Of CUDA C++ and Triton, by the plan of the call on this GPU."""
    if cell.status not in ("ok", "invalid", "wrong"):
        return None
    from mtabench.prediction.plans import kernels_of

    return " ".join(kernels_of(cell.case)) or None


def _attention_share(of: TimingFacts) -> float | None:
    """None also where the part took longer than the whole: the device was not as busy for both."""
    attention_ms = of.measurement.attention_ms
    return None if attention_ms is None or attention_ms > of.summary.median_ms else attention_ms / of.summary.median_ms


_SIZE = Field(fields.count, numeric=True, kind="whole")
# A text in a frame: empty distinguishes cells, NaN does not.
_LATER_SIZE = Field(fields.optional(fields.count), kind="whole")

TABLE: tuple[ResultColumn, ...] = (
    ResultColumn("schema_version", "version of this table", COUNT, value=lambda cell: SCHEMA_VERSION),
    ResultColumn("run_id", "one id a sweep", value=attrgetter("facts.run_id"), merged="joined"),
    ResultColumn(
        "started_utc", "start of the sweep in UTC; in files of `mtabench history` the time of the commit",
        Field(fields.time_utc), value=attrgetter("facts.started_utc"), merged="least",
    ),
    _cell(
        "pass", "`fwd`, `bwd` or `decode`; of a model `train`, `prefill` or `generate`", Field(fields.one_of(*PASSES))
    ),
    _cell("impl", "the [implementation](implementations.md)"),
    _cell("op", "`conv-attention`, `attention`, or `mta`, the whole multi-token attention", Field(fields.one_of(*OPS))),
    _cell("dtype", "type of the inputs", Field(fields.one_of(*DTYPES))),
    _cell("batch", "sequences", _SIZE),
    _cell("heads", "query heads", _SIZE),
    _cell("kv_heads", "key-value heads", _SIZE, heading="KV heads"),
    _cell("seq", "tokens of a sequence; of decode, the keys", _SIZE),
    _cell("head_dim", "elements of a query or key", _SIZE, heading="head dim"),
    _cell("conv_q", "query taps of the convolution before the softmax", COUNT),
    _cell("conv_k", "key taps of the convolution before the softmax", COUNT),
    _cell("causal", "whether a query sees no later key", Field(fields.flag, kind="flag")),
    _cell("splits", "of decode, the wanted number of splits, or `auto`", Field(fields.optional(fields.splits))),
    _cell(
        "mix", "heads mixed before and after the softmax: `heads` (all), or so many a group; else `BEFORE+AFTER`",
        Field(fields.optional(fields.mix)), since=5,
    ),
    _cell("post_conv_q", "query taps of the convolution after the softmax", COUNT, since=5),
    _cell("post_conv_k", "key taps of the convolution after the softmax", COUNT, since=5),
    _cell("layers", "of a [model](models.md), its layers", _LATER_SIZE, since=6),
    _cell(
        "conv_every", "of a model, how many layers share one with convolutions: `4` is one in four", _LATER_SIZE,
        heading="conv every", since=6,
    ),
    _cell(
        "norm", "RMSNorm of each head's output: `rms`, or `depth2` as the layer of that index rescales it",
        Field(fields.optional(fields.norm)), since=7,
    ),
    _cell(
        "gate", "gate of each head's output: `one` number a head and row, or `full`, one a head dim",
        Field(fields.optional(fields.gate)), since=7,
    ),
    _cell(
        "page_size", "of decode, keys of a page; empty where the cache is contiguous",
        Field(fields.optional(fields.one_of(*map(str, PAGE_SIZES))), kind="whole"), heading="page size", since=8,
    ),
    ResultColumn(
        "splits_used", "splits that a decode kernel took; where `splits` is `auto`, what it chose",
        Field(fields.optional(fields.count), kind="whole"), value=_splits_used,
    ),
    ResultColumn(
        "kernels", "our CUDA C++ and Triton kernels that the call launches on this GPU, in order, each once",
        value=_kernels, since=10,
    ),
    ResultColumn(
        "status", "`ok`, `unsupported`, `wrong`, `oom`, `error`, `timeout` or `invalid`",
        Field(fields.one_of(*STATUSES)), value=attrgetter("status"),
    ),
    ResultColumn("reason", "why, in words", value=attrgetter("reason")),
    _measured("rounds", "rounds of samples", COUNT, "", attrgetter("summary.rounds"), merged="sum"),
    _measured("samples", "samples in all rounds", COUNT, "", attrgetter("summary.samples"), merged="sum"),
    _summary(
        "median_ms", "median of all samples",
        shown=Shown("median", "ms", 0, median, place=0, legend=unsettled_legend),
    ),
    _summary(
        "p10_ms", "10th percentile of all samples",
        shown=Shown("p10-p90", "ms", 7, percentiles, place=2),
    ),
    _summary("p90_ms", "90th percentile of all samples"),
    _summary(
        "ci95_low_ms", "lower end of the 95 % bootstrap interval of the median, over rounds",
        shown=Shown("±", "%", 2, interval, place=1, legend=lambda rows: "half the 95 % interval of the median"),
    ),
    _summary("ci95_high_ms", "upper end of that interval"),
    _measured("baseline", "the implementation compared with", TEXT, "", None),
    _measured(
        "speedup", "the baseline's median over this one's", NUMBER, "", None, merged="geometric mean",
        shown=Shown("speedup", "", 1, number("speedup", end="x"), place=3),
    ),
    _measured(
        "useful_tflops", "rate of the work that the definition needs", NUMBER, "TFLOP/s",
        lambda of: useful_flops(of.case) / of.seconds / 1e12, merged="per time",
        shown=replace(USEFUL, instead=useful_in_unit),
    ),
    _measured(
        "executed_tflops", "rate of the work that the implementation does", NUMBER, "TFLOP/s",
        lambda of: executed_flops(of.case, implementation_of(of.case).work) / of.seconds / 1e12, merged="per time",
    ),
    _measured(
        "gbytes_s", "rate of inputs and outputs, each moved once", NUMBER, "GB/s",
        lambda of: bytes_moved(of.case) / of.seconds / 1e9, merged="per time",
        shown=Shown("moved", "GB/s", 8, number("gbytes_s"), decode_rank=4),
    ),
    _measured(
        "fraction_of_roofline", "the least time that the measured ceilings of the device allow, over the median",
        NUMBER, "", attrgetter("fraction"), merged="per time",
        shown=Shown("of roof", "%", 5, number("fraction_of_roofline", factor=100), legend=roof_legend),
    ),
    _measured(
        "peak_memory_mb",
        "most device memory that a call takes beyond its inputs, in 10^6 bytes; of `bwd`, with what its forward saved",
        NUMBER, "MB", attrgetter("measurement.peak_memory_mb"), merged="largest",
        shown=Shown("memory", "MB", 9, number("peak_memory_mb")),
    ),
    _measured(
        "rel_error", "relative error against float64", NUMBER, "", None, value=attrgetter("rel_error"),
        merged="largest",
        shown=Shown("error", "", 10, lambda row: f"{float(row['rel_error']):.1e}" if row["rel_error"] else "", place=8),
    ),
    _measured("timer", "how it was timed", TEXT, "", attrgetter("measurement.timer")),
    _measured("cache", "`cold` or `warm`", TEXT, "", attrgetter("measurement.cache")),
    _measured(
        "sm_clock_mhz", "GPU clock while measuring", NUMBER, "MHz", attrgetter("measurement.sm_clock_mhz"),
        shown=Shown("clock", "MHz", 11, number("sm_clock_mhz", 4), place=8, wanted=clocks_differ),
    ),
    _measured(
        "throttled", "whether heat or hardware throttled the GPU; a power cap shows in sm_clock_mhz", FLAG, "",
        attrgetter("measurement.throttled"),
    ),
    _measured(
        "energy_j", "energy of one call among its likes, by NVML, rest power included", NUMBER, "J",
        attrgetter("measurement.energy_j"), since=1, shown=Shown("energy", "J", 11, number("energy_j")),
    ),
    _measured(
        "tokens_per_joule", "tokens of a call over its energy", NUMBER, "tokens/J",
        lambda of: tokens(of.case) / of.measurement.energy_j if of.measurement.energy_j else None, since=1,
        shown=Shown("energy", "tokens/J", 11, number("tokens_per_joule")),
    ),
    _measured(
        "tokens_s", "of a model: tokens of a call over its time", NUMBER, "tokens/s",
        lambda of: tokens(of.case) / of.seconds if of.case.layers else None, since=6, merged="per time",
        shown=Shown("rate", "tokens/s", 3, number("tokens_s", 4)),
    ),
    _measured(
        "attention_share", "of a model: attention alone, with its norm and gate, over the median", NUMBER, "",
        _attention_share, since=6,
        shown=Shown("attention", "%", 4, number("attention_share", factor=100)),
    ),
    _measured(
        "loss", "of `train`: the loss after eight steps on one batch, from the same weights for all", NUMBER, "",
        attrgetter("measurement.loss"), since=6, shown=Shown("loss", "", 6, number("loss", 4)),
    ),
    _measured(
        "ci_target", "share of the median that half its 95 % interval should be at most; 0.005 where a file lacks it",
        NUMBER, "", attrgetter("measurement.ci_target"), since=3,
    ),
    _measured(
        "ci_typical", "where most times of a run miss `ci_target`, the median so far of half their intervals",
        NUMBER, "", None, since=9,
    ),
    _measured(
        "run_delay",
        "of the timer `cpu`: the share of the rounds' time for which the thread that waited longest had no core",
        NUMBER, "", attrgetter("measurement.run_delay"), since=3, merged="largest",
    ),
    _measured(
        "read_gbytes_s", "of decode: the measured bandwidth of reading alone, which is its memory ceiling", NUMBER,
        "GB/s",
        lambda of: of.ceilings.read_gbytes_s if of.ceilings and only_reads(of.case) else None, since=4,
    ),
    _environment("device", "the GPU or the CPU"),
    ResultColumn(
        "worker", "of a sweep [on several workers](cluster.md), the host and the GPU or the cores", since=2,
        value=lambda cell: cell.facts.environment.get("worker"),
        shown=Shown("worker", "", 9, lambda row: cut(row["worker"]), right=False),
    ),
    _environment("driver", "version of the GPU's driver"),
    _environment("cuda", "version of CUDA", heading="CUDA"),
    _environment("torch", "version of PyTorch"),
    _environment("triton", "version of Triton, and the GPU that it compiles for where TRITON_OVERRIDE_ARCH names one"),
    _environment("mtabench", "version of mtabench"),
    _environment("git_sha", "revision of the code", Field(fields.optional(fields.revision)), heading="git"),
    _environment(
        "git_dirty", "whether the code had changes, but for what mtabench writes, that the revision lacks", FLAG
    ),
    ResultColumn(
        "repro", "a command line that measures this one cell, in the same way", value=attrgetter("repro")
    ),
)  # fmt: skip


def values_of(row: Mapping[str, str]) -> dict[str, str | int | float | bool | None]:
    """A row of texts as values by column, None where nothing is known."""
    return {column.name: column.field.value(row[column.name]) for column in TABLE}


# What a cell is of, as people name it: a convolution is one axis.
AXES = tuple(
    dict.fromkeys(
        axis
        for column in TABLE
        if column.role == "cell" and column.name not in ("impl", "op")
        for axis in (STEPS if column.name in OPERATION_COLUMNS else (column.name,))
    )
)
