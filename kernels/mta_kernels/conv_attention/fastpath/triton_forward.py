"""Triton's forward, replayed: the launches of an earlier call, and little else.

They are those of a whole call, which was recorded. What that call allocated for itself lies in one piece of scratch.
There a kernel may write where an earlier one read, as in memory that PyTorch gives out again: each waits for those
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from mta_kernels.allocation import empty, empty_like, new_empty
from mta_kernels.conv_attention.fastpath.triton_launch import STREAM, LaunchReplay, has_hooks
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.conv_attention.triton.forward import conv_attention_forward
from mta_kernels.conv_attention.triton.launch import record_launches
from mta_kernels.operation import Operation

# That of PyTorch's allocator; and that of addresses which kernels are compiled for.
PIECES_ALIGNED, ALIGNED = 512, 16
Memory = tuple[int, int]  # from where to where


def can_replay() -> bool:
    """Whether there is anything to record: not in Triton's interpreter."""
    return not knobs.runtime.interpret


class TritonForward:
    """The forward for tensors that are alike in all but addresses and values."""

    def __init__(self, operation: Operation, q: Tensor) -> None:
        self._operation = operation
        # torch.empty with a shape and a device takes the host twice as long as empty_like.
        self._logsumexp = empty(1, dtype=torch.float32, device=q.device).expand(q.shape[:3])
        self._recording: Recording | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As `conv_attention_forward`."""
        starts = [x.data_ptr() for x in (q, k, v, weight)]
        recording = self._recorded(starts)
        if recording is None:
            return self._whole_call(q, k, v, weight)
        out = _empty_out(q)
        logsumexp = empty_like(self._logsumexp, memory_format=torch.contiguous_format)
        scratch = new_empty(q, recording.scratch_bytes // q.element_size())
        recording([*starts, out.data_ptr(), logsumexp.data_ptr(), scratch.data_ptr()])
        return out, logsumexp

    def out_alone(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """As `conv_attention_forward`, without a logsumexp to keep."""
        starts = [x.data_ptr() for x in (q, k, v, weight)]
        recording = self._recorded(starts)
        if recording is None:
            return self._whole_call(q, k, v, weight)[0]
        out = _empty_out(q)
        logsumexp_bytes = 4 * self._logsumexp.numel()
        scratch = new_empty(q, (recording.scratch_bytes + logsumexp_bytes) // q.element_size())
        scratch_at = scratch.data_ptr()
        recording([*starts, out.data_ptr(), scratch_at + recording.scratch_bytes, scratch_at])
        return out

    def _recorded(self, starts: Sequence[int]) -> Recording | None:
        """The launches for tensors that begin there, or None if the whole call must make them."""
        first, second, third, fourth = starts
        if self._recording is None or (first | second | third | fourth) % ALIGNED or has_hooks():
            return None
        return self._recording

    def _whole_call(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        recorder = Recorder()
        with on_device_of(inputs[0]), without_autocast(inputs[0]):
            with record_launches(recorder):
                results = conv_attention_forward(self._operation, *inputs)
            if (recording := recorder.recording((*inputs, *results))) is not None:
                self._recording = recording
        return results


class Recording:
    """Launches on one GPU with other addresses than they were seen with; any number of threads at a time."""

    def __init__(self, device: int, steps: Sequence[_Step], scratch_bytes: int) -> None:
        self.scratch_bytes = scratch_bytes
        self._device, self._steps = device, steps

    def __call__(self, starts: Sequence[int]) -> None:
        """On the current stream there; `starts` are addresses of the tensors of a call, then of its scratch."""
        gpu = driver.active
        if gpu.get_current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(starts)
        stream = gpu.get_current_stream(self._device)
        for launcher, seen, places in self._steps:
            arguments = seen.copy()
            arguments[STREAM] = stream
            for position, base, offset, argument in places:
                address = starts[base] + offset
                arguments[position] = argument(address) if argument else address
            launcher(*arguments)
        return None


class _Step(NamedTuple):
    """A launch: what launches, all its arguments as they were seen, and which of them depend on addresses.

    These by position, whose address (an index), an offset to that, and what makes the argument of the sum.
    """

    launcher: Callable[..., None]
    arguments: list[Any]
    places: list[tuple[int, int, int, Callable[[int], Any] | None]]


class _Pointer(NamedTuple):
    """An argument that depends on an address, the memory that this is in, and what makes the argument of it."""

    position: int
    address: int
    memory: Memory
    argument: Callable[[int], Any] | None


class Recorder:
    """Keeps launches as they happen, but none of their tensors, so that a recorded call needs no more memory."""

    def __init__(self) -> None:
        self._seen: list[tuple[LaunchReplay, list[Any], list[_Pointer]] | None] = []

    def __call__(self, replay: LaunchReplay | None, args: Sequence[Any]) -> None:
        if replay is None:
            self._seen.append(None)
            return
        pointers = []
        for position, x, argument in replay.places(args):
            memory = x.untyped_storage()
            start = memory.data_ptr()
            if x.numel():
                pointers.append(_Pointer(position, x.data_ptr(), (start, start + memory.nbytes()), argument))
        self._seen.append((replay, replay.arguments(0, args), pointers))

    def recording(self, tensors: Sequence[Tensor]) -> Recording | None:
        """For a call whose tensors these are, inputs and results; None if it cannot be said what each pointer is.

        Or if a kernel can only be launched by Triton, or was compiled for other addresses than are usual.
        """
        given = {x.data_ptr(): i for i, x in enumerate(tensors)}
        kept = {x.untyped_storage().data_ptr() for x in tensors}
        if len(given) < len(tensors) or any(start % ALIGNED for start in given):
            return None
        uses: dict[Memory, list[int]] = {}
        for i, launch in enumerate(self._seen):
            if launch is None:
                return None
            for pointer in launch[2]:
                if pointer.address not in given:
                    if pointer.address != pointer.memory[0] or pointer.address in kept or pointer.address % ALIGNED:
                        return None
                    uses.setdefault(pointer.memory, []).append(i)
        scratch_bytes, places = laid_out({memory: (min(at), max(at)) for memory, at in uses.items()})
        steps = []
        for replay, arguments, pointers in filter(None, self._seen):
            found = []
            for position, address, memory, argument in pointers:
                base, offset = (given[address], 0) if address in given else (len(tensors), places[memory])
                found.append((position, base, offset, argument))
            steps.append(_Step(replay.launcher, arguments, found))
        return Recording(driver.active.get_current_device(), steps, scratch_bytes)


def laid_out(needed: dict[Memory, tuple[int, int]]) -> tuple[int, dict[Memory, int]]:
    """Bytes of scratch for what the keys tell the size of, and where in it each begins.

    Each is needed from one launch to another, which counts too; those that are not needed at once may overlap.
    """
    places: dict[Memory, int] = {}
    for memory in sorted(needed, key=lambda x: x[0] - x[1]):  # the largest first
        first, last = needed[memory]
        at = 0
        for start, other in sorted((start, other) for other, start in places.items()):
            if needed[other][0] <= last and first <= needed[other][1]:
                if at + _size(memory) <= start:
                    break
                at = max(at, start + _size(other))
        places[memory] = at
    return max((at + _size(memory) for memory, at in places.items()), default=0), places


def _size(memory: Memory) -> int:
    """Bytes, rounded up so that what lies behind is aligned."""
    return -(-(memory[1] - memory[0]) // PIECES_ALIGNED) * PIECES_ALIGNED


def _empty_out(q: Tensor) -> Tensor:
    """Contiguous, of the shape of q."""
    return empty_like(q) if q.is_contiguous() else new_empty(q, q.shape)
