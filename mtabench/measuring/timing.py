"""Time closures so that the times can be compared: warmed up, cold caches, in turns, until the median is known."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import SystemRandom
from time import perf_counter  # bound before a file of --impl could replace it
from typing import Any, TypeVar

import numpy as np
import torch

from mtabench.environment import GpuSensor, l2_bytes
from mtabench.measuring.failures import WrongResultError, bare
from mtabench.measuring.samplers import (
    Sampler,
    cache_flush,
    capture,
    clean_lines,
    cpu_sampler,
    events_sampler,
    graph_sampler,
)
from mtabench.measuring.settled import CI_TARGET, CI_TARGETS, half_interval, longest_wait_s, run_delays_s
from mtabench.measuring.statistics import median_interval
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs

LEAD_S = 0.5
WINDOW_S = 0.5
STEP_S = 0.1  # the slowest counters move ten times a second
EDGES = 20
BATCH_S = 0.01  # calls are given to the GPU in batches; the counter is looked at after each
STUCK_S = 2.0  # a counter that has not moved for so long never will


class Watch:
    """Watches the calls of a cell while they are timed, always outside the windows; this one does nothing."""

    def change(self) -> None:
        """Before a call: give the inputs other values, at the same addresses."""

    def change_gradient(self) -> None:
        """After the setup of a backward, which is its forward: give dout other values."""

    def look(self, results: Sequence[Any]) -> None:
        """Right behind the last window: keep one of these results, each of a call in it."""

    def end(self, judged: bool = False) -> None:
        """Let go of the result, and give the inputs the values of before all changes.

        Raises WrongResultError if a call changed them, or if the result is `judged` and wrong.
        """


UNWATCHED = Watch()


K = TypeVar("K", bound=Hashable)
Build = Callable[[Case, Inputs], Callable[[], Any]]

AGREEMENT = 0.05  # the last three warm-up calls lie this close together
WARM_UP_SECONDS = 2.0
GPU_WARM_UP_SECONDS = 0.1  # at least, for the clocks
GPU_ROUND_SECONDS = 0.1  # at most, of a cell: a power cap acts in some tenths of a second, and is to find all alike
CPU_SECONDS = 0.2  # at least, of rounds: what slows a CPU comes and goes in some hundredths of a second
THROTTLED_REPEATS = 2
LOOK_AGAIN = 1.2  # times as many rounds: an interval of many takes time, and other times' caches
MAX_ROTATIONS = 512
RANDOM = SystemRandom()  # which samples are judged: no seed, which a kernel could know
JUDGED_ROUNDS = 10  # so many first rounds have a result judged, and of later ones ever fewer: 40 of 200


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. `timer` is auto, events, graph or cpu, `cache` cold or warm; limits are per cell.

    A cell stops, after `min_rounds`, when half the 95 % interval of its median is at most `ci_target` of it (None: the
    device's usual). Or at `max_rounds`, or at `time_limit_s`. Slow cells take fewer samples a round, at least one.
    """

    timer: str = "auto"
    cache: str = "cold"
    min_rounds: int = 5
    samples_per_round: int = 10
    max_rounds: int = 200
    time_limit_s: float = 10.0
    ci_target: float | None = None

    def target_on(self, device: str) -> float:
        """The share of a median that half its interval should be at most on "cuda" or "cpu"."""
        return CI_TARGETS[device] if self.ci_target is None else self.ci_target

    def samples_a_round(self, total_s: float, *, on_gpu: bool) -> int:
        """As many as the options want, or as fit into a round and into the time limit at `total_s` seconds a sample."""
        longest_s = min(GPU_ROUND_SECONDS if on_gpu else math.inf, self.time_limit_s / self.min_rounds)
        return max(1, min(self.samples_per_round, int(longest_s / max(total_s, 1e-9))))


@dataclass(frozen=True, slots=True)
class Timed:
    """What is timed: `run`, given what `setup` returned before the timed window (or None).

    `rotations` makes closures that do the same on copies of the inputs, together larger than the L2 cache. `watch`
    changes the inputs between calls and judges some results; `confirm` says at the end why a cell is wrong, if it is.
    All calls are made `within` a context. Of a model, `attention` is all attention of a call alone, and `loss` what
    training came to before it was timed.
    """

    run: Callable[[Any], Any]
    setup: Callable[[], Any] | None = None
    rotations: Callable[[], list[Callable[[], Any]]] | None = None
    watch: Watch = UNWATCHED
    confirm: Callable[[], str] = str
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    attention: Timed | None = None
    loss: float | None = None


