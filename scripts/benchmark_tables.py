"""The tables of docs/benchmarks.md and of the README, from the committed results files."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from mtabench.measuring.settled import half_interval_of, settled

Row = Mapping[str, str]
Where = Mapping[str, object]  # a column's value, or several values, as texts or numbers

RESULTS = Path(__file__).parents[1] / "results/nvidia-h200"
CUDNN, FLASH = "plain, cuDNN", "plain, FlashAttention-2"
NAMES = {CUDNN: "sdpa-cudnn", FLASH: "sdpa-flash"}
HEADERS = {"seq": "tokens", "impl": "rung"}
GROUPS = ((16, 8), (32, 8), (64, 8), (64, 4))
LENGTHS = (4096, 16384)


def lines(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table in Markdown."""
    header = list(header)
    yield f"| {' | '.join(header)} |"
    yield "| --- " * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def read(*names: str, **where: object) -> list[Row]:
    """The rows of results files that have a time, or are of no sweep, with these values."""
    rows = itertools.chain.from_iterable(csv.DictReader((RESULTS / name).open()) for name in names)
    return [row for row in rows if row.get("status", "ok") == "ok" and fits(row, where)]


def fits(row: Row, where: Where) -> bool:
    """Whether a row has these values; `head_dim=(64, 128)` allows two."""
    return all(
        row[name] in map(str, value) if isinstance(value, tuple) else row[name] == str(value)
        for name, value in where.items()
    )


def time(row: Row | None, unit: str = "ms") -> str:
    """A median, and half its interval if it did not settle."""
    if row is None:
        return ""
    wide = "" if settled(row) else f" ± {100 * (half_interval_of(row) or 0):.1f} %"
    value = float(row["median_ms"]) * {"ms": 1, "us": 1000}[unit]
    return f"{value:,.0f} {unit}{wide}" if value >= 1000 else f"{value:.3g} {unit}{wide}"


def over(row: Row | None, other: Row | None, percent: bool = False) -> str:
    """The ratio of two medians, or the second's share of the first in percent; with half its interval as in `time`."""
    if row is None or other is None:
        return ""
    halves = [half_interval_of(one) or 0 for one in (row, other)]
    wide = "" if settled(row) and settled(other) else f" ± {100 * math.hypot(*halves):.0f} %"
    ratio = float(row["median_ms"]) / float(other["median_ms"])
    return (f"{100 / ratio:.0f} %" if percent else f"{ratio:.2f}") + wide


def times(
    names: Sequence[str],
    axes: Sequence[str],
    columns: Mapping[str, Where],
    ratios: Mapping[str, tuple[str, str]] | None = None,
    shown: Sequence[str] | None = None,
    unit: str = "ms",
    percent: bool = False,
    **where: object,
) -> Iterator[str]:
    """Medians of files: a line for each combination of the axes, a column for each of `columns`, then their ratios.

    `shown` are the columns whose times stand there.
    """
    rows = read(*names, **where)
    keys = list(dict.fromkeys(tuple(row[axis] for axis in axes) for row in rows))
    if all(value.isdigit() for key in keys for value in key):
        keys.sort(key=lambda key: list(map(int, key)))
    ratios = ratios or {}
    shown = list(columns if shown is None else shown)

    def line(key: tuple[str, ...]) -> Iterator[str]:
        of = [row for row in rows if tuple(row[axis] for axis in axes) == key]
        found = {label: next((row for row in of if fits(row, column)), None) for label, column in columns.items()}
        yield from (f"`{value}`" if axis == "impl" else value for axis, value in zip(axes, key, strict=True))
        yield from (time(found[label], unit) for label in shown)
        yield from (over(found[one], found[other], percent) for one, other in ratios.values())

    titles = [HEADERS.get(axis, axis.replace("_", " ")) for axis in axes]
    return lines([*titles, *shown, *ratios], map(line, keys))


def by_impl(*names: str) -> dict[str, Where]:
    """A column for each implementation."""
    return {name if name in NAMES else f"`{name}`": {"impl": NAMES.get(name, name)} for name in names}


def over_cudnn(name: str) -> dict[str, tuple[str, str]]:
    """A ratio of an implementation to cuDNN's plain attention."""
    return {f"`{name}` over cuDNN": (f"`{name}`", CUDNN)}


def columns_of(name: str, shapes: Sequence[tuple[int, int]]) -> Callable[[], Iterator[str]]:
    """A line for each implementation, a column for each head dim and number of tokens."""
    columns = {f"{dim}, {seq}": {"head_dim": dim, "seq": seq} for dim, seq in shapes}
    return partial(times, [name], ("impl",), columns, seq=tuple(seq for _, seq in shapes))


