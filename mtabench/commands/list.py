"""The command `mtabench list`: what can be measured, and why not here."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from mtabench import registry
from mtabench.console import say
from mtabench.environment import check_device_name, resolve_device
from mtabench.problem.case import PASSES, Case
from mtabench.problem.operations import PLAIN, make_operation
from mtabench.registry import GROUPS, Implementation, names
from mtabench.remembered import remembered


def run(device: str, anew: bool) -> int:
    """Print every implementation, what it does and whether it is ready on this machine, and the groups of them."""
    check_device_name(device)
    found = remembered(f"list-{device}", lambda: readiness(device), anew)
    device, reasons = found["device"], found["reasons"]
    console = Console()
    width = max(map(len, names())) + 1
    for implementation in registry.IMPLEMENTATIONS:
        reason = reasons[_key(implementation)]
        state = Text(f"not ready on this machine ({device}): {reason}" if reason else "ready")
        state.stylize("yellow" if reason else "green")
        console.print(Text(f"{implementation.name:<{width}}").append_text(state), soft_wrap=True)
        say(console, f"{'':<{width}}{implementation.op}: {', '.join(implementation.passes)}; {implementation.summary}")
        if implementation.note:
            say(console, f"{'':<{width}}note: {implementation.note}")
    for group, members in GROUPS.items():
        say(console, f"{group:<{width}}--impl {group} stands for {', '.join(members)}")
    return 0


def readiness(device: str) -> dict[str, Any]:
    """The `device` that this machine has, and for each implementation why it is not ready there, or None."""
    from mtabench.measuring.readiness import unsupported_reason

    device = resolve_device(device)
    cases = {_key(one): _typical_case(one, device) for one in registry.IMPLEMENTATIONS}
    return {"device": device, "reasons": {key: unsupported_reason(case) for key, case in cases.items()}}


def _key(implementation: Implementation) -> str:
    return f"{implementation.name} {implementation.op}"


def _typical_case(implementation: Implementation, device: str) -> Case:
    taps = None if implementation.op == PLAIN else (6, 11)
    operation = make_operation(taps, "heads" if implementation.op == "mta" else "", None, heads=16, head_dim=64)
    return Case(
        pass_=next(pass_ for pass_ in PASSES if pass_ in implementation.passes), impl=implementation.name,
        operation=operation, dtype="fp32" if device == "cpu" in implementation.devices else "bf16",
        batch=1, heads=16, kv_heads=16, seq=1024, head_dim=64, splits=None, device=device,
    )  # fmt: skip