@dataclass(slots=True)
class Measurement:
    """Samples in ms by round, and how they were taken; None where unknown. Peak memory is one call's, 10^6 bytes.

    `energy_j` is of one call in a series of them, after the rounds, as `energy` measures it. `run_delay`, of the timer
    cpu alone, is a share of the rounds' time. In each round it counts the thread that waited longest for a core.
    """

    timer: str
    cache: str
    rounds: list[list[float]] = field(default_factory=list)
    sm_clock_mhz: float | None = None
    throttled: bool | None = None
    peak_memory_mb: float | None = None
    energy_j: float | None = None
    ci_target: float = CI_TARGET
    run_delay: float | None = None
    attention_ms: float | None = None
    loss: float | None = None


def timed(case: Case, build: Build, inputs: Inputs) -> Timed:
    """What to time of an implementation: `build(case, inputs)` makes the closure that computes the output.

    Forward: the closure. Backward: all gradients, the forward graph being built outside the window. Decode: the
    closure, and on a GPU the same on copies of the cache.
    """
    closure = build(case, inputs)
    if case.pass_ == "bwd":
        leaves = list(inputs.differentiable.values())
        return Timed(run=lambda out: torch.autograd.grad(out, leaves, inputs.dout), setup=closure)
    if case.pass_ == "decode" and case.device == "cuda":
        return Timed(run=lambda _: closure(), rotations=lambda: [closure, *_on_copies(case, build, inputs)])
    return Timed(run=lambda _: closure())


def measure(cells: Mapping[K, Timed], device: str, settings: Settings) -> dict[K, Measurement | Exception]:
    """Time `cells` in turns on "cuda" or "cpu": rounds go A B C, C B A, and so on, so that drift hits all alike.

    A cell that raises drops out, and its exception stands for it. That is torch.OutOfMemoryError without enough memory,
    TimeoutError if one call exceeds the time limit, and WrongResultError for a wrong result. Exceptions come first, in
    the order they happened.
    """
    failed: dict[K, Measurement | Exception] = {}
    lanes: dict[K, Lane] = {}
    flush = cache_flush(device, settings.cache)
    sensor = GpuSensor() if device == "cuda" else None

    @contextmanager
    def step(key: K, name: str) -> Iterator[None]:
        """Within, what raises fails the cell; profilers show it by the name."""
        try:
            with phase(device, f"{_name(key)}: {name}"):
                yield
        except Exception as error:
            failed[key] = bare(error)

    for key, cell in cells.items():
        with step(key, "warm up"):
            lanes[key] = Lane(cell, device, settings, flush, sensor)
    for number in range(settings.max_rounds):
        pending = [key for key, lane in lanes.items() if not lane.done and key not in failed]
        for key in pending if number % 2 == 0 else reversed(pending):
            with step(key, "measure"):
                lanes[key].take_round()
            if key in failed:
                lanes[key].close()
    for key, lane in lanes.items():
        if key not in failed:
            with step(key, "verify"):
                if reason := cells[key].confirm():
                    raise WrongResultError(reason)
        lane.close()
    measured = {key: lane.measurement for key, lane in lanes.items() if key not in failed}
    for key, measurement in measured.items():
        if (attention := cells[key].attention) is not None:
            with phase(device, f"{_name(key)}: attention"), suppress(Exception):  # then it is not known
                measurement.attention_ms = Lane(attention, device, settings, flush, sensor).one_round_ms()
    if sensor is not None and sensor.energy_j() is not None:
        for key, measurement in measured.items():
            with phase(device, f"{_name(key)}: energy"), suppress(Exception), cells[key].within():  # or it is not known
                measurement.energy_j = _energy(cells[key], sensor)
    return failed | measured


@contextmanager
def _watched(cell: Timed, judged: bool = False) -> Iterator[None]:
    """Within, calls of a cell are made. Behind it the inputs, which cells share, are what they were.

    Raises WrongResultError if a call changed them, or if the result is `judged` and wrong.
    """
    try:
        with cell.within():
            yield
    except BaseException:
        with suppress(Exception):  # the first failure counts
            cell.watch.end()
        raise
    cell.watch.end(judged)


def _name(key: object) -> str:
    """What a cell is called in a profiler, within its problem."""
    return str(getattr(key, "label", key))


