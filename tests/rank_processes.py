"""Processes that are the ranks of a gloo group on this machine, and call functions on all of them at once."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


class RankProcesses:
    """`size` ranks, forked from a process that imported torch for all of them."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "mta_kernels.conv_attention"])
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"file://{Path(self._folder.name, 'ranks')}"
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, meeting, rank, size), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(group, *arguments)` returns on the first `ranks` ranks, or the exception that it raises."""
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} of {ranks} did not answer within {TIMEOUT_S} s")
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, meeting: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, size + 1)}
    while True:
        ranks, function, arguments = pipe.recv()
        try:
            answer = function(groups[ranks], *arguments)
        except Exception as error:
            answer = type(error)(str(error))
        pipe.send(answer)
