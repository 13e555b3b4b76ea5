"""The tensors of a case, and what its results should be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from mtabench.fuzzing.cases import FuzzCase
from mtabench.fuzzing.definition import OF_ROWS, Expected, Problem, Rounding, expected_results
from mtabench.fuzzing.layouts import as_laid_out
from mtabench.fuzzing.mta_inputs import expected_by_mta, largest_growth, mta_values, padding, softmax_scale, taps_of
from mtabench.problem.inputs import DTYPES

HUGE = {"fp16": 2e3, "bf16": 1e8, "fp32": 1e8}
LARGE_VALUE = 100.0  # in a backward in 16 bits, where a huge one costs other gradients precision
LARGE_SCORE = 6e4
LARGEST_FACTOR = 1e3  # on q and k, for large scores: no more than float16 holds
NO_PAGE = (-1, 2**31 - 1, 10**6)


@dataclass(frozen=True)
class Inputs:
    """Values by name, each contiguous and as its layout gives them.

    "q", "k", "v", "weight", and as the case has them "q_history", "grad_out", "cu_seqlens", "lengths" and
    "block_table". The whole multi-token attention has its parts in the weight's place. Of a decode, q is the window and
    k and v are the caches, or their pages.
    """

    case: FuzzCase
    values: dict[str, Tensor]

    @property
    def layouts(self) -> dict[str, str]:
        """Of each tensor."""
        chosen = dict(self.case.layouts)
        return {name: chosen.get(name, "contiguous") for name in self.values}


def make_inputs(case: FuzzCase) -> Inputs:
    """Seeded by the case."""
    generator = torch.Generator(case.device).manual_seed(case.seed * 1_000_003 + case.number)
    random = Random(f"{case.seed} {case.number} values")
    dtype = DTYPES[case.dtype]
    layouts = dict(case.layouts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=case.device)

    window = case.query_rows + case.history  # of all queries, those of the history first
    q = normal(case.batch, case.heads, window, case.head_dim)
    k, v = (normal(case.batch, case.kv_heads, case.seq_len, case.head_dim) for _ in range(2))
    q, k, v = _with_kind_of_values(case, random, q, k, v)
    values = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if case.parts is None:
        taps = case.query_taps, case.key_taps
        values["weight"] = taps_of(case, taps, random, normal).to(DTYPES[case.weight_dtype])
    else:
        values |= mta_values(case, random, normal)
    if case.pass_ == "decode":
        lengths = torch.tensor(case.lengths, dtype=getattr(torch, case.lengths_dtype), device=case.device)
        values["lengths"] = as_laid_out(lengths, layouts.get("lengths", "")).clone()
        if case.page_size is not None:
            values |= _pages(case, random, values, shared=layouts.get("block_table") == "expanded")
        else:
            beyond = _beyond(values["lengths"], case.seq_len)
            for name in ("k", "v"):
                values[name] = values[name].masked_fill(beyond[:, None, :, None], float("nan"))
                if layouts.get(name) == "expanded":  # all have the keys of the longest
                    longest = max(range(case.batch), key=_lengths(case).__getitem__)
                    values[name] = values[name][longest : longest + 1].expand_as(values[name])
    else:
        if case.history:
            values["q_history"], values["q"] = values["q"].split((case.history, case.query_rows), dim=2)
        if case.pass_ == "bwd":
            values["grad_out"] = normal(case.batch, case.heads, case.query_rows, case.head_dim).to(dtype)
        if case.form == "packed":
            values["cu_seqlens"] = torch.tensor(
                case.bounds, dtype=random.choice((torch.int32, torch.int64)), device=case.device
            )
    values = {
        name: x if name in ("lengths", "block_table") else as_laid_out(x, layouts.get(name, "")).contiguous()
        for name, x in values.items()
    }
    return Inputs(case, values)


def _with_kind_of_values(
    case: FuzzCase, random: Random, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    token, huge = random.randrange(case.seq_len), HUGE[case.dtype]
    if case.values == "huge value" and case.pass_ == "bwd" and case.dtype != "fp32":
        huge = LARGE_VALUE
    if case.values == "large scores":
        natural = max(abs(softmax_scale(case)) * case.head_dim**0.5, 1e-30)
        factor = min((LARGE_SCORE / (natural * largest_growth(case))) ** 0.5, LARGEST_FACTOR)
        q, k = q * factor, k * factor
    elif case.values == "equal":
        q, k = (x[:, :, :1].expand_as(x) for x in (q, k))
    elif case.values == "huge key":
        k[:, :, token] *= huge
    elif case.values == "huge value":
        v[:, :, token] *= huge
    elif case.values == "zero keys":
        k = torch.zeros_like(k)
    elif case.values == "one value":
        v = v[:, :, :1].expand_as(v)
    elif case.values == "tiny":
        q, k = q * 1e-2, k * 1e-2
    return q, k, v


def _lengths(case: FuzzCase) -> tuple[int, ...]:
    """As the layout of `lengths` leaves them."""
    return case.lengths[:1] * case.batch if dict(case.layouts).get("lengths") == "expanded" else case.lengths


def _beyond(lengths: Tensor, capacity: int) -> Tensor:
    """`[B, capacity]`: where a cache has no token."""
    return torch.arange(capacity, device=lengths.device) >= lengths.long()[:, None]


def _pages(case: FuzzCase, random: Random, values: dict[str, Tensor], shared: bool) -> dict[str, Tensor]:
    """Caches as pages in a random order, NaN in all rows that no sequence has, and a table with nonsense at its end."""
    assert case.page_size is not None
    size, lengths = case.page_size, _lengths(case)
    columns = case.seq_len // size
    needed = [-(-length // size) for length in lengths]
    if shared:
        needed = [max(needed)] * len(needed)
    count = (needed[0] if shared else sum(needed)) + 2
    order = random.sample(range(count), count)
    rows = []
    for own_pages in needed:
        own = order[:own_pages] if shared else [order.pop() for _ in range(own_pages)]
        rows.append(own + [random.choice(NO_PAGE) for _ in range(columns - own_pages)])
    used = torch.zeros(count, size, dtype=torch.bool)
    for row, length in zip(rows, lengths, strict=True):
        for page, number in enumerate(row[: -(-length // size)]):
            used[number, : length - page * size] = True
    kept = used.to(case.device)[:, None, :, None]
    found: dict[str, Tensor] = {"block_table": torch.tensor(rows, dtype=torch.int32, device=case.device)}
    for name in ("k", "v"):
        cache = values[name]
        pages = cache.new_empty(count, case.kv_heads, size, case.head_dim)
        flat = cache.unflatten(2, (columns, size)).transpose(1, 2).flatten(0, 1)  # [B * columns, Hkv, size, D]
        pages.copy_(flat[torch.arange(count, device=case.device) % flat.shape[0]])
        found[name] = pages.masked_fill(~kept, float("nan"))
    return found


def caches(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """k and v of a decode `[B, Hkv, S, D]`, from their pages if there are any."""
    table = inputs.values.get("block_table")
    if table is None:
        return inputs.values["k"], inputs.values["v"]
    pages = table.long().clamp(0, inputs.values["k"].shape[0] - 1)
    k, v = (inputs.values[name][pages].transpose(1, 2).flatten(2, 3) for name in ("k", "v"))
    return k, v


def expected(inputs: Inputs) -> dict[str, Expected]:
    """What the results are, by name: "out", and of a backward "dq", "dk", "dv", "dweight", "dq_history"."""
    found = _expected(inputs)
    if inputs.case.values != "equal" or inputs.case.parts is not None:
        return found
    # Scores of equal tokens have one error. The errors of a score's neighbours add up: `key_taps` times the variance.
    return {name: Expected(x.value, x.variance * inputs.case.key_taps) for name, x in found.items()}


def _solve(
    inputs: Inputs, tensors: tuple[Tensor, Tensor, Tensor], position: Tensor, length: Tensor, rows: int,
    grad_out: Tensor | None, spans: list[tuple[int, int]] | None = None,
) -> dict[str, Expected]:  # fmt: skip
    """The results of sequences `q, k, v` in float64 at these positions, by the operation's definition."""
    case = inputs.case
    if case.parts is not None:
        return expected_by_mta(case, inputs.values, tensors, position, length, rows, grad_out, spans)
    pad, weight = padding(case.pad_key, case.key_taps), inputs.values["weight"].double()
    numbers: dict[str, Any] = {"causal": case.causal, "scale": softmax_scale(case), "pad": pad}
    problem = Problem(*tensors, weight, position, length, rows, **numbers)
    return expected_results(problem, Rounding.of(DTYPES[case.dtype]), grad_out)


