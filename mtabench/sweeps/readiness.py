"""What can run on this machine, told before it is tried."""

from mtabench import environment
from mtabench.prediction.memory import measuring_bytes, model_bytes
from mtabench.problem.case import Case
from mtabench.registry import implementation_of


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
