"""`conv_attention(group=)`: checks, and the ring as a differentiable function."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mta_kernels.conv_attention.backends import BACKENDS, CONV_ATTENTION
from mta_kernels.conv_attention.context_parallel import ring
from mta_kernels.conv_attention.context_parallel.eager import EagerTiles
from mta_kernels.conv_attention.context_parallel.ranks import GroupRanks, Ranks
from mta_kernels.conv_attention.context_parallel.tiles import Problem
from mta_kernels.conv_attention.surroundings import without_autocast
from mta_kernels.operation import Operation
from mta_kernels.operator_gradients import check_no_tangents

_agreed: set[tuple[Any, ...]] = set()


def check_group(group: Any) -> None:
    """Raise TypeError unless group is a process group that this process is in."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {group!r}; expected a process group of torch.distributed that this process is in, "
            "such as torch.distributed.group.WORLD after init_process_group"
        )


def check_agreement(group: dist.ProcessGroup, facts: dict[str, float], device: torch.device) -> None:
    """Raise ValueError unless all ranks call this with equal facts, of equal names.

    All ranks must call it at once. On a GPU the answer is waited for when a rank comes with facts for the first time;
    later each rank tells the others its facts, and those for which the facts are new say what does not fit.
    """
    ranks = GroupRanks(group)
    values = tuple(facts.values())
    known = (group.group_name, values)
    told = ranks.gather(_on_device(values, device))
    if known in _agreed and device.type == "cuda":
        return
    of_first, *of_others = (x.tolist() for x in told)
    for rank, of_rank in enumerate(of_others, start=1):
        for name, first, other in zip(facts, of_first, of_rank, strict=True):
            if first != other:
                raise ValueError(
                    f"the ranks of the group do not agree: {name} is {first:g} on rank 0 and {other:g} on rank {rank}; "
                    "all of them must call with equal shapes and options"
                )
    _agreed.add(known)


@functools.cache
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept there: to copy them to a GPU at each call would wait for all that it has to do."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def shape_facts(**tensors: Tensor) -> dict[str, float]:
    """The shapes and dtypes of tensors as facts; bytes stand for a dtype, and half a byte more for float16."""
    facts: dict[str, float] = {}
    for name, x in tensors.items():
        facts |= {f"{name}.shape[{dim}]": size for dim, size in enumerate(x.shape)}
        facts[f"the element size of {name}"] = x.element_size() + (0.5 if x.dtype == torch.float16 else 0)
    return facts


@dataclass(frozen=True)
class Plan:
    """Who works on what, by which kernels."""

    ranks: Ranks
    kernels: ring.Tiles
    problem: Problem


def conv_attention_over_ranks(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, group: dist.ProcessGroup,
    head_chunk: int | None, backend: str,
) -> Tensor:  # fmt: skip
    """`conv_attention` of arguments already checked, whose rows are this rank's share of the sequence.

    Raises ValueError if the rows are no two equal chunks, or shorter than what a chunk needs of its neighbours, or if
    ranks differ in shapes or options; RuntimeError for dual tensors.
    """
    check_no_tangents("conv_attention with group", "backend='reference' without group has them", q, k, v, weight)
    facts = shape_facts(q=q, k=k, weight=weight)
    facts |= {"causal": operation.causal, "scale": operation.scale, "head_chunk": head_chunk or 0}
    facts |= {"the padding of keys": operation.conv.pad, "backend": BACKENDS.index(backend)}
    check_agreement(group, facts, q.device)
    return over_ranks(q, k, v, weight, make_plan(operation, q, GroupRanks(group), head_chunk, backend))


def make_plan(operation: Operation, q: Tensor, ranks: Ranks, head_chunk: int | None, backend: str) -> Plan:
    """The plan for this rank's q; raises ValueError if its rows cannot be two chunks."""
    rows = q.shape[2]
    problem = Problem(rows // 2, operation)
    if rows % 2:
        raise ValueError(
            f"this rank holds {rows} rows, and its share is two equal chunks of the sequence: "
            f"make the sequence a multiple of {2 * ranks.size} rows and share it by shard_sequence"
        )
    if problem.rows < problem.least_rows:
        raise ValueError(
            f"chunks of {problem.rows} rows are too short for {operation.conv} taps, which reach into their "
            f"neighbours: on {ranks.size} ranks give a sequence of {2 * ranks.size * problem.least_rows} rows or more"
        )
    kernels = CONV_ATTENTION.named(backend)
    tiles = kernels.tiles if kernels else EagerTiles
    if tiles is None:
        raise ValueError(f"backend {backend!r} does not share a sequence over ranks")
    return Plan(ranks, tiles(head_chunk or 0), problem)


def over_ranks(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """This rank's rows of out; every rank calls this, and each its backward, if any does."""
    return _OverRanks.apply(q, k, v, weight, plan)


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, plan: Plan) -> Tensor:
        out, logsumexp = ring.forward(plan.ranks, plan.kernels, plan.problem, q, k, v, weight)
        ctx.save_for_backward(q, k, v, weight, out, logsumexp)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        plan, (q, k, v, weight, out, logsumexp) = ctx.plan, ctx.saved_tensors
        with without_autocast(grad_out):
            gradients = ring.backward(plan.ranks, plan.kernels, plan.problem, q, k, v, weight, out, logsumexp, grad_out)
        return *(grad.to(x.dtype) for grad, x in zip(gradients, (q, k, v, weight), strict=True)), None
