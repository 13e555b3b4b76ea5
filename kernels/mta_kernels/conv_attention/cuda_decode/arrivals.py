"""The counts by which programs that share a KV head's keys know the last of them: zeros before a call and after it.

Calls on one stream follow each other and share their counts. A captured call keeps its own as long as the process
lives, for its graph may run beside anything else; they were set to zero before the capture, so no graph does it again.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from mta_kernels import planned

SPARE = 1 << 17  # counts set to zero ahead, half a MiB

_lock = threading.Lock()
_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_spare: dict[torch.device, Tensor] = {}
_captured: list[Tensor] = []  # kept


def arrivals(count: int, device: torch.device) -> Tensor:
    """`[count]` int32 zeros that the kernel leaves as zeros, on the current stream of a device."""
    if device.type != "cuda" or planned.gpu_at(device.index):  # in the tests' emulator, or without a GPU
        return torch.zeros(count, dtype=torch.int32, device=device)
    with _lock:
        spare = _spare.get(device)
        if torch.cuda.is_current_stream_capturing():
            if spare is None or len(spare) < count:
                return torch.zeros(count, dtype=torch.int32, device=device)  # a small kernel of the graph
            _spare[device] = spare[count:]
            _captured.append(spare[:count])
            return _captured[-1]
        if spare is None or len(spare) < SPARE // 2:
            _spare[device] = torch.zeros(SPARE, dtype=torch.int32, device=device)
        key = (device, torch._C._cuda_getCurrentRawStream(device.index))
        mine = _of_stream.get(key)
        if mine is None or len(mine) < count:
            mine = _of_stream[key] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        return mine
