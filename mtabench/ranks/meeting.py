"""The ranks of a sweep: this process is rank 0 and starts the others.

They wait for orders over gloo, on the host; tensors on GPUs go over NCCL.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mtabench.errors import MtabenchError, UsageError
from mtabench.processes import EXIT_S, Process, ProcessEndedError

WAIT = timedelta(hours=2)  # for an order: rank 0 may check a long sequence in float64 meanwhile


class Helper(threading.Thread):
    """A rank in a process of its own, which this thread waits for; `reason` says how it ended, once it has."""

    def __init__(
        self, rank: int, follow: Callable[..., None], arguments: tuple[Any, ...], ended: Callable[[str], None]
    ) -> None:
        """`ended` is told how."""
        super().__init__(daemon=True)
        self.process, self.reason = Process(), ""
        self._rank, self._follow, self._arguments, self._ended = rank, follow, (rank, *arguments), ended

    def run(self) -> None:
        """Until the process ends, or has followed to the end."""
        reason = "its process ended"
        try:
            self.process.call(self._follow, self._arguments, print)
        except ProcessEndedError as error:
            reason = str(error)
        self.reason = f"rank {self._rank}: {reason}"
        self._ended(self.reason)

    def end(self) -> None:
        """Wait for a rank that is sent home; end one that is not."""
        self.join(EXIT_S if sys.exc_info()[0] is None else 0)
        self.process.stop()


class Meeting:
    """A process group for the data of a sweep, and one for orders."""

    def __init__(self, rank: int, ranks: int, device: str, address: str) -> None:
        """Join at an address of torch.distributed; on GPUs, this rank's becomes the current one."""
        self.rank, self.size, self.device = rank, ranks, device
        gpu = None
        if device == "cuda":
            gpu = torch.device("cuda", rank)
            torch.cuda.set_device(gpu)
        else:  # all of them share the cores, and what one rank is compared with has as many
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        stay_on_this_machine()
        dist.init_process_group(
            "nccl" if gpu else "gloo", init_method=address, rank=rank, world_size=ranks, timeout=WAIT, device_id=gpu
        )
        group = dist.group.WORLD
        assert group is not None
        self.data: dist.ProcessGroup = group
        self.helpers: Sequence[Helper] = ()
        self.kept = ""
        self._in_step = True
        self._orders = dist.new_group(backend="gloo", timeout=WAIT)

    def give(self, order: Any) -> None:
        """Tell all ranks what to do; for rank 0."""
        dist.broadcast_object_list([order], src=0, group=self._orders)

    def take(self) -> Any:
        """What rank 0 says to do; waits for it."""
        orders = [None]
        dist.broadcast_object_list(orders, src=0, group=self._orders)
        return orders[0]

    def gather(self, mine: Any) -> list[Any]:
        """What all ranks have, by rank; for all of them to call."""
        found = [None] * self.size
        dist.all_gather_object(found, mine, group=self._orders)
        return found

    def lost(self, wait_s: float = 0.0) -> str:
        """How a rank died, or an empty text if all live on for so long."""
        until = time.monotonic() + wait_s
        for helper in self.helpers:
            helper.join(max(0.0, until - time.monotonic()))
        return next(filter(None, (helper.reason for helper in self.helpers)), "")

    @contextmanager
    def shared_call(self) -> Iterator[None]:
        """Around what all ranks do together: if this one fails there, the others wait for it."""
        try:
            yield
        except BaseException:
            self._in_step = False
            raise

    def drop(self) -> None:
        """Tell all ranks to forget the cell; for rank 0.

        Raises MtabenchError if one of them died, or if this one left a call that they wait in.
        """
        if reason := self.lost():
            raise MtabenchError(f"{reason}; {self.kept}")
        if not self._in_step:
            raise MtabenchError(f"rank 0 failed within a call, where the other ranks wait for it; {self.kept}")
        self.give(("drop",))

    def line_up(self) -> None:
        """No rank goes on before all are here: on GPUs their streams, on a CPU the processes."""
        if self.device == "cuda":
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.data)
        else:
            dist.barrier(group=self.data)


def check_devices(ranks: int, device: str) -> None:
    """Raise UsageError if there are fewer GPUs here than ranks."""
    there = torch.cuda.device_count()
    if device == "cuda" and there < ranks:
        instead = "leave --ranks out" if there < 2 else f"give --ranks {there}"
        raise UsageError(
            f"--ranks {ranks} needs {ranks} GPUs, and {there} can be seen here; {instead}, or give --device cpu"
        )


@contextmanager
def meet(
    ranks: int, device: str, follow: Callable[..., None], kept: str, write_lost: Callable[[str], None]
) -> Iterator[Meeting]:
    """The meeting of all ranks, for rank 0; the others `follow`, and are sent home at the end.

    Should one of them die, this process says so and ends: its GPU may wait for that rank for ever. Before it does, a
    thread calls `write_lost` with how the rank died; `kept` says what is kept then. Raises MtabenchError for a rank
    that died if this process is told.
    """
    over, ending = threading.Event(), threading.Lock()

    def lose(reason: str) -> None:
        with ending:
            if over.is_set():
                return
            try:
                write_lost(reason)
            finally:
                print(f"mtabench: {reason}; {kept}", file=sys.stderr, flush=True)
                for helper in helpers:
                    helper.process.stop()
                os._exit(1)

    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mtabench-ranks-"))
        address = f"file://{folder}/ranks"  # a store at a port would listen at all addresses
        helpers = [Helper(rank, follow, (ranks, device, address), lose) for rank in range(1, ranks)]
        for helper in helpers:
            helper.start()
            cleanup.callback(helper.end)
        cleanup.callback(over.set)
        cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        meeting = Meeting(0, ranks, device, address)
        meeting.helpers, meeting.kept = helpers, kept
        yield meeting
        over.set()
        meeting.give(("end",))
        dist.destroy_process_group()


def stay_on_this_machine() -> None:
    """Have gloo and NCCL listen at the loopback interface alone: who can talk to a rank can run code there."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