def _expected(inputs: Inputs) -> dict[str, Expected]:
    case, x = inputs.case, inputs.values
    q = x["q"].double()
    grad_out = x["grad_out"].double() if "grad_out" in x else None

    def whole(count: int) -> Tensor:
        return torch.full((case.batch,), count, device=case.device)

    if case.pass_ == "decode":
        lengths = x["lengths"].long()
        k, v = (cache.double() for cache in caches(inputs))
        return _solve(inputs, (q, k, v), lengths - q.shape[2], lengths, case.query_rows, None)
    k, v = x["k"].double(), x["v"].double()
    if case.form == "packed":
        return _of_documents(inputs, q, k, v, grad_out)
    before = min(case.looks_back, case.seq_len - case.query_rows)
    if before:
        q = torch.cat([x["q_history"][:, :, -before:].double(), q], 2)
    first = case.seq_len - case.query_rows - before
    found = _solve(inputs, (q, k, v), whole(first), whole(case.seq_len), case.query_rows, grad_out)
    if "dq" in found and "q_history" in x:
        dq = found["dq"]
        ignored = x["q_history"].shape[2] - before
        value, variance = dq.value[:, :, :before], dq.variance[:, :, :before]
        found["dq_history"] = Expected(
            torch.nn.functional.pad(value, (0, 0, ignored, 0)), torch.nn.functional.pad(variance, (ignored, 0))
        )
        found["dq"] = Expected(dq.value[:, :, before:], dq.variance[:, :, before:])
    return found