def _energy(cell: Timed, sensor: GpuSensor) -> float | None:
    """Joules of one call: of a decode step from replays over its caches, of a backward without the forward before."""
    read, wait = sensor.energy_j, torch.cuda.synchronize
    if cell.rotations is not None:
        closures = cell.rotations()
        replays = joules(capture(closures).replay, read, wait)
        return None if replays is None else replays / len(closures)
    if cell.setup is None:
        return joules(lambda: cell.run(None), read, wait)
    setup = cell.setup
    both, before = joules(lambda: cell.run(setup()), read, wait), joules(setup, read, wait)
    return None if both is None or before is None else max(0.0, both - before) or None


class Lane:
    """One cell on its way through the rounds."""

    def __init__(
        self, cell: Timed, device: str, settings: Settings, flush: Callable[[], Any] | None, sensor: GpuSensor | None
    ) -> None:
        with _watched(cell):
            call_s, total_s, peak = _warm_up(cell, device, settings)
        name = settings.timer
        if name == "auto":
            name = "cpu" if device == "cpu" else "graph" if cell.rotations else "events"
        # A CPU's caches are left as they are.
        cache = "warm" if device == "cpu" else settings.cache
        self.measurement = Measurement(
            name, cache, peak_memory_mb=peak, ci_target=settings.target_on(device), loss=cell.loss
        )
        with _watched(cell):
            self._sampler: Sampler | None = _sampler(name, cell, device, flush, call_s)
        self._cell, self._device, self._settings, self._sensor = cell, device, settings, sensor
        self._samples = settings.samples_a_round(total_s, on_gpu=device == "cuda")
        self._clocks: list[float] = []
        self._spent_s = self._waited_s = 0.0
        self._least_s = CPU_SECONDS if device == "cpu" else 0.0
        self._look_at = settings.min_rounds  # rounds
        self.done = False

    def take_round(self) -> None:
        """One more round of samples; a round under throttling is taken again, and kept if that does not help."""
        for _ in range(1 + THROTTLED_REPEATS):
            samples = self._judged_samples()
            clock, throttled = self._sensor.read() if self._sensor else (None, None)
            if not throttled:
                break
        self.measurement.rounds.append(samples)
        if throttled is not None:
            self.measurement.throttled = bool(self.measurement.throttled) or throttled
        if clock is not None:
            self._clocks.append(clock)
            self.measurement.sm_clock_mhz = float(np.median(self._clocks))
        self.done = self._known_well_enough()

    def one_round_ms(self) -> float:
        """The median of a single round."""
        self.take_round()
        return float(np.median(self.measurement.rounds))

    def _judged_samples(self) -> list[float]:
        """The samples of a round, of which one drawn at random has its result judged. Raises WrongResultError."""
        if RANDOM.random() * (1 + len(self.measurement.rounds)) >= JUDGED_ROUNDS:
            return self._take(self._samples)
        first = RANDOM.randint(1, self._samples)
        return self._take(first, judged=True) + self._take(self._samples - first)

    def _take(self, count: int, judged: bool = False) -> list[float]:
        """So many samples, the last one's result `judged` or not; the time that they take is counted."""
        if not count:
            return []
        assert self._sampler is not None
        with _watched(self._cell, judged):
            waits, started = self._run_delays_s(), perf_counter()
            samples = self._sampler(count)
            self._add_run_delay(waits, perf_counter() - started)
        return samples

    def _run_delays_s(self) -> dict[str, float]:
        return run_delays_s() if self.measurement.timer == "cpu" else {}

    def _add_run_delay(self, before_s: Mapping[str, float], round_s: float) -> None:
        """Count samples that were just taken and their longest wait for a core, of which a part may lie outside."""
        self._spent_s += round_s
        waited_s = longest_wait_s(before_s, self._run_delays_s())
        if waited_s is not None and self._spent_s:
            self._waited_s += min(waited_s, round_s)
            self.measurement.run_delay = self._waited_s / self._spent_s

    def close(self) -> None:
        """No more calls: give back what the sampler holds, a graph and its memory for instance."""
        self.done = True
        self._sampler = None

    def _known_well_enough(self) -> bool:
        rounds, settings = self.measurement.rounds, self._settings
        if len(rounds) < settings.min_rounds:
            return False
        if len(rounds) >= settings.max_rounds or self._spent_s >= settings.time_limit_s:
            return True
        if len(rounds) < self._look_at or self._spent_s < self._least_s:
            return False
        self._look_at = math.ceil(LOOK_AGAIN * len(rounds))
        low, high = median_interval(rounds)
        return half_interval(low, high) <= self.measurement.ci_target


