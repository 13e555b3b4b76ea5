"""Ranks 1 and up: do what rank 0 orders, until it sends them home."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from mtabench.ranks.meeting import Meeting
from mtabench.ranks.part import NotLoadedError, Part, link_gbytes_s, load_part
from mtabench.sweeps.sweep import free_memory


def follow(meeting: Meeting) -> None:
    """Take orders: a word, after "load" a case and a seed, after "results" the number of a probe or None."""
    part: Part | None = None
    loaded: tuple[Any, Any] = None, None
    out: torch.Tensor | None = None
    while True:
        what, *about = meeting.take()
        if what == "end":
            torch.distributed.destroy_process_group()
            return
        if what == "link":
            link_gbytes_s(meeting)
        elif what == "load":
            with suppress(NotLoadedError):  # rank 0 writes that down, and drops the cell
                loaded = about[0], about[1]
                part, _ = load_part(meeting, *loaded)
        elif what == "drop":
            part = out = None
            free_memory(meeting.device)
        elif part is None:
            raise ValueError(f"rank 0 orders {what!r} before it has sent a cell")
        elif what == "results":
            (probe,) = about
            with suppress(NotLoadedError):
                (part if probe is None else load_part(meeting, *loaded, probe)[0]).results()
        elif what == "negate":
            part.negate()
        elif what == "forward":
            out = part.forward()
        elif what == "backward" and out is not None:
            part.backward(out)
            out = None
        else:
            raise ValueError(f"rank 0 orders {what!r}, which cannot be done now")


def follow_as(send: Callable[[object], None], rank: int, ranks: int, device: str, address: str) -> None:
    """In a process of its own: join as this rank, and follow."""
    follow(Meeting(rank, ranks, device, address))
