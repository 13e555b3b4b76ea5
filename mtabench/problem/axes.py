"""The range grammar of the command line: `512,1k`, `1k..16k`, `1k..4k:+1k`, `1k..64k:x4`, `6x11,7`."""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mta_kernels.operation import PAGE_SIZES
from mtabench.errors import UsageError
from mtabench.problem.case import DTYPES
from mtabench.problem.operations import GATES, NONE, NORMS, Taps, gate_of, group_sizes, norm_of, taps_text

UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_QUERY_TAPS = 16
MAX_KEY_TAPS = 31
MAX_SPLITS = 128
MAX_VALUES = 1000
MAX_NUMBER = 2**30  # no GPU holds a row of so many tokens

TIMES = "xX\N{MULTIPLICATION SIGN}"
_INTEGER = re.compile(r"(\d{1,40})([km]?)", re.IGNORECASE | re.ASCII)
_TAPS = re.compile(rf"(\d{{1,4}})(?:\s*[{TIMES}]\s*(\d{{1,4}}))?", re.ASCII)
_RANGE = re.compile(rf"(?P<first>[^.:]*)\.\.(?P<last>[^.:]*)(?::(?P<sign>[+*{TIMES}])(?P<step>.*))?")
_EXPECTED = "expected numbers such as 512,1k,4k or a range such as 1k..16k, 1k..4k:+1k or 1k..64k:x4"


@dataclass(frozen=True, slots=True)
class Preset:
    """A model: `conv` is (query taps, key taps), `seq` the training length in tokens."""

    heads: int
    head_dim: int
    layers: int
    conv: Taps = (6, 11)
    seq: int = 2048

    def layer(self, name: str) -> dict[str, str]:
        """The steps of a layer, as typed: of `mix`, three in four, or of `full`; raises UsageError for any other."""
        convs = {"mix": NONE, "full": taps_text(*self.conv)}
        if name not in convs:
            raise UsageError(
                f"there is no layer {name!r}; expected mix, which mixes heads alone, or full, which convolves as well"
            )
        return {"conv": convs[name], "mix": "heads", "post_conv": convs[name], "norm": "rms", "gate": "one"}


PRESETS = {
    "mta-300m": Preset(heads=16, head_dim=64, layers=20),
    "mta-550m": Preset(heads=10, head_dim=128, layers=24),
    "mta-830m": Preset(heads=16, head_dim=96, layers=24),
    "mta-1b": Preset(heads=16, head_dim=128, layers=24),
}


def parse_ints(text: str, what: str) -> list[int]:
    """The positive integers that `text` names, in the order given, each once; `what` is named in errors.

    Raises UsageError for an empty, descending or malformed text.
    """
    values: list[int] = []
    for part in _parts(text, what, _EXPECTED):
        found = _expand(part, what) if ".." in part else [_integer(part, what)]
        values.extend(found)
        if len(values) > MAX_VALUES:
            raise UsageError(f"{what} {text!r} names more than {MAX_VALUES} values; take a larger step")
    return list(dict.fromkeys(values))


def parse_int(text: str, what: str) -> int:
    """The one positive integer in `text`, with the suffixes k and m; raises UsageError otherwise."""
    values = parse_ints(text, what)
    if len(values) != 1:
        raise UsageError(f"{what} takes one number, and {text!r} names {len(values)}")
    return values[0]


def parse_head_dims(text: str) -> list[int]:
    """The head dims in a list such as "64,128"; raises UsageError for one out of range."""
    head_dims = parse_ints(text, "--head-dim")
    for head_dim in head_dims:
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
            raise UsageError(f"--head-dim {head_dim} is out of range; expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    return head_dims


def parse_percent(text: str, what: str) -> float:
    """0.02 for "2%"; raises UsageError for what is not a percentage between 0 and 100."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not text.strip().endswith("%") or not 0 < percent < 100:
        raise UsageError(f"{what} {text!r} is no share of a time; expected a percentage such as 2% or 0.5%")
    return percent / 100


def parse_convs(text: str) -> list[Taps]:
    """The convolutions as (query taps, key taps): `6x11,3x3`, and `7` for 7x7; raises UsageError."""
    expected = "expected query taps x key taps, such as 6x11,3x3, or 7 for 7x7"
    return list(dict.fromkeys(_taps(part, "--conv", expected) for part in _parts(text, "--conv", expected)))


def parse_optional_convs(text: str, what: str) -> list[Taps | None]:
    """The same of an operation's step called `what`, which `none` leaves out."""
    expected = "expected query taps x key taps, such as 6x11,3x3, or 7 for 7x7, or none"
    parts = _parts(text, what, expected)
    return list(dict.fromkeys(None if part.lower() == NONE else _taps(part, what, expected) for part in parts))


def parse_mixes(text: str) -> list[str]:
    """The mixings of heads, each as `operations.group_sizes` reads it: `heads,4,none`; raises UsageError."""
    # Whether they divide the heads is seen with the heads.
    return _each(text, "--mix", "expected heads, none or a number of heads a group", group_sizes)


def parse_norms(text: str) -> list[str]:
    """The norms of each head's output, each as `operations.norm_of` reads it: `rms,depth2,none`; raises UsageError."""
    return _each(text, "--norm", NORMS, norm_of)


def parse_gates(text: str) -> list[str]:
    """The gates of each head's output, each as `operations.gate_of` reads it: `one,full,none`; raises UsageError."""
    return _each(text, "--gate", f"expected one or more of {', '.join(GATES)}", gate_of)


def parse_splits(text: str) -> list[int | str]:
    """The numbers of splits of a decode sweep, 1 to MAX_SPLITS, "auto" among them if named; raises UsageError."""
    expected = f"expected auto, or numbers from 1 to {MAX_SPLITS} such as auto,1..{MAX_SPLITS}"
    return _numbers(text, "--splits", expected, {"auto": "auto"}, range(MAX_SPLITS + 1), "out of range")


def parse_page_sizes(text: str) -> list[int | None]:
    """The sizes of a cache's pages in keys, each one of PAGE_SIZES; None, typed `none`, is a contiguous cache.

    Raises UsageError.
    """
    expected = f"expected none, which is a contiguous cache, or keys a page: {', '.join(map(str, PAGE_SIZES))}"
    return _numbers(text, "--page-size", expected, {NONE: None}, PAGE_SIZES, "no size that pages can have")


def parse_names(text: str, what: str) -> list[str]:
    """The comma-separated names in `text`, in order, each once; raises UsageError for an empty one.

    A path of a file `.py` may have commas in the names of its folders.
    """
    names: list[str] = []
    for part in _parts(text, what, "expected names separated by commas, such as eager,triton"):
        begun = bool(names) and re.match(r"([^/,]*=)?[./~]", names[-1]) and ".py" not in names[-1]
        names[-1:] = [f"{names[-1]},{part}"] if begun else [*names[-1:], part]
    return list(dict.fromkeys(names))


def parse_dtypes(text: str) -> list[str]:
    """The element types in `text`, in order, each once; raises UsageError for a name that is not in DTYPES."""
    expected = f"expected one or more of {', '.join(DTYPES)}"
    dtypes = list(dict.fromkeys(_parts(text, "--dtype", expected)))
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"--dtype {dtype!r} is not known; {expected}")
    return dtypes


