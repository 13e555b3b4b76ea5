"""Texts on charts: short enough for their place as the font is drawn, shapes and factors in words, the caption."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import floor, log10
from typing import Any

import pandas as pd
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from mtabench.measuring.settled import meaning
from mtabench.problem.axes import short
from mtabench.problem.case import CACHED_PASSES
from mtabench.problem.operations import step_words

NAME_LENGTH = 32  # characters of an implementation's name that are shown
PART_LENGTH = 80  # of one part of the caption
MOST_VALUES = 4  # of a column, in the caption
HINTING = 1.03  # letters that are fitted to pixels take a little more room than their outlines
TIMES = "\N{MULTIPLICATION SIGN}"


def shortened(text: str, length: int = NAME_LENGTH) -> str:
    """The text, without its middle if it is longer than `length` characters."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return f"{text[:head]}\N{HORIZONTAL ELLIPSIS}{text[-(length - 1 - head) :]}"


@cache
def inches(text: str, size: float, bold: bool = False) -> float:
    """How wide one line is at most when drawn in our font at `size` points."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72 * HINTING


def fitted(text: str, width: float, size: float, bold: bool = False) -> str:
    """The text, without as much of its middle as makes it fit into `width` inches."""
    while inches(text, size, bold) > width and len(text) > 2:
        text = shortened(text, len(text) * 19 // 20)
    return text


def filled(parts: Iterable[str], between: str, width: float, size: float, bold: bool = False) -> str:
    """The parts one after the other, in lines at most `width` inches wide that break between parts.

    A part that is wider breaks between its words, and a word that is wider loses its middle.
    """
    lines: list[str] = []
    used = 0.0
    for part in parts:
        if inches(part, size, bold) > width and " " in part:
            lines += filled(part.split(" "), " ", width, size, bold).split("\n")
            used = width
            continue
        part = fitted(part, width, size, bold)
        more = inches(between, size, bold) + inches(part, size, bold)
        if lines and used + more <= width:
            lines[-1] += between + part
            used += more
        else:
            lines.append(part)
            used = inches(part, size, bold)
    return "\n".join(lines)


def balanced(title: str, width: float, size: float) -> str:
    """A bold title in as few lines as it takes, none much shorter than the others."""
    words = title.split(" ")
    best = filled(words, " ", width, size, bold=True)
    widest = max(inches(word, size, bold=True) for word in words)
    while "\n" in best:
        width *= 0.97
        narrower = filled(words, " ", width, size, bold=True)
        if narrower.count("\n") > best.count("\n") or width < widest:
            break
        best = narrower
    return best


def digits_kept(value: float, half: float, least: int) -> int:
    """How many digits after the point are significant: at most `least`, and fewer if a number's interval is wide.

    `half` is half the interval as a part of the value, 0 if unknown. The last digit's place is at most twice that, so
    that another one would be chance: 7.02 within 21 % is 7. The first digit stays.
    """
    if not half or not value:
        return least
    return min(least, max(-floor(log10(2 * half * abs(value))), -floor(log10(abs(value)))))


def percent(share: float, half: float = 0.0) -> str:
    """A share in percent, with the digits that its interval leaves; the sign stays on the line of its number."""
    value = round(share * 100, digits_kept(share * 100, half, 6))
    return f"{number(round(value)) if value >= 9.5 else f'{value:.2g}'}\N{NO-BREAK SPACE}%"


def factor(value: float, half: float = 0.0) -> str:
    """A factor with its significant digits: 0.031, 1.04, 3.2, 142; fewer where its interval is wide."""
    if value < 0.095 or value >= 1e7:
        return f"{value:.2g}"
    digits = digits_kept(value, half, 2 if value < 1.995 else 1 if value < 9.95 else 0)
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def number(value: float, half: float = 0.0) -> str:
    """A number with at least three digits that count, or as many as its interval leaves.

    It has the form 1e+08 only where any other is unreadable.
    """
    value = round(value, digits_kept(value, half, 300))
    return f"{value:,.0f}" if 999.5 <= value < 1e7 else f"{value:.3g}"


def milliseconds(value: float, half: float = 0.0) -> str:
    """A time for people."""
    return f"{number(value, half)} ms"


def span(values: pd.Series, halves: pd.Series, words: Callable[[float, float], str]) -> str:
    """The least and the greatest value in words, or one where they read the same.

    `words` takes a value and half its interval as a part of it.
    """
    ends = values.argmin(), values.argmax()
    least, greatest = (words(values.iloc[place], halves.iloc[place]) for place in ends)
    return least if least == greatest else f"{least} to {greatest}"


def tokens(cells: pd.DataFrame, seq: float) -> str:
    """A sequence length in words; in decode it is the cache's length."""
    return f"{short(int(seq))} {'cached ' if _cached(cells).any() else ''}tokens"


