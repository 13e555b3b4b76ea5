"""The tensors of a case, and what its results should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import AFTER, MIXERS, FuzzCase
from fuzz.definition import OF_ROWS, SAMPLES, Problem, Rounding, errors_allowed, expected
from fuzz.layouts import as_laid_out
from mta_kernels.multi_token_attention.dropout import kept
from mtabench.problem.inputs import DTYPES

HUGE = {"fp16": 2e3, "bf16": 1e8, "fp32": 1e8}
LARGE_VALUE = 100.0  # in a backward in 16 bits, where a huge one costs other gradients precision
LARGE_SCORE = 6e4
UNEVEN = {
    "fp16": (30.0, 1e-3, 1.0),
    "bf16": (1e3, 1e-3, 1.0),
    "fp32": (1e3, 1e-3, 1.0),
}  # times the values and output gradients of sequences, or of documents; fp16's where they decide a gate
WEIGHT_SCALE, MIX_SCALE = 0.3, 0.2
DEVIATIONS = 4  # that the largest of many normal numbers is
LARGEST_FACTOR = 1e3  # on q and k, for large scores: no more than float16 holds
NO_PAGE = (-1, 2**31 - 1, 10**6)
FEW_SAMPLES = 2  # of either half, for a first look


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
    generator = torch.Generator(case.device).manual_seed(
        (case.seed + case.repeat * 15_485_863) * 1_000_003 + case.number
    )
    random = Random(f"{case.seed} {case.number} values{case.repeat or ''}")
    dtype = DTYPES[case.dtype]
    layouts = dict(case.layouts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=case.device)

    window = case.query_rows + case.history  # of all queries, the history's first
    q = normal(case.batch, case.heads, window, case.head_dim)
    k, v = (normal(case.batch, case.kv_heads, case.seq_len, case.head_dim) for _ in range(2))
    q, k, v = _with_kind_of_values(case, random, q, k, v)
    sizes = _sizes(case, random)
    v = v * sizes
    values = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if case.parts is None:
        taps = case.query_taps, case.key_taps
        values["weight"] = _taps_of(case, taps, random, normal).to(DTYPES[case.weight_dtype])
    else:
        values |= _mta_values(case, random, normal)
    if case.pass_ == "decode":
        lengths = torch.tensor(case.lengths, dtype=getattr(torch, case.lengths_dtype), device=case.device)
        values["lengths"] = as_laid_out(lengths, layouts.get("lengths", "")).clone()
        if layouts.get("q") != "expanded":  # or all would have the queries of the first
            before_first = torch.arange(window, device=case.device) < window - values["lengths"].long()[:, None]
            values["q"] = values["q"].masked_fill(before_first[:, None, :, None], float("nan"))
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
            grad_out = normal(case.batch, case.heads, case.query_rows, case.head_dim)
            values["grad_out"] = (grad_out * sizes[:, :, -case.query_rows :]).to(dtype)
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
        factor = min((LARGE_SCORE / (natural * _largest_growth(case))) ** 0.5, LARGEST_FACTOR)
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


def _sizes(case: FuzzCase, random: Random) -> Tensor:
    """`[B, 1, N, 1]`: how large values and output gradients are, by sequence or by document."""
    sizes = torch.ones(case.batch, 1, case.seq_len, 1, device=case.device)
    if case.values == "uneven":
        bounds = case.bounds or (0, case.seq_len)
        decide_gates = case.parts is not None and bool(case.parts.gate) and case.parts.norm_eps is None
        factors = UNEVEN["fp16" if decide_gates else case.dtype]
        for sequence in range(min(case.batch, 64)):
            for start, stop in pairwise(bounds):
                sizes[sequence, :, start:stop] = random.choice(factors)
    return sizes


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


def padding(pad_key: str, key_taps: int) -> int:
    """Columns of zeros left of the scores, from the definition: an even count has one more on the right."""
    return {"both": (key_taps - 1) // 2, "left": key_taps - 1, "right": 0}[pad_key]


def softmax_scale(case: FuzzCase) -> float:
    """The factor on q . k."""
    return case.head_dim**-0.5 if case.scale is None else case.scale


def drop_seed(case: FuzzCase) -> int:
    """What a case's dropout is drawn from."""
    return case.seed * 7919 + case.number


def _taps_of(case: FuzzCase, taps: tuple[int, int], random: Random, normal: Callable[..., Tensor]) -> Tensor:
    """The weight of a convolution by so many taps, of the kind that the case has."""
    query_taps, key_taps = taps
    weight = normal(case.heads, query_taps, key_taps) * WEIGHT_SCALE
    if case.weight == "identity":
        weight.zero_()
        weight[:, query_taps - 1, padding(case.pad_key, key_taps)] = 1
    elif case.weight == "one tap":
        a, b = random.randrange(query_taps), random.randrange(key_taps)
        own = weight[:, a, b].clone()
        weight.zero_()
        weight[:, a, b] = own
    elif case.weight == "large":
        weight *= 10
    return weight


