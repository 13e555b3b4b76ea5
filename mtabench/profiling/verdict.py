"""What bounds a kernel, in words, by one written rule.

Of tensor cores, shared memory, L2 and memory, the one with the highest share of its peak bounds the kernel if that
share is at least 60 %. Below, nothing is busy enough: the kernel waits, which is called latency, and what its warps
wait for most is named. A call whose kernels take less than half of its wall time is bound by launches, whatever its
kernels do. How much is left: a kernel bound by a unit at 80 % of its peak can get at most 1 / 0.8 = 1.25 times faster
without asking less of that unit.
"""

from mtabench.prediction.predict import Prediction
from mtabench.profiling.ncu_report import Counters

BOUND_PCT = 60.0
LAUNCH_SHARE = 0.5
WORTH_NAMING = 0.1


def bound_by(counters: Counters) -> str:
    """ "tensor cores", "shared memory", "L2", "memory" or "latency"; empty if none of the four was measured."""
    units = shares(counters)
    if not units:
        return ""
    name = max(units, key=lambda name: units[name])
    return name if units[name] >= BOUND_PCT else "latency"


def shares(counters: Counters) -> dict[str, float]:
    """Percent of the peak of each unit that was measured."""
    units = {
        "tensor cores": counters.tensor_pct,
        "shared memory": counters.shared_pct,
        "L2": counters.l2_pct,
        "memory": counters.memory_pct,
    }
    return {name: share for name, share in units.items() if share is not None}


def verdict(counters: Counters) -> str:
    """One clause: what bounds the kernel, and by how much."""
    name, units = bound_by(counters), shares(counters)
    if not name:
        return "not known: no counter of a unit was measured"
    if name != "latency":
        share = units[name]
        more = f", at most {100 / share:.2f}x faster without less of it" if share < 100 else ""
        return f"bound by {name}: {share:.0f} % of its peak{more}"
    busiest = max(units, key=lambda one: units[one])
    waits = ", ".join(f"{reason} {share:.0%}" for reason, share in counters.stalls[:2] if share >= WORTH_NAMING)
    return f"bound by latency: {busiest} is busiest, at {units[busiest]:.0f} %" + (
        f"; warps wait for {waits}" if waits else ""
    )


def launch_verdict(kernel_ms: float, wall_ms: float) -> str:
    """A clause on a call as a whole: the share of its wall time in which kernels run."""
    share = min(1.0, kernel_ms / wall_ms)
    if share < LAUNCH_SHARE:
        return f"bound by launches: kernels take {share:.0%} of the call's {wall_ms:.4g} ms, the host the rest"
    return f"kernels take {share:.0%} of the call's {wall_ms:.4g} ms"


def least_verdict(prediction: Prediction, kernel_ms: float) -> str:
    """A clause on a call as a whole: the least time of its work beside the time of its kernels."""
    least_ms, by = prediction.seconds * 1e3, prediction.bound_by
    return f"at least {least_ms:.4g} ms, by {by}: {least_ms / kernel_ms:.0%} of the time of its kernels"
