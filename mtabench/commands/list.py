"""The command `mtabench list`: what can be measured, and why not here."""

from typing import Any

from mtabench import registry
from mtabench.console import make_console
from mtabench.environment import resolve_device
from mtabench.json_output import print_json
from mtabench.problem.case import PASSES, Case
from mtabench.problem.operations import PLAIN, make_operation
from mtabench.registry import GROUPS, Implementation, names
from mtabench.tables import print_prose


def run(device: str, as_json: bool) -> int:
    """Print every implementation, what it does and whether it is ready on this machine, and the groups of them."""
    device = resolve_device(device)
    reasons = readiness(device)
    if as_json:
        print_json("list", _data(device, reasons))
        return 0
    console = make_console()
    width = max(map(len, names())) + 1
    above: tuple[str, str | None] = "", None
    for implementation in sorted(registry.IMPLEMENTATIONS, key=lambda one: names().index(one.name)):
        reason = reasons[implementation.key]
        shown, name = above, implementation.name
        above = name, reason
        state = f"not ready on this machine ({device}): {reason}" if reason else "ready"
        if above != shown:  # of an entry for another operation
            label = "" if name == shown[0] else name
            print_prose(console, state, f"{label:<{width}}", "yellow" if reason else "green")
        does = f"{implementation.op}: {', '.join(implementation.passes)}; {implementation.summary}"
        print_prose(console, does, " " * width)
        if implementation.note:
            print_prose(console, f"note: {implementation.note}", " " * width)
    for group, members in GROUPS.items():
        print_prose(console, f"--impl {group} stands for {', '.join(members)}", f"{group:<{width}}")
    return 0


def readiness(device: str) -> dict[tuple[str, str, bool], str | None]:
    """Of each implementation, by its key, why it is not ready on "cuda" or "cpu", or None."""
    from mtabench.sweeps.estimate import unsupported_reason

    return {one.key: unsupported_reason(_typical_case(one, device)) for one in registry.IMPLEMENTATIONS}


def _data(device: str, reasons: dict[tuple[str, str, bool], str | None]) -> dict[str, Any]:
    """What `run` prints, for programs; `reasons` why an implementation is not ready are `readiness`'s."""
    implementations = []
    for one in registry.IMPLEMENTATIONS:
        reason = reasons[one.key]
        implementations.append({
            "name": one.name, "op": one.op, "passes": one.passes, "devices": one.devices, "summary": one.summary,
            "note": one.note or None, "ready": reason is None, "reason": reason,
        })  # fmt: skip
    groups = [{"name": name, "members": members} for name, members in GROUPS.items()]
    return {"device": device, "implementations": implementations, "groups": groups}


def _typical_case(implementation: Implementation, device: str) -> Case:
    taps = None if implementation.op == PLAIN else (6, 11)
    operation = make_operation(taps, "heads" if implementation.op == "mta" else "", None, heads=16, head_dim=64)
    return Case(
        pass_=next(pass_ for pass_ in PASSES if pass_ in implementation.passes), impl=implementation.name,
        operation=operation, dtype="fp32" if device == "cpu" in implementation.devices else "bf16",
        batch=1, heads=16, kv_heads=16, seq=1024, head_dim=64, splits=None, device=device,
        layers=1 if implementation.of_models else None,
    )  # fmt: skip
