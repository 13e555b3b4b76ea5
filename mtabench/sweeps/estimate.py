"""What of a sweep can run on this machine, and how long it may take: a guess from work and rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtabench import environment
from mtabench.prediction.memory import measuring_bytes, model_bytes
from mtabench.problem.case import Case
from mtabench.problem.work import executed_flops
from mtabench.registry import implementation_of

if TYPE_CHECKING:
    from mtabench.measuring.timing import Settings

WARM_UP_S = 1.0
PROCESS_S = 6.0
USUAL_ROUNDS = 20  # until a time is known well enough


@dataclass(frozen=True, slots=True)
class GuessedRates:
    """FLOP/s of dense and of fused work, seconds to compile, and what the float64 check takes.

    `checked_scores` is the size of its sample, `score_s` the seconds for each; backward, a whole head is checked.
    """

    dense: float
    fused: float
    compile_s: float
    checked_scores: int
    score_s: float


# Seen on a small CPU and an H200.
RATES = {
    "cuda": GuessedRates(dense=4e12, fused=1.5e14, compile_s=8.0, checked_scores=2**28, score_s=4e-9),
    "cpu": GuessedRates(dense=7e9, fused=4e10, compile_s=8.0, checked_scores=2**22, score_s=1e-6),
}


def estimate_seconds(cases: Iterable[Case], settings: Settings, isolated: bool = False) -> float:
    """Seconds that measuring these cells may take, each being checked, warmed up and sampled in rounds.

    Isolated cells take the start of a process each, and a float64 check of their own.
    """
    total = 0.0
    problems: set[tuple] = set()
    compiled: set[tuple] = set()
    for case in cases:
        rates = RATES[case.device]
        call_s = call_seconds(case)
        kernels = case.impl, case.problem_key, case.page_size
        if implementation_of(case).compiles and kernels not in compiled:
            compiled.add(kernels)
            total += rates.compile_s
        if call_s > settings.time_limit_s:
            total += 3 * call_s  # one to check, two to find that it is too slow
        else:
            samples = settings.samples_a_round(call_s, on_gpu=case.device == "cuda")
            most_s = min(settings.time_limit_s, min(USUAL_ROUNDS, settings.max_rounds) * samples * call_s)
            total += call_s + WARM_UP_S + max(settings.min_rounds * call_s, most_s)
        if isolated:
            total += PROCESS_S
        if isolated or case.problem_key not in problems:
            problems.add(case.problem_key)
            total += rates.score_s * _checked_scores(case, rates.checked_scores)
    return total


def call_seconds(case: Case) -> float:
    """One call, by the work that it executes."""
    rates, implementation = RATES[case.device], implementation_of(case)
    rate = implementation.flops or (rates.dense if implementation.work == "dense" else rates.fused)
    return executed_flops(case, implementation.work) / rate


def _checked_scores(case: Case, most: int) -> int:
    of_head = case.batch * (case.seq if case.pass_ == "decode" else case.seq**2)
    scores = min(most, case.heads * of_head)
    return max(scores, of_head) if case.pass_ == "bwd" else scores


def shown(seconds: float) -> str:
    """A duration for a person: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def unsupported_reason(case: Case) -> str | None:
    """Why this implementation cannot run this cell on this machine, or None."""
    implementation = implementation_of(case)
    if case.pass_ not in implementation.passes:
        return f"{case.impl} has no {case.pass_} pass, only {', '.join(implementation.passes)}"
    reason = implementation.why_not(case)
    if not reason and case.device not in implementation.devices:
        return f"{case.impl} runs on {', '.join(implementation.devices)} only"
    return reason


def memory_reason(case: Case) -> str | None:
    """Why this cell would end a process on a CPU for lack of memory, or None; a GPU that is full says so itself."""
    free = environment.available_memory_bytes(case.device) if case.device == "cpu" else None
    needed = measuring_bytes(case) if case.layers is None else model_bytes(case)
    if free is None or needed <= free:
        return None
    return f"needs about {needed / 2**30:.3g} GiB of memory, and {free / 2**30:.3g} GiB are free"
