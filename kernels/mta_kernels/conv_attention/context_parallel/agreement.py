"""Bad input that only all ranks together can see, and what a group cannot do."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mta_kernels.conv_attention.context_parallel.ranks import GroupRanks

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
