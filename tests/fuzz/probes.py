"""Changes of a case's arguments that must not change some of its results: the future, what stands apart, garbage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from fuzz.inputs import HUGE, NO_PAGE, Inputs

LARGE = 1e3
OF_QUERIES = ("q", "q_history", "grad_out")


@dataclass(frozen=True)
class Probe:
    """Other `values` by name, and which `rows` of which results stay as they are: masks `[..]` by name."""

    check: str
    text: str
    values: dict[str, Tensor]
    rows: dict[str, Tensor]


def probe_of(inputs: Inputs) -> Probe | None:
    """What the case asks for; None where there is nothing to change."""
    case = inputs.case
    made = {
        "future": _future, "other documents": _other_documents, "other sequences": _other_sequences,
        "other heads": _other_heads, "beyond lengths": _beyond_lengths,
    }.get(case.probe)  # fmt: skip
    return made(inputs, Random(f"{case.seed} {case.number} probe")) if made else None


def _other(inputs: Inputs, random: Random, name: str, where: Tensor, may_be_huge: bool = True) -> Tensor:
    """The values of an argument, with others where a mask `[.., 1]` says so: ordinary ones, large ones or huge ones."""
    case, x = inputs.case, inputs.values[name]
    factor = random.choice((1.0, LARGE, HUGE[case.dtype] if may_be_huge else LARGE))
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
    values = {name: _other(inputs, random, name, ~kept[:, None]) for name in ("q", "k", "v", "grad_out") if name in x}
    text = f"what stands outside the document of rows {start} to {stop}"
    return Probe("documents apart", text, values, dict.fromkeys(("out", "dq", "dk", "dv"), kept))


def _other_sequences(inputs: Inputs, random: Random) -> Probe:
    case, x = inputs.case, inputs.values
    number = random.randrange(case.batch)
    kept = torch.arange(case.batch, device=x["q"].device) == number
    values: dict[str, Tensor] = {
        name: _other(inputs, random, name, ~kept[:, None, None, None]) for name in x if name in OF_QUERIES
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
    return Probe("sequences apart", f"what is not sequence {number}", values, rows)


def _other_heads(inputs: Inputs, random: Random) -> Probe:
    case, x = inputs.case, inputs.values
    together, group = case.heads_that_meet, case.heads // case.kv_heads
    number = random.randrange(case.heads // together)
    of_queries = torch.arange(case.heads, device=x["q"].device) // together == number
    kept = of_queries[::group]
    values = {name: _other(inputs, random, name, ~kept[:, None, None]) for name in ("k", "v")}
    values |= {name: _other(inputs, random, name, ~of_queries[:, None, None]) for name in x if name in OF_QUERIES}
    rows = {name: of_queries[:, None] for name in ("out", "dq", "dq_history", "dweight", "dpre_conv", "dpost_conv")}
    rows |= {name: kept[:, None] for name in ("dk", "dv")}
    text = f"what is not of query heads {number * together} to {(number + 1) * together - 1}"
    return Probe("heads apart", text, values, rows)


def _beyond_lengths(inputs: Inputs, random: Random) -> Probe:
    """Ordinary numbers where NaN was, and other nonsense in the table."""
    values = {name: _other(inputs, random, name, inputs.values[name].isnan()) for name in ("k", "v")}
    if "block_table" in inputs.values:
        table = inputs.values["block_table"]
        unused = (table < 0) | (table >= inputs.values["k"].shape[0])
        values["block_table"] = torch.where(unused, torch.full_like(table, random.choice((0, *NO_PAGE))), table)
    everything = torch.ones(1, dtype=torch.bool, device=inputs.values["q"].device)
    return Probe("beyond lengths", "what stands in the cache beyond the lengths", values, {"out": everything})
