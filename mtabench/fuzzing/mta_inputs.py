"""The tensors of the parts of the whole multi-token attention, and the problem that they and a case make."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.dropout import kept
from mtabench.fuzzing.cases import FuzzCase
from mtabench.fuzzing.definition import Expected, Rounding
from mtabench.fuzzing.mta_cases import AFTER, MIXERS
from mtabench.fuzzing.mta_definition import MtaProblem, expected_of_mta
from mtabench.problem.inputs import DTYPES

WEIGHT_SCALE, MIX_SCALE = 0.3, 0.2
DEVIATIONS = 4  # that the largest of many normal numbers is


def padding(pad_key: str, key_taps: int) -> int:
    """Columns of zeros left of the scores, from the definition: an even count has one more on the right."""
    return {"both": (key_taps - 1) // 2, "left": key_taps - 1, "right": 0}[pad_key]


def softmax_scale(case: FuzzCase) -> float:
    """The factor on q . k."""
    return case.head_dim**-0.5 if case.scale is None else case.scale


def drop_seed(case: FuzzCase) -> int:
    """What a case's dropout is drawn from."""
    return case.seed * 7919 + case.number


def taps_of(case: FuzzCase, taps: tuple[int, int], random: Random, normal: Callable[..., Tensor]) -> Tensor:
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


def mta_values(case: FuzzCase, random: Random, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The parts by name, in their dtypes."""
    parts = case.parts
    assert parts is not None
    values: dict[str, Tensor] = {}
    if parts.pre_conv:
        values["pre_conv"] = taps_of(case, (case.query_taps, case.key_taps), random, normal)
    if parts.pre_mix:
        values["pre_mix"] = _mixing(case, parts.pre_mix, random, normal)
    if parts.post_conv:
        values["post_conv"] = taps_of(case, parts.post_conv, random, normal)
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


def largest_growth(case: FuzzCase) -> float:
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


def expected_by_mta(
    case: FuzzCase, values: dict[str, Tensor], tensors: tuple[Tensor, Tensor, Tensor], position: Tensor,
    length: Tensor, rows: int, grad_out: Tensor | None, spans: list[tuple[int, int]] | None,
) -> dict[str, Expected]:  # fmt: skip
    """The results of sequences; `spans` are the bounds of documents, where they are such."""
    parts, dtype = case.parts, DTYPES[case.dtype]
    assert parts is not None
    given = {name: values[name].double() for name in (*MIXERS, *AFTER) if name in values}
    as_groups = {name: x[None] if name.endswith("_mix") and x.dim() == 2 else x for name, x in given.items()}
    numbers: dict[str, Any] = {
        "causal": case.causal, "scale": softmax_scale(case), "norm_eps": parts.norm_eps or 0.0,
        "pads": (padding(case.pad_key, case.key_taps), padding(case.pad_key, parts.post_taps[1])),
        "factor": 1.0 if parts.depth is None else 1.0 - (0.8 - 0.6 * math.exp(-0.3 * parts.depth)),
        "kept": _kept(case, spans, rows) if parts.dropout else None, "dropout": parts.dropout,
        "by_conv_attention": not (parts.pre_mix or parts.post_conv or parts.post_mix),
        "decode": case.pass_ == "decode",
    }  # fmt: skip
    problem = MtaProblem(*tensors, as_groups, position, length, rows, **numbers)
    seed = case.seed * 1_000_003 + case.number
    found = expected_of_mta(problem, Rounding.of(dtype), torch.finfo(dtype).max, grad_out, seed)
    for name, x in given.items():
        if f"d{name}" in found:
            expected = found[f"d{name}"]
            found[f"d{name}"] = Expected(expected.value.view(x.shape), expected.variance.view(x.shape))
    return found


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
