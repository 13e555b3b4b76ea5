"""The command `mtabench list`: what can be measured, and why not here."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mtabench import registry
from mtabench.console import say
from mtabench.environment import resolve_device
from mtabench.measuring.readiness import unsupported_reason
from mtabench.problem.case import PASSES, Case
from mtabench.problem.operations import PLAIN, make_operation
from mtabench.registry import GROUPS, Implementation, entry_points, names


def run(device: str) -> int:
    """Print every implementation, what it does and whether it is ready on this machine, and the groups of them."""
    device = resolve_device(device)
    console = Console()
    width = max(map(len, names())) + 1
    for implementation in registry.IMPLEMENTATIONS:
        reason = unsupported_reason(_typical_case(implementation, device))
        state = Text(f"not ready on this machine ({device}): {reason}" if reason else "ready")
        state.stylize("yellow" if reason else "green")
        console.print(Text(f"{implementation.name:<{width}}").append_text(state), soft_wrap=True)
        say(console, f"{'':<{width}}{implementation.op}: {', '.join(implementation.passes)}; {implementation.summary}")
        if implementation.note:
            say(console, f"{'':<{width}}note: {implementation.note}")
    for name, point in entry_points().items():
        package = f"of {point.dist.name} {point.dist.version}" if point.dist else "of a package"
        when = "hidden by one of mtabench's own" if name in (*names(), *GROUPS) else "imported when --impl names it"
        say(console, f"{name:<{width}}{package} ({point.value}): {when}")
    for group, members in GROUPS.items():
        say(console, f"{group:<{width}}--impl {group} stands for {', '.join(members)}")
    return 0


def _typical_case(implementation: Implementation, device: str) -> Case:
    taps = None if implementation.op == PLAIN else (6, 11)
    operation = make_operation(taps, "heads" if implementation.op == "mta" else "", None, heads=16, head_dim=64)
    return Case(
        pass_=next(pass_ for pass_ in PASSES if pass_ in implementation.passes), impl=implementation.name,
        operation=operation, dtype="fp32" if device == "cpu" in implementation.devices else "bf16",
        batch=1, heads=16, kv_heads=16, seq=1024, head_dim=64, splits=None, device=device,
    )  # fmt: skip
