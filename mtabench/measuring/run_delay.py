"""How long the threads of this process were ready to run and had no core: what another job does to a time on a CPU."""

from __future__ import annotations

from pathlib import Path

THREADS = Path("/proc/self/task")


def run_delay_s() -> float | None:
    """Seconds of run delay of all living threads until now, as Linux counts them; None where it does not."""
    on_core = waiting = 0
    for path in THREADS.glob("*/schedstat"):
        try:
            ran, waited, _ = path.read_text().split()
        except (OSError, ValueError):  # a thread that just ended
            continue
        on_core += int(ran)
        waiting += int(waited)
    return waiting / 1e9 if on_core else None  # zeros stand in a kernel that does not count