def length_label(cells: pd.DataFrame) -> str:
    """The label of an axis of sequence lengths."""
    return "cache length (tokens)" if _cached(cells).any() else "sequence length (tokens)"


def _cached(cells: pd.DataFrame) -> pd.Series:
    return cells["pass"].isin(CACHED_PASSES)


def problem(head_dim: float, *operation: Any) -> str:
    """Head dim and steps in words; `operation` has the values of OPERATION_COLUMNS."""
    return f"head dim {head_dim:g}, {steps(*operation) or 'plain attention'}"


def steps(
    conv_q: float, conv_k: float, mix: str, post_q: float, post_k: float, norm: str = "", gate: str = "",
    conv_every: str = "", page_size: str = "",
) -> str:  # fmt: skip
    """What is more than plain attention, in words; a convolution that is not there has no taps, or 0."""
    conv, post_conv = (f"{q:g}x{k:g}" if q > 0 and k > 0 else "" for q, k in ((conv_q, conv_k), (post_q, post_k)))
    return step_words(mix, conv, post_conv, norm, gate, conv_every, page_size).replace("conv ", "convolution ")


def caption(cells: pd.DataFrame, how: str, notes: Sequence[str] = ()) -> list[list[str]]:
    """What was measured, how it is shown, where and with which versions: paragraphs, each of parts."""
    heads = _texts(cells, "heads")
    if _texts(cells, "kv_heads") != heads:
        heads += f" query and {_texts(cells, 'kv_heads')} KV"
    batch = cells["batch_name"].iloc[0].replace("tokens", "tokens a batch")
    setting = [_texts(cells, "dtype"), f"{heads} head{'s' * (heads != '1')}", batch]
    if layers := _texts(cells, "layers"):
        setting.insert(1, f"{layers} layer{'s' * (layers != '1')}")
    if not _cached(cells).any():
        setting.append("causal" if cells["causal"].all() else "not causal")
    if (cells["cache"] != "").any():
        setting.append(f"{_texts(cells, 'cache')} cache")
    setting.append(how)
    versions = [f"{name} {_texts(cells, name)}" for name in ("driver", "cuda", "torch", "triton", "mtabench")]
    versions = [_texts(cells, "device"), *(text for text in versions if not text.endswith(" "))]
    revisions = list(dict.fromkeys(sha[:9] for sha in cells["git_sha"] if sha))
    if revisions:
        changed = " with local changes" if (cells["git_dirty"] == "true").any() else ""
        versions.append(f"git {_some(revisions)}{changed}")
    return [setting, *([note] for note in notes), versions]


def unsettled_note(cells: pd.DataFrame, mark: str = "hollow") -> list[str]:
    """How many of the cells' times did not settle and why that is so, for the caption; nothing if all did."""
    timed = cells[cells["status"] == "ok"]
    marked: list[Any] = timed[timed["unsettled"]].to_dict("records")
    return [f"{mark}: {len(marked)} of {len(timed)} times {meaning(marked)}"] if marked else []


def _texts(cells: pd.DataFrame, name: str) -> str:
    """The values of a column, joined: one where all rows agree."""
    values = dict.fromkeys(cells[name])
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values if value != ""]
    return shortened(_some(texts), PART_LENGTH)


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - MOST_VALUES} more" if len(texts) > MOST_VALUES else ""
    return ", ".join(shortened(text, PART_LENGTH) for text in texts[:MOST_VALUES]) + more
