"""Names of cells: one name that is the same in every report, and in tables the parts that distinguish cells."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtabench.problem.axes import short
from mtabench.problem.operations import PLAIN, named_steps, page_size_text, taps_text
from mtabench.tables import Column

*PLAIN_LACKS, PAGE_SIZE = STEPS = tuple(named_steps("", "", ""))
WORDS = {
    **{name: f"{name} {{}}" for name in STEPS},
    "splits": "splits {}",
    "layers": "layers {}",
    "batch": "batch {}",
    "heads": "heads {}",
    "seq": "seq {}",
    "head dim": "head dim {}",
}
STAYS = ("impl", "seq")  # a row has both, whatever the others have
TO_THE_LEFT = ("pass", "impl", "dtype", "causal")


class ToldApart(NamedTuple):
    """What all cells share, in words; columns of what distinguishes them, and the same as a name in words."""

    shared: str
    columns: list[Column]
    names: Iterator[str]


def name_of(row: Mapping[str, Any]) -> str:
    """A cell in words, the same in every report; `row` is of `read_results`."""
    return _words(_parts(row))


def told_apart(rows: Sequence[Mapping[str, Any]]) -> ToldApart:
    """The cells of some rows, at least one. Steps or splits that some cells cannot have are shared if others do."""
    parts = [_parts(row) for row in rows]
    if any(one[PAGE_SIZE] for one in parts):
        parts = [one | {PAGE_SIZE: page_size_text(one["pass"], one[PAGE_SIZE])} for one in parts]
    shared, columns = {}, []
    for name in parts[0]:
        texts = [one[name] for one in parts]
        values = set(texts) - ({""} if name == "splits" else set())
        if name in PLAIN_LACKS:
            values = {text for text, row in zip(texts, rows, strict=True) if row["op"] != PLAIN}
        if name not in STAYS and len(values) <= 1:
            shared[name] = next(iter(values), "")
            continue
        shown = [short(int(text)) for text in texts] if name == "seq" else texts
        columns.append(Column(name, shown, 0, "left" if name in TO_THE_LEFT else "right", name not in STAYS))
    columns.sort(key=lambda column: not column.apart)
    names = (_words({name: value for name, value in one.items() if name not in shared}) for one in parts)
    return ToldApart(_words(shared, ", "), columns, names)


def _words(parts: Mapping[str, str], separator: str = " ") -> str:
    return separator.join(WORDS.get(name, "{}").format(value) for name, value in parts.items() if value)


def _parts(row: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a name, empty where a cell has no such thing."""
    heads, kv_heads = int(row["heads"]), int(row["kv_heads"])
    conv, post_conv = (
        "" if math.isnan(row[f"{name}_q"]) else taps_text(int(row[f"{name}_q"]), int(row[f"{name}_k"]))
        for name in ("conv", "post_conv")
    )
    return {
        "pass": row["pass"],
        "impl": row["impl"],
        "splits": row["splits"],
        "dtype": row["dtype"],
        "layers": row["layers"],
        "batch": f"{int(row['batch'])}",
        "heads": f"{heads}" + (f" (KV {kv_heads})" if kv_heads != heads else ""),
        "seq": f"{int(row['seq'])}",
        "head dim": f"{int(row['head_dim'])}",
        **named_steps(row["mix"], conv, post_conv, row["norm"], row["gate"], row["conv_every"], row["page_size"]),
        "causal": "" if row["causal"] else "not causal",
    }