def grouped() -> Iterator[str]:
    """Shares of cuDNN's speed in grouped decode from contiguous caches."""
    rows = read("decode-pages.csv", "decode-groups.csv", page_size="")

    def share(head_dim: int, batch: int, seq: int, heads: int, kv_heads: int) -> str:
        shape = {"head_dim": head_dim, "batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads}
        found = {row["impl"]: row for row in rows if fits(row, shape)}
        return over(found["cuda"], found["sdpa-cudnn"], percent=True)

    shapes = [(dim, batch, seq) for dim in (64, 128) for batch in (1, 64) for seq in (4096, 65536)]
    return lines(
        ["head dim", "sequences x keys", *(f"{heads} / {kv_heads}" for heads, kv_heads in GROUPS)],
        ([f"{s[0]}", f"{s[1]} x {s[2]}", *(share(*s, *group) for group in GROUPS)] for s in shapes),
    )


MODELS = {
    "model-1b-train": "train, 12 layers",
    "model-1b-all-layers-train": "train, 12 layers",
    "model-1b-eager-train": "train, 12 layers",
    "model-1b-mta-train": "train, 1B",
    "model-300m-train": "train, 300M",
    "model-1b-generate": "generate, 1B",
    "model-1b-mta-generate": "generate, 1B",
    "model-1b-prefill": "prompt, 1B",
}


def models() -> Iterator[str]:
    """Whole models beside the plain model of their run."""
    where = {"": "", "1": "conv attention", "4": "conv attention, a quarter"}

    def line(name: str, row: Row, rows: list[Row]) -> list[str]:
        plain = next(one for one in rows if one["impl"] == "plain" and one["batch"] == row["batch"])
        attention = "all parts" if row["op"] == "mta" else where[row["conv_every"]]
        shown = attention if row["impl"] == "auto" else f"{attention}, {row['impl']}"
        rate, share = f"{float(row['tokens_s']):,.0f}", over(row, plain, percent=True)
        return [MODELS[name], row["batch"], shown, rate, share]

    files = {name: read(f"{name}.csv") for name in MODELS}
    header = ("model", "sequences", "attention", "tokens/s", "of plain's")
    return lines(
        header, (line(name, row, rows) for name, rows in files.items() for row in rows if row["impl"] != "plain")
    )


def host_time() -> Iterator[str]:
    """Host time of a forward without and with gradients: the least, and the median."""
    rows = read("host-time.csv", **{"pass": "fwd"})
    names = [name for name in dict.fromkeys(row["impl"] for row in rows) if name != "nothing"]
    found = {(row["impl"], row["gradient"]): row for row in rows}
    return lines(
        ("implementation", "without gradients", "with"),
        (
            [f"`{name}`"]
            + [
                f"{float(row['least_us']):.0f}, {float(row['median_us']):.0f} us"
                for row in (found[name, gradient] for gradient in ("False", "True"))
            ]
            for name in names
        ),
    )


# Folders of counters: the least share of a call's time that a kernel needs here, and which rows.
COUNTED: Mapping[str, tuple[float, Where]] = {
    "fwd-lengths": (0.1, {"seq": 16384}),
    "bwd-lengths": (0.1, {"seq": 16384}),
    "mta-mix-fwd": (0.1, {}),
    "decode": (0.2, {"seq": 65536, "head_dim": 128}),
}


def heads_of(row: Row) -> str:
    """Query heads, and KV heads where these are fewer."""
    return row["heads"] if row["heads"] == row["kv_heads"] else f"{row['heads']} / {row['kv_heads']}"


def counters() -> Iterator[str]:
    """Counters of the kernels that take most of a call."""
    shape = ("pass", "op", "batch", "heads", "kv_heads", "seq", "head_dim")

    def found() -> Iterator[list[str]]:
        for folder, (least, where) in COUNTED.items():
            rows = read(f"profile/{folder}/counters.csv", **where)
            for row in rows:
                whole = sum(
                    float(x["us"]) for x in rows if [x[name] for name in shape] == [row[name] for name in shape]
                )
                if float(row["us"]) >= least * whole:
                    yield [
                        f"`{row['kernel']}`", f"{heads_of(row)} x {row['head_dim']}",
                        f"{row['batch']} x {row['seq']}", f"{float(row['us']):.4g}",
                        *(f"{float(row[f'{unit}_pct']):.0f}" for unit in ("tensor", "shared", "l2", "memory")),
                        row["bound_by"],
                    ]  # fmt: skip

    header = ("kernel", "heads x dim", "tokens", "us", "tensor", "shared", "L2", "DRAM", "bound by")
    return lines(header, found())


def noise() -> Iterator[str]:
    """What comparing can detect."""
    header = ("implementation, tokens", "median", "noise of a pair", "`compare`: false alarms", "`ab`", "`ab` detects")
    return lines(
        header,
        (
            [f"`{row['impl']}`, {row['seq']}", time_of(row), f"{100 * float(row['pair_noise']):.2g} %"]
            + [f"{row[f'{by}_false_alarms']} of {row[f'{by}_comparisons']}" for by in ("compare", "ab")]
            + [f"{100 * float(row['smallest_change']):.2g} %"]
            for row in read("noise.csv")
        ),
    )


def time_of(row: Row) -> str:
    """A median that has no interval."""
    return f"{float(row['median_ms']):.3g} ms"


SHAPE = ("head_dim", "seq")
FUSED, OVER = by_impl("triton", CUDNN), over_cudnn("triton")
PLAIN = by_impl("eager", "cuda-conv", "hopper", CUDNN), over_cudnn("hopper")
LAYERS = by_impl("eager", "compile", "triton", CUDNN)
SM80 = (
    {
        f"{name}, {label}": {"pass": pass_, "impl": impl}
        for name, pass_ in (("forward", "fwd"), ("backward", "bwd"))
        for label, impl in (("`cuda`", "cuda"), ("FlashAttention-2", "sdpa-flash"), ("`triton`", "triton"))
    },
    {
        f"{name} over {label}": (f"{name}, `cuda`", f"{name}, {label}")
        for name in ("forward", "backward")
        for label in ("FlashAttention-2", "`triton`")
    },
    ("forward, `cuda`", "backward, `cuda`"),
)
FORWARDS = {
    f"{impl} {dim}": {"impl": impl, "head_dim": dim} for dim in (64, 96, 128) for impl in ("hopper", "sdpa-cudnn")
}
PASSES = {
    label: {"pass": pass_, "impl": impl}
    for name, pass_ in (("forward", "fwd"), ("backward", "bwd"))
    for label, impl in ((name, "triton"), (f"cuDNN {pass_}", "sdpa-cudnn"))
}
BOTH = ("forward", "backward")
OVERS = {"forward over cuDNN": ("forward", "cuDNN fwd"), "backward over cuDNN": ("backward", "cuDNN bwd")}
RATIOS = {f"head dim {dim}": (f"hopper {dim}", f"sdpa-cudnn {dim}") for dim in (64, 96, 128)}
BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {
    "forward": partial(
        times, ["fwd.csv"], SHAPE, by_impl("eager", "cuda-conv", "triton", "hopper", CUDNN, FLASH),
        over_cudnn("hopper"), seq=LENGTHS,
    ),
    "readme": partial(
        times, ["fwd.csv"], ("head_dim",), *PLAIN, seq=4096,
    ),
    "forward-ratios": partial(times, ["hopper-fwd.csv"], ("seq",), FORWARDS, RATIOS, shown=()),
    "long": partial(times, ["long-fwd.csv", "long-bwd.csv"], ("pass", "head_dim"), by_impl("triton", "hopper")),
    "backward": partial(times, ["hopper-bwd.csv"], SHAPE, by_impl("hopper", CUDNN, FLASH), over_cudnn("hopper")),
    "sm80": partial(times, ["sm80-fwd.csv", "sm80-bwd.csv"], SHAPE, *SM80),
    "decode": partial(
        times, ["decode.csv"], SHAPE, by_impl("eager", "triton", CUDNN, FLASH), OVER, unit="us", seq=(16384, 65536)
    ),
    "grouped": grouped,
    "mix": partial(times, ["mta-mix-fwd.csv", "mta-mix-bwd.csv"], SHAPE, PASSES, OVERS, BOTH, head_dim=(64, 128)),
    "all": partial(times, ["mta-all-fwd.csv", "mta-all-bwd.csv"], SHAPE, PASSES, OVERS, BOTH, head_dim=(64, 128)),
    "550m": partial(times, ["mta-550m.csv"], ("pass",), LAYERS, OVER),
    "550m-all": partial(times, ["mta-550m-all.csv"], ("pass",), LAYERS, OVER, seq=2048),
    "mta-decode": partial(
        times, ["mta-decode.csv"], SHAPE, by_impl("auto", CUDNN), {"share of cuDNN's speed": ("`auto`", CUDNN)},
        shown=["`auto`"], unit="us", percent=True, seq=(4096, 65536), head_dim=(64, 128),
    ),
    "models": models,
    "host-time": host_time,
    "counters": counters,
    "ladder-cpu": columns_of("../cpu/ladder.csv", [(64, 1024), (128, 1024)]),
    "ladder": columns_of("ladder.csv", [(dim, seq) for dim in (64, 128) for seq in (1024, 16384)]),
    "noise": noise,
}  # fmt: skip
