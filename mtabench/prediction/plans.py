"""What a cell would run on a GPU that need not be here, by the plan of its call."""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from mta_kernels.plan import H200, Plan, PlannedGpu, gpu_like, on_planned, plan
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs, make_inputs
from mtabench.registry import implementation_of


@functools.lru_cache(4096)
def plan_of(case: Case, gpu: PlannedGpu = H200) -> Plan:
    """The launches of one call of a cell, in `bwd` of the gradients alone, and the peak beyond its inputs.

    Raises what the call raises where it cannot run there, and where it cannot be planned.
    """
    elsewhere = replace(case, device="meta")
    inputs = make_inputs(elsewhere)
    with on_planned(gpu), torch.set_grad_enabled(case.pass_ == "bwd"):
        call = implementation_of(case).build(elsewhere, inputs)
        given = _tensors(inputs.given_to(elsewhere))
        return plan(gpu, lambda *_: call(), *given, backward=case.pass_ == "bwd")


def splits_of(case: Case) -> int | None:
    """The programs that share a head's keys in a decode step on this GPU: see `Plan.splits`; None on a CPU."""
    return plan_of(case, gpu_like(torch.device("cuda"))).splits if case.device == "cuda" else None


def kernels_of(case: Case) -> tuple[str, ...]:
    """The kernels of this project that a call launches on this GPU, each once; none on a CPU or of other projects."""
    ours = case.layers is None and implementation_of(case).planned
    if not ours or case.device != "cuda" or not torch.cuda.is_available():
        return ()
    return plan_of(case, gpu_like(torch.device("cuda"))).names("cuda", "triton")


def _tensors(inputs: Inputs) -> list[Tensor]:
    state = inputs.state
    kept = [] if state is None else [state.logits, state.logsumexp, state.lengths]
    named = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.lengths, inputs.block_table, *inputs.mixers.values())
    return [x for x in (*named, *kept) if x is not None]