def _warm_up(cell: Timed, device: str, settings: Settings) -> tuple[float, float, float | None]:
    """Call until compilation is over and times agree: seconds of a call, those with its setup, and peak MB."""
    wait = synchronize(device)
    limit = min(WARM_UP_SECONDS, settings.time_limit_s / 2)
    least = GPU_WARM_UP_SECONDS if device == "cuda" else 0.0
    peak = None
    calls: list[float] = []
    started = perf_counter()
    while True:
        first = perf_counter()
        cell.watch.change()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        state = cell.setup() if cell.setup else None
        cell.watch.change_gradient()
        wait()
        second = perf_counter()
        cell.run(state)
        wait()
        end = perf_counter()
        del state
        if device == "cuda":
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        calls.append(end - second)
        if len(calls) == 1:  # the one that compiles
            started = end
            continue
        if calls[-1] > settings.time_limit_s:
            raise TimeoutError(f"one call takes {calls[-1]:.3g} s, and the time limit is {settings.time_limit_s:g} s")
        last = calls[-3:]
        settled = len(calls) > 3 and max(last) <= (1 + AGREEMENT) * min(last) and end - started >= least
        if settled or end - started >= limit:
            return min(last), end - first, peak


def _prepared(cell: Timed, flush: Callable[[], Any] | None) -> Any:
    """What comes before a window: other values of the inputs, the setup, whose result is returned, and the flush."""
    cell.watch.change()
    state = cell.setup() if cell.setup else None
    cell.watch.change_gradient()
    if flush is not None:
        flush()
    return state


def _sampler(name: str, cell: Timed, device: str, flush: Callable[[], Any] | None, call_s: float) -> Sampler:
    before, look = functools.partial(_prepared, cell, flush), cell.watch.look
    if name == "cpu":
        return cpu_sampler(cell.run, before, synchronize(device), look)
    if name == "events":
        return events_sampler(cell.run, before, look, call_s, several=flush is None and cell.setup is None)
    if cell.setup is not None:
        raise ValueError("a graph cannot replay a backward pass alone; use --timer events")
    if cell.rotations is not None and flush is not None:
        closures = cell.rotations()
        return graph_sampler(closures, functools.partial(_prepared, cell, clean_lines()), look, several=True)
    return graph_sampler([functools.partial(cell.run, None)], before, look, several=flush is None)


def synchronize(device: str) -> Callable[[], Any]:
    """What waits until "cuda" or "cpu" has done all that it was given."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _on_copies(case: Case, build: Build, inputs: Inputs) -> list[Callable[[], Any]]:
    """The closure on as many copies of the inputs as push each other out of the L2 cache."""
    inputs = inputs.given_to(case)
    size = inputs.k.nbytes + inputs.v.nbytes
    copies = min(MAX_ROTATIONS, math.ceil(2 * l2_bytes() / size))
    return [build(case, copy) for copy in inputs.copies(copies)]


def phase(device: str, name: str) -> AbstractContextManager[None]:
    """A range called `name` around work of the GPU; on the CPU a context that does nothing."""
    return torch.cuda.nvtx.range(name) if device == "cuda" else nullcontext()


def joules(call: Callable[[], Any], read: Callable[[], float | None], synchronize: Callable[[], Any]) -> float | None:
    """Joules of one `call`, power at rest included; `read` gives a counter that moves a few times a second.

    Calls follow each other without a pause, for LEAD_S before the counter counts. The window goes from one of its steps
    to another, at least WINDOW_S later. A step is seen late by a batch of calls at most, or by a step: the window is
    EDGES times that, so the error is about 5 % at most. GPUs such as the H100 sample their power a part of the time
    only (arXiv 2312.02741), which does not matter for calls that are alike and short. None without a counter, or if it
    does not move.
    """
    last = read()
    if last is None:
        return None
    started = moved = perf_counter()
    first: tuple[float, int, float] | None = None
    calls, batch = 0, 1
    while True:
        begun = perf_counter()
        for _ in range(batch):
            call()
        synchronize()
        now, counter = perf_counter(), read()
        calls += batch
        batch = max(1, min(2 * batch, int(BATCH_S * batch / max(now - begun, 1e-9))))
        if counter is None or (counter == last and now - moved > STUCK_S):
            return None
        if counter == last:
            continue
        last, moved = counter, now
        if first is None and now - started >= LEAD_S:
            first = counter, calls, now
        elif first is not None and now - first[2] >= max(WINDOW_S, EDGES * min(now - begun, STEP_S)):
            return (counter - first[0]) / (calls - first[1])
