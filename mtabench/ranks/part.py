"""What every rank does with its part of a cell, told by rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mta_kernels.conv_attention import conv_attention
from mta_kernels.conv_attention.context_parallel import shard_sequence, unshard_sequence
from mtabench.checking.probes import make_probes
from mtabench.measuring.failures import failure
from mtabench.measuring.poison import poisoned_memory
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs, make_inputs
from mtabench.ranks.meeting import Meeting
from mtabench.registry import implementation_of

LINK_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
LINK_TRIALS = 5


class Part:
    """A rank's rows of a cell's tensors, and its part of each call; all ranks call the same methods in turn."""

    def __init__(self, meeting: Meeting, case: Case, inputs: Inputs) -> None:
        """`inputs` are those of the whole cell, equal on all ranks."""
        self._meeting, self._case = meeting, case

        def mine(x: Tensor) -> Tensor:
            return shard_sequence(x.detach(), meeting.data).requires_grad_(x.requires_grad)

        dout = None if inputs.dout is None else mine(inputs.dout)
        self._inputs = replace(inputs, q=mine(inputs.q), k=mine(inputs.k), v=mine(inputs.v), dout=dout)

    def forward(self) -> Tensor:
        """This rank's rows of out; starts and ends with the other ranks."""
        x = self._inputs
        assert x.weight is not None
        self._meeting.line_up()
        backend = implementation_of(self._case).ranks_backend
        out = conv_attention(
            x.q, x.k, x.v, x.weight, **self._case.operation.options, backend=backend, group=self._meeting.data
        )
        self._meeting.line_up()
        return out

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """This rank's gradients of q, k and v, and the weight's; starts and ends with the other ranks."""
        self._meeting.line_up()
        gradients = torch.autograd.grad(out, list(self._inputs.differentiable.values()), self._inputs.dout)
        self._meeting.line_up()
        return gradients

    def results(self) -> Tensor | Sequence[Tensor]:
        """The whole output, or in backward the whole gradients, on every rank; free memory is NaN before."""
        group = self._meeting.data
        with poisoned_memory(self._case.device):
            out = self.forward()
        if self._case.pass_ == "fwd":
            return unshard_sequence(out, group)
        with poisoned_memory(self._case.device):
            dq, dk, dv, dweight = self.backward(out)
        return [*(unshard_sequence(x, group) for x in (dq, dk, dv)), dweight]

    def negate(self) -> None:
        """As Inputs.negate, of this rank's rows."""
        self._inputs.negate()


class NotLoadedError(Exception):
    """A cell that some rank cannot load, with the status and the reason that its row gets."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def load_part(meeting: Meeting, case: Case, seed: int, probe: int | None = None) -> tuple[Part, Inputs]:
    """This rank's part of a cell, and the inputs of the whole, as the probe of that number changes them.

    Raises NotLoadedError on all ranks if one cannot.
    """
    loaded, mine = None, None
    try:
        inputs = make_inputs(case, seed)
        if probe is not None:
            with torch.no_grad():
                inputs = make_probes(case, inputs, seed, {})[probe].change(inputs)
        loaded = Part(meeting, case, inputs), inputs
    except Exception as error:
        mine = failure(error)
    for rank, failed in enumerate(meeting.gather(mine)):
        if failed:
            status, reason = failed
            raise NotLoadedError(status, f"rank {rank}: {reason}")
    assert loaded is not None
    return loaded


def link_gbytes_s(meeting: Meeting) -> float:
    """10^9 bytes a second that each rank sends to the next one while it receives as much, at best of a few trials."""
    group, rank = meeting.data, meeting.data.rank()
    after, before = (dist.get_global_rank(group, (rank + step) % group.size()) for step in (1, -1))
    message = torch.zeros(LINK_BYTES[meeting.device], dtype=torch.uint8, device=meeting.device)
    received, best = torch.empty_like(message), float("inf")
    for _ in range(1 + LINK_TRIALS):  # the first one makes the connections
        meeting.line_up()
        if meeting.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        send = dist.P2POp(dist.isend, message, after, group)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, before, group)]):
            work.wait()
        if meeting.device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return message.nbytes / best / 1e9
