"""Ranks 1 and up: do what rank 0 orders, until it sends them home."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress

import torch

from mtabench.ranks.meeting import Meeting
from mtabench.ranks.part import NotLoadedError, Part, link_gbytes_s, load_part


def follow(meeting: Meeting) -> None:
    """Take orders: ("link",), ("load", case), ("results",), ("forward",), ("backward",), ("drop",) and ("end",)."""
    part: Part | None = None
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
                part = load_part(meeting, *about)[0]
        elif what == "drop":
            part = out = None
            gc.collect()
            if meeting.device == "cuda":
                torch.cuda.empty_cache()
        elif part is None:
            raise ValueError(f"rank 0 orders {what!r} before it has sent a cell")
        elif what == "results":
            part.results()
        elif what == "forward":
            out = part.forward()
        elif what == "backward" and out is not None:
            part.backward(out)
            out = None
        else:
            raise ValueError(f"rank 0 orders {what!r}, which cannot be done now")


if __name__ == "__main__":
    rank, ranks, device, address = sys.argv[1:]
    follow(Meeting(int(rank), int(ranks), device, address))
