"""A machine that counts the launches of replayed kernels in place of a GPU."""

from __future__ import annotations

import ctypes

import torch
from emulated_kernels import Emulator
from torch import Tensor

from mta_kernels.conv_attention.hopper import backward, forward
from mta_kernels.conv_attention.hopper.prepare import Preparation

BF16 = torch.bfloat16
# Addresses that both launches of a backward take.
SHARED = ("logsumexp", "dq", "dk", "dv", "dk_rounded", "dv_rounded", "dweight")


class Machine(Emulator):
    """Kernels that compute nothing: out begins with the sum of what q, k, v and the weight begin with.

    dq begins with that of these, out and grad_out; all of dk is what grad_out begins with, of dv and the weight's what
    v and the weight begin with, before they are summed over query heads and row blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.interrupt = None

    def launch(self, kernel: str, blocks, threads: int, shared_memory: int, device, *args, follows=False) -> None:
        assert follows == (kernel != "hopper_prepare")
        self.launched.append(kernel)
        if kernel == "hopper_prepare":
            (preparation,) = args
            assert preparation.weight_scale > preparation.taps
            self.prepared = Preparation.from_buffer_copy(preparation)
            if self.interrupt:
                interrupt, self.interrupt = self.interrupt, None
                interrupt()
                self.prepared = Preparation.from_buffer_copy(preparation)
            return
        *maps, arguments = args
        if kernel == "backward_exact":
            given = (
                arguments.inputs.q.start,
                arguments.inputs.k.start,
                arguments.inputs.v.start,
                arguments.grad_out.start,
            )
            assert (*given, arguments.inputs.weight.start) == (*self.mapped, self.prepared.weight.start)
            assert all(getattr(arguments, name) == getattr(self.arguments, name) for name in SHARED)
            whole = numbers_at(
                arguments.weight_grad, 2 * 6 * 11, torch.float32 if arguments.weight_grad_is_float else BF16
            )
            whole.fill_(numbers_at(arguments.dweight, 2, torch.float32).sum())  # of two warpgroups
            return
        structures = {"hopper_forward": forward.ForwardArguments, "hopper_backward": backward.BackwardArguments}
        assert isinstance(arguments, structures[kernel])
        assert arguments.taps == self.prepared.taps
        self.mapped, self.arguments = [x.words[0] for x in maps[:4]], arguments
        q, k, v, *rest = (x.words[0] for x in maps)
        first = [numbers_at(start).item() for start in (q, k, v, self.prepared.weight.start)]
        if kernel == "hopper_forward":
            numbers_at(arguments.out).fill_(sum(first))
            given = arguments.inputs.q.start, arguments.inputs.k.start, arguments.inputs.v.start
            assert (*given, arguments.inputs.weight.start) == (q, k, v, self.prepared.weight.start)
            return
        grad_out, scratch = rest
        starts = self.prepared.v.start, self.prepared.grad_out.start, arguments.p, self.prepared.counters
        assert starts == (v, grad_out, scratch, arguments.chunks.scheduler)
        rest = [numbers_at(start).item() for start in (grad_out, self.prepared.out.start)]
        numbers_at(arguments.dq).fill_(sum(first) + sum(rest))
        rounded = arguments.dk_rounded is not None
        keys = (arguments.dk_rounded, arguments.dv_rounded) if rounded else (arguments.dk, arguments.dv)
        for start, value in zip(keys, (rest[0], first[2]), strict=True):
            numbers_at(start, 2 * 70 * 64, BF16 if rounded else torch.float32).fill_(value)
        numbers_at(arguments.dweight, 2 * 2 * 6 * 11, torch.float32).fill_(first[3])


def numbers_at(address: int, count: int = 1, dtype: torch.dtype = BF16) -> Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)