def _mta_values(case: FuzzCase, random: Random, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The parts by name, in their dtypes."""
    parts = case.parts
    assert parts is not None
    values: dict[str, Tensor] = {}
    if parts.pre_conv:
        values["pre_conv"] = _taps_of(case, (case.query_taps, case.key_taps), random, normal)
    if parts.pre_mix:
        values["pre_mix"] = _mixing(case, parts.pre_mix, random, normal)
    if parts.post_conv:
        values["post_conv"] = _taps_of(case, parts.post_conv, random, normal)
    if parts.post_mix:
        values["post_mix"] = _mixing(case, parts.post_mix, random, normal)
    if parts.norm_eps is not None:
        values["norm_weight"] = 1 + 0.3 * normal(case.head_dim)
    if parts.gate:
        values["gate_weight"] = normal(*parts.gate) * case.head_dim**-0.5
    if parts.gate_bias:
        values["gate_bias"] = normal(parts.gate[0])
    return {name: x.to(DTYPES["fp32" if name in parts.in_float32 else case.dtype]) for name, x in values.items()}


def _mixing(case: FuzzCase, shape: tuple[int, ...], random: Random, normal: Callable[..., Tensor]) -> Tensor:
    assert case.parts is not None
    size, kind = shape[-1], case.parts.mixings
    one = torch.eye(size, device=case.device)
    if kind == "permutation":
        one = one[random.sample(range(size), size)]
    scale = {"near identity": MIX_SCALE, "random": 1.0}.get(kind, 0.0)
    return {"random": 0.0, "zero": 0.0}.get(kind, 1.0) * one + scale * normal(*shape)


def _largest_growth(case: FuzzCase) -> float:
    """By how much a case's scores grow until they are logits, for float16, which holds no more than 65504."""
    parts = case.parts
    if parts is None or case.dtype != "fp16":
        return 1.0
    growth = float(DEVIATIONS)
    if parts.pre_conv:
        growth *= max(1.0, WEIGHT_SCALE * math.sqrt(case.query_taps * case.key_taps))
    if parts.pre_mix:
        growth *= math.sqrt(1 + parts.pre_mix[-1])
    return growth


class Wanted:
    """What the results of inputs should be, by name: "out", and of a backward "dq", "dk", "dv", "dweight" and so on.

    `values [.., D]` float64, and `variance [..]` of the error of each row, of mixers of each number.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self.values = self._solved(expected)

    @cached_property
    def variance(self) -> dict[str, Tensor]:
        """Infinite where rounding alone decides."""
        return self._variance(SAMPLES)

    @cached_property
    def rough_variance(self) -> dict[str, Tensor]:
        """Of few samples, in an eighth of the time."""
        return self._variance(FEW_SAMPLES)

    def _variance(self, samples: int) -> dict[str, Tensor]:
        case, dtype = self._inputs.case, DTYPES[self._inputs.case.dtype]
        seed = case.seed * 1_000_003 + case.number

        def errors(problem: Problem, grad_out: Tensor | None) -> dict[str, Tensor]:
            return errors_allowed(problem, Rounding.of(dtype), torch.finfo(dtype).max, grad_out, seed, samples)

        return self._solved(errors)

    def _solved(self, solve: Callable[[Problem, Tensor | None], dict[str, Tensor]]) -> dict[str, Tensor]:
        case, x = self._inputs.case, self._inputs.values
        q, (k, v) = x["q"].double(), (y.double() for y in caches(self._inputs))
        grad_out = x["grad_out"].double() if "grad_out" in x else None
        if case.pass_ == "decode":
            lengths = x["lengths"].long()
            return solve(self._problem(q, k, v, lengths - q.shape[2], lengths, case.query_rows), None)
        if case.form == "packed":
            return self._of_documents(solve, (q, k, v), grad_out)
        before = min(case.looks_back, case.seq_len - case.query_rows)
        if before:
            q = torch.cat([x["q_history"][:, :, -before:].double(), q], 2)
        first, all_keys = (
            torch.full((case.batch,), count, device=case.device)
            for count in (case.seq_len - case.query_rows - before, case.seq_len)
        )
        found = self._named(solve(self._problem(q, k, v, first, all_keys, case.query_rows), grad_out))
        if "dq" in found and "q_history" in x:
            dq, ignored = found["dq"], x["q_history"].shape[2] - before
            unused = dq.new_zeros(*dq.shape[:2], ignored, *dq.shape[3:])
            found["dq_history"], found["dq"] = torch.cat((unused, dq[:, :, :before]), 2), dq[:, :, before:]
        return found

    def _named(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """As the functions name and shape the gradients of mixers."""
        if self._inputs.case.parts is None:
            found = {"dweight" if name == "dpre_conv" else name: x for name, x in found.items()}
        return {
            name: x if name in OF_ROWS else x.view(self._inputs.values[name[1:]].shape) for name, x in found.items()
        }

    def _problem(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, length: Tensor, rows: int,
        spans: list[tuple[int, int]] | None = None,
    ) -> Problem:  # fmt: skip
        case, x = self._inputs.case, self._inputs.values
        numbers: dict[str, Any] = {
            "causal": case.causal, "scale": softmax_scale(case), "norm_eps": 0.0, "factor": 1.0, "kept": None,
            "dropout": 0.0, "by_conv_attention": True, "decode": case.pass_ == "decode",
            "equal_rows": case.values in ("equal", "one value"),
            "pads": (padding(case.pad_key, case.key_taps), 0),
        }  # fmt: skip
        parts = case.parts
        if parts is None:
            return Problem(q, k, v, {"pre_conv": x["weight"].double()}, position, length, rows, **numbers)
        numbers |= {
            "norm_eps": parts.norm_eps or 0.0, "dropout": parts.dropout,
            "pads": (padding(case.pad_key, case.key_taps), padding(case.pad_key, parts.post_taps[1])),
            "factor": 1.0 if parts.depth is None else 1.0 - (0.8 - 0.6 * math.exp(-0.3 * parts.depth)),
            "kept": _kept(case, spans, rows) if parts.dropout else None,
            "by_conv_attention": not (parts.pre_mix or parts.post_conv or parts.post_mix),
        }  # fmt: skip
        given = {name: x[name].double() for name in (*MIXERS, *AFTER) if name in x}
        given = {name: x[None] if name.endswith("_mix") and x.dim() == 2 else x for name, x in given.items()}
        return Problem(q, k, v, given, position, length, rows, **numbers)

    def _of_documents(
        self, solve: Callable[[Problem, Tensor | None], dict[str, Tensor]], tensors: tuple[Tensor, Tensor, Tensor],
        grad_out: Tensor | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Each document is a sequence of a batch, the shorter ones padded: long ones and short ones in two batches."""
        spans = [(start, stop) for start, stop in pairwise(self._inputs.case.bounds) if start < stop]
        longest = max(stop - start for start, stop in spans)
        found: dict[str, Tensor] = {}
        for is_long in (True, False):
            part = [span for span in spans if (4 * (span[1] - span[0]) > longest) == is_long]
            for name, x in self._of_spans(solve, tensors, grad_out, part).items() if part else ():
                found[name] = found[name] + x if name in found else x  # zeros at the rows of the others
        return found

    def _of_spans(
        self, solve: Callable[[Problem, Tensor | None], dict[str, Tensor]], tensors: tuple[Tensor, Tensor, Tensor],
        grad_out: Tensor | None, spans: list[tuple[int, int]],
    ) -> dict[str, Tensor]:  # fmt: skip
        longest, device = max(stop - start for start, stop in spans), tensors[0].device
        starts, stops = torch.tensor(spans, device=device).T
        row = starts[:, None] + torch.arange(longest, device=device)  # [documents, longest]
        inside = row < stops[:, None]
        row = torch.where(inside, row, 0)

        def apart(x: Tensor) -> Tensor:
            return x[0][:, row].transpose(0, 1).masked_fill(~inside[:, None, :, None], 0)

        def together(x: Tensor) -> Tensor:
            found = x.new_zeros(x.shape[1], self._inputs.case.seq_len, *x.shape[3:])
            found[:, row[inside]] = x.transpose(0, 1)[:, inside]
            return found[None]

        q, k, v = (apart(x) for x in tensors)
        lengths, grads = stops - starts, None if grad_out is None else apart(grad_out)
        problem = self._problem(q, k, v, torch.zeros_like(lengths), lengths, longest, spans)
        found = self._named(solve(problem, grads))
        return {name: together(x) if name in OF_ROWS else x for name, x in found.items()}


def _kept(case: FuzzCase, spans: list[tuple[int, int]] | None, rows: int) -> Tensor:
    """`[B, H, rows, N]`: which probabilities are not dropped, by their places in the row of tokens."""
    assert case.parts is not None
    seed = torch.tensor(drop_seed(case), device=case.device)
    first = case.seq_len - case.query_rows
    found = kept(case.parts.dropout, seed, case.batch, case.heads, (first, case.seq_len), (0, case.seq_len))
    if spans is None:
        return found
    apart = found.new_zeros(len(spans), case.heads, rows, rows)
    for part, (start, stop) in zip(apart, spans, strict=True):
        part[:, : stop - start, : stop - start] = found[0, :, start:stop, start:stop]
    return apart
