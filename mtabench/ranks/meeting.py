"""The ranks of a sweep: this process is rank 0 and starts the others, unless torchrun has started them all.

They wait for orders over gloo, on the host; tensors on GPUs go over NCCL.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from mtabench.errors import MtabenchError, UsageError
from mtabench.processes import EXIT_S, ending, kill, last_line, start_module

WAIT = timedelta(hours=2)  # for an order: rank 0 may check a long sequence in float64 meanwhile
LOOK_AGAIN_S = 0.5
TORCHRUN = "env://"  # where its processes meet


class Helper(NamedTuple):
    """A rank that this process started, and what it prints."""

    rank: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def reason(self, wait_s: float = 0.0) -> str | None:
        """How it ended, or None if it lives on for so long."""
        try:
            code = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        return f"rank {self.rank}: {ending(code) or 'its process ended'}{last_line(self.output)}"


class Meeting:
    """A process group for the data of a sweep, and one for orders."""

    def __init__(self, rank: int, ranks: int, device: str, address: str) -> None:
        """Join at an address of torch.distributed; on GPUs, this rank's becomes the current one."""
        self.rank, self.size, self.device = rank, ranks, device
        gpu = None
        if device == "cuda":
            gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if address == TORCHRUN else rank)
            torch.cuda.set_device(gpu)
        else:  # all of them share the cores, and what one rank is compared with has as many
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        if address != TORCHRUN:
            stay_on_this_machine()
        dist.init_process_group(
            "nccl" if gpu else "gloo", init_method=address, rank=rank, world_size=ranks, timeout=WAIT, device_id=gpu
        )
        group = dist.group.WORLD
        assert group is not None
        self.data: dist.ProcessGroup = group
        self.helpers: list[Helper] = []
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

    def lost(self, wait_s: float = 0.0) -> str | None:
        """How a rank died that this process started, or None if all live on for so long."""
        return next(filter(None, (helper.reason(wait_s) for helper in self.helpers)), None)

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


def check_devices(ranks: int, device: str, under_torchrun: bool) -> None:
    """Raise UsageError if there are fewer GPUs here than ranks."""
    there = torch.cuda.device_count()
    if device == "cuda" and not under_torchrun and there < ranks:
        instead = "leave --ranks out" if there < 2 else f"give --ranks {there}"
        raise UsageError(
            f"--ranks {ranks} needs {ranks} GPUs, and {there} can be seen here; {instead}, or give --device cpu"
        )


@contextmanager
def meet(
    ranks: int, device: str, under_torchrun: bool, kept: str, write_lost: Callable[[str], None]
) -> Iterator[Meeting]:
    """The meeting of all ranks, for rank 0; the others are sent home at the end.

    Should one of them die, this process says so and ends: its GPU may wait for that rank for ever. Before it does, a
    thread calls `write_lost` with how the rank died; `kept` says what is kept then. Raises MtabenchError for a rank
    that died if this process is told.
    """
    threads, over = torch.get_num_threads(), threading.Event()
    helpers: list[Helper] = []
    with ExitStack() as cleanup:
        address = TORCHRUN
        if not under_torchrun:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mtabench-ranks-"))
            address = f"file://{folder}/ranks"  # a store at a port would listen at all addresses
            helpers = [_start(rank, ranks, device, address, cleanup) for rank in range(1, ranks)]
            cleanup.callback(over.set)
            threading.Thread(target=_watch, args=(helpers, over, kept, write_lost), daemon=True).start()
        cleanup.callback(torch.set_num_threads, threads)
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


def _start(rank: int, ranks: int, device: str, address: str, cleanup: ExitStack) -> Helper:
    """Start a rank, which dies with this process and is gone after `cleanup`."""
    output: IO[bytes] = cleanup.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    # In a session of its own: Ctrl-C is for rank 0, which ends them.
    process = start_module("mtabench.ranks.follower", [str(rank), str(ranks), device, address], output)
    cleanup.callback(_end, process)
    return Helper(rank, process, output)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(EXIT_S if sys.exc_info()[0] is None else 0)
    except subprocess.TimeoutExpired:
        kill(process)


def _watch(helpers: Sequence[Helper], over: threading.Event, kept: str, write_lost: Callable[[str], None]) -> None:
    while not over.wait(LOOK_AGAIN_S):
        for reason in filter(None, (helper.reason() for helper in helpers)):
            if over.is_set():
                return
            try:
                write_lost(reason)
            finally:
                print(f"mtabench: {reason}; {kept}", file=sys.stderr, flush=True)
                for helper in helpers:
                    helper.process.kill()
                os._exit(1)
