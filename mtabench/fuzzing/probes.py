"""Changes of a case's arguments that must not change some of its results: the future, what stands apart, garbage."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from mtabench.fuzzing.inputs import HUGE, NO_PAGE, Inputs


@dataclass(frozen=True)
class Probe:
    """Other `values` by name, and which `rows` of which results stay as they are: masks `[..]` by name.

    `close` are masks `[.., 1]` of those that stay as they are but for rounding.
    """

    check: str
    text: str
    values: dict[str, Tensor]
    rows: dict[str, Tensor]
    close: dict[str, Tensor] = field(default_factory=dict)


def probe_of(inputs: Inputs) -> Probe | None:
    """What the case asks for; None where there is nothing to change."""
    case = inputs.case
    made = {
        "future": _future, "other documents": _other_documents, "other sequences": _other_sequences,
        "other heads": _other_heads, "beyond lengths": _beyond_lengths,
    }.get(case.probe)  # fmt: skip
    return made(inputs, Random(f"{case.seed} {case.number} probe")) if made else None


def _other(inputs: Inputs, random: Random, name: str, where: Tensor, may_be_huge: bool = True) -> Tensor:
    """The values of an argument, with others where a mask `[.., 1]` says so: ordinary ones, or huge ones."""
    case, x = inputs.case, inputs.values[name]
    factor = random.choice((1.0, 1.0, HUGE[case.dtype] if may_be_huge else 1.0))
    generator = torch.Generator(x.device).manual_seed(random.getrandbits(40))
    changed = torch.randn(x.shape, generator=generator, device=x.device) * factor
    return torch.where(where, changed.to(x.dtype), x)


def _future(inputs: Inputs, random: Random) -> Probe | None:
    case, x = inputs.case, inputs.values
    first = case.seq_len - case.query_rows
    if case.query_rows == 1:
        return None
    token = random.choice((case.seq_len - 2, random.randint(first, case.seq_len - 2)))
    keys = torch.arange(case.seq_len, device=x["k"].device) > token
    queries = keys[first:]
    values = {name: _other(inputs, random, name, keys[:, None]) for name in ("k", "v")}
    values["q"] = _other(inputs, random, "q", queries[:, None])
    return Probe("causality", f"what comes after token {token}", values, {"out": ~queries})


def _other_documents(inputs: Inputs, random: Random) -> Probe | None:
    x = inputs.values
    documents = [(start, stop) for start, stop in pairwise(inputs.case.bounds) if start < stop]
    start, stop = random.choice(documents)
    row = torch.arange(inputs.case.seq_len, device=x["q"].device)
    kept = (row >= start) & (row < stop)
    values = {name: _other(inputs, random, name, ~kept[:, None]) for name in ("q", "k")}
    # Rows of a backward share a power of two: huge values cost those beside them precision.
    values["v"] = _other(inputs, random, "v", ~kept[:, None], may_be_huge=inputs.case.pass_ != "bwd")
    text = f"what stands outside the document of rows {start} to {stop}"
    close = {name: kept[:, None] for name in ("dq", "dk", "dv")}
    return Probe("documents apart", text, values, {"out": kept}, close)


def _other_sequences(inputs: Inputs, random: Random) -> Probe:
    case, x = inputs.case, inputs.values
    number = random.randrange(case.batch)
    kept = torch.arange(case.batch, device=x["q"].device) == number
    values: dict[str, Tensor] = {
        name: _other(inputs, random, name, ~kept[:, None, None, None]) for name in x if name in ("q", "q_history")
    }
    own_rows = kept
    if "block_table" in x:
        size = case.page_size or 1
        used = -(-int(x["lengths"][number]) // size)
        own_rows = torch.zeros(x["k"].shape[0], dtype=torch.bool, device=kept.device)
        own_rows[x["block_table"][number, :used].long()] = True
    for name in ("k", "v"):
        values[name] = _other(inputs, random, name, ~own_rows[:, None, None, None])
    rows = {name: kept[:, None, None] for name in ("out", "dq", "dk", "dv", "dq_history")}
    return Probe("sequences apart", f"what is not sequence {number}", values, _own(inputs, rows))


def _own(inputs: Inputs, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the results that are apart: all gradients of multi-token attention in float16 share a power of two."""
    is_shared = inputs.case.parts is not None and inputs.case.dtype == "fp16"
    return {"out": rows["out"]} if is_shared else rows


def _other_heads(inputs: Inputs, random: Random) -> Probe:
    case, x = inputs.case, inputs.values
    number, group = random.randrange(case.kv_heads), case.heads // case.kv_heads
    kept = torch.arange(case.kv_heads, device=x["q"].device) == number
    of_queries = kept.repeat_interleave(group)
    values = {name: _other(inputs, random, name, ~kept[:, None, None]) for name in ("k", "v")}
    values |= {
        name: _other(inputs, random, name, ~of_queries[:, None, None]) for name in x if name in ("q", "q_history")
    }
    rows = {name: of_queries[:, None] for name in ("out", "dq", "dq_history")}
    rows |= {name: of_queries[:, None] for name in ("dweight", "dpre_conv", "dpost_conv")}
    rows |= {name: kept[:, None] for name in ("dk", "dv")}
    return Probe("heads apart", f"what is not of KV head {number}", values, _own(inputs, rows))


def _beyond_lengths(inputs: Inputs, random: Random) -> Probe:
    """Ordinary numbers where NaN was, and other nonsense in the table."""
    values = {name: _other(inputs, random, name, inputs.values[name].isnan()) for name in ("k", "v")}
    if "block_table" in inputs.values:
        table = inputs.values["block_table"]
        unused = (table < 0) | (table >= inputs.values["k"].shape[0])
        values["block_table"] = torch.where(unused, torch.full_like(table, random.choice((0, *NO_PAGE))), table)
    everything = torch.ones(1, dtype=torch.bool, device=inputs.values["q"].device)
    return Probe("beyond lengths", "what stands in the cache beyond the lengths", values, {"out": everything})
