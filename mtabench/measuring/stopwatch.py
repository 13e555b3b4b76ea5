"""Where the wall time of a sweep goes: measuring, verifying, and all else, which is the suite's own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# What a sweep is for: ceilings, warm-up and compilation are part of measuring; inputs and float64 part of verifying.
MEASURING, VERIFYING = "measuring", "verifying"
# The rest, as far as it has a name.
START, CHARTS = "to start", "charts"


class Stopwatch:
    """Seconds by what they were spent on, from now on."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.monotonic()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the time inside as spent on that."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - started

    def since_start(self, what: str) -> None:
        """Count the time until now as spent on that."""
        self.seconds[what] += time.monotonic() - self._started

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count what another process spent in the meantime."""
        for what, more in seconds.items():
            self.seconds[what] += more

    def overhead(self) -> float:
        """The share of all time until now that went neither into measuring nor into verifying."""
        total = time.monotonic() - self._started
        return 1 - (self.seconds[MEASURING] + self.seconds[VERIFYING]) / total

    def line(self) -> str:
        """What became of the time until now, in a line."""
        total = time.monotonic() - self._started
        shares = [f"{100 * self.seconds[what] / total:.0f} % {what}" for what in (MEASURING, VERIFYING)]
        named = [f"{self.seconds[what]:.1f} s {what}" for what in (START, CHARTS)]
        other = total - sum(self.seconds.values())
        return (
            f"time: {total:.1f} s, of which {', '.join(shares)} and {100 * self.overhead():.0f} % all else "
            f"({', '.join(named)}, {other:.1f} s beside the cells)"
        )