def find_preset(name: str) -> Preset:
    """The preset of that name; raises UsageError that lists those there are."""
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def short(value: int) -> str:
    """`value` as one would type it: 4096 is 4k, 1000 stays 1000."""
    for suffix in ("m", "k"):
        if value % UNITS[suffix] == 0 and value > 0:
            return f"{value // UNITS[suffix]}{suffix}"
    return str(value)


def _parts(text: str, what: str, expected: str) -> Iterator[str]:
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise UsageError(f"{what} is empty; {expected}")
    if not all(parts):
        raise UsageError(f"{what} {text!r} has an empty place between commas; {expected}")
    return iter(parts)


def _each(text: str, what: str, expected: str, check: Callable[[str], object]) -> list[str]:
    """The names in a list, in lower case, each once, for each of which `check` raises no UsageError."""
    names = list(dict.fromkeys(part.lower() for part in _parts(text, what, expected)))
    for name in names:
        check(name)
    return names


def _numbers(
    text: str, what: str, expected: str, words: Mapping[str, Any], known: Container[int], wrong: str
) -> list[Any]:
    """The numbers in a list that are `known`, and the values of `words`, each once; raises UsageError."""
    values: list[Any] = []
    for part in _parts(text, what, expected):
        if part.lower() in words:
            values.append(words[part.lower()])
            continue
        if not part[:1].isdigit():
            raise UsageError(f"{what} cannot read {part!r}; {expected}")
        numbers = parse_ints(part, what)
        if not all(number in known for number in numbers):
            raise UsageError(f"{what} {part} is {wrong}; {expected}")
        values.extend(numbers)
    return list(dict.fromkeys(values))


def _taps(part: str, what: str, expected: str) -> Taps:
    match = _TAPS.fullmatch(part)
    if not match:
        raise UsageError(f"{what} cannot read {part!r}; {expected}")
    taps = (int(match[1]), int(match[2] or match[1]))
    if not (1 <= taps[0] <= MAX_QUERY_TAPS and 1 <= taps[1] <= MAX_KEY_TAPS):
        raise UsageError(
            f"{what} {part} is out of range; "
            f"query taps go from 1 to {MAX_QUERY_TAPS} and key taps from 1 to {MAX_KEY_TAPS}"
        )
    return taps


def _integer(text: str, what: str) -> int:
    match = _INTEGER.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{what} cannot read {text!r}; {_EXPECTED}")
    value = int(match[1]) * UNITS[match[2].lower()]
    if value < 1:
        raise UsageError(f"{what} is {text}; it must be at least 1")
    if value > MAX_NUMBER:
        raise UsageError(f"{what} {text} is out of range; expected at most {short(MAX_NUMBER)}")
    return value


def _expand(part: str, what: str) -> list[int]:
    """`1k..16k` doubles, `:+1k` adds, `:x4` multiplies; both ends are always included."""
    match = _RANGE.fullmatch(part)
    if not match:
        raise UsageError(f"{what} cannot read the range {part!r}; {_EXPECTED}")
    for end in ("first", "last"):
        if not match[end].strip():
            raise UsageError(f"{what} {part!r} has no {end} number; {_EXPECTED}")
    first, last = _integer(match["first"], what), _integer(match["last"], what)
    if first > last:
        raise UsageError(f"{what} {part!r} descends; write the smaller end first: {match['last']}..{match['first']}")
    adds = match["sign"] == "+"
    step = _integer(match["step"], f"the step of {what} {part!r}") if match["sign"] else 2
    if not adds and step < 2:
        raise UsageError(f"{what} {part!r} multiplies by {step} and never ends; take x2 or more, or add with :+1k")
    values: list[int] = []
    value = first
    while value < last and len(values) <= MAX_VALUES:
        values.append(value)
        value = value + step if adds else value * step
    return [*values, last]
