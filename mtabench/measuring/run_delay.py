"""How long the threads of this process were ready to run and had no core: what another job does to a time on a CPU."""

from collections.abc import Mapping
from pathlib import Path

THREADS = Path("/proc/self/task")


def run_delays_s() -> dict[str, float]:
    """Of each living thread, by its number, the seconds of run delay until now as Linux counts them; else nothing."""
    found = {}
    for path in THREADS.glob("*/schedstat"):
        try:
            ran, waited, _ = path.read_text().split()
        except (OSError, ValueError):  # a thread that just ended
            continue
        if int(ran):  # zeros stand in a kernel that does not count
            found[path.parent.name] = int(waited) / 1e9
    return found


def longest_wait_s(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """What the thread that waited longest waited between two calls; None where it is unknown.

    Of threads that work together it is the slowest that counts, however many there are.
    """
    return max((waited - before.get(thread, 0.0) for thread, waited in after.items()), default=None)