def _of_documents(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None) -> dict[str, Expected]:
    """Each document is a sequence of a batch, the shorter ones padded: long ones and short ones in two batches."""
    spans = [(start, stop) for start, stop in pairwise(inputs.case.bounds) if start < stop]
    longest = max(stop - start for start, stop in spans)
    batches = [[span for span in spans if (4 * (span[1] - span[0]) > longest) == is_long] for is_long in (True, False)]
    found = [_of_spans(inputs, (q, k, v), grad_out, batch) for batch in batches if batch]
    # Each has zeros at the rows of the others, and its share of the gradients of mixers.
    return {
        name: Expected(
            torch.stack([x[name].value for x in found]).sum(0), torch.stack([x[name].variance for x in found]).sum(0)
        )
        for name in found[0]
    }


def _of_spans(
    inputs: Inputs, tensors: tuple[Tensor, Tensor, Tensor], grad_out: Tensor | None, spans: list[tuple[int, int]]
) -> dict[str, Expected]:
    longest = max(stop - start for start, stop in spans)

    def apart(x: Tensor) -> Tensor:
        found = x.new_zeros(len(spans), x.shape[1], longest, x.shape[3])
        for part, (start, stop) in zip(found, spans, strict=True):
            part[:, : stop - start] = x[0, :, start:stop]
        return found

    def together(x: Tensor) -> Tensor:
        found = x.new_zeros(1, x.shape[1], inputs.case.seq_len, *x.shape[3:])
        for part, (start, stop) in zip(x, spans, strict=True):
            found[0, :, start:stop] = part[:, : stop - start]
        return found

    q, k, v = (apart(x) for x in tensors)
    lengths = torch.tensor([stop - start for start, stop in spans], device=q.device)
    grads = None if grad_out is None else apart(grad_out)
    found = _solve(inputs, (q, k, v), torch.zeros_like(lengths), lengths, longest, grads, spans)
    return {
        name: Expected(together(x.value), together(x.variance)) if name in OF_ROWS else x for name, x in found.items()
    }
