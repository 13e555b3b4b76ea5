"""What can be measured: one literal table. Knows nothing of torch; what an implementation needs is imported by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtabench.errors import UsageError

BASELINE = "eager"
BY_NAME_ALONE = ("sdpa-math", "hopper")  # the slow, unfused yardstick; what no GPU has run yet


@dataclass(frozen=True, slots=True)
class Implementation:
    """A way to compute attention.

    `target` names a function `(case, inputs) -> closure`, where the closure computes the output; `unsupported`
    one `(case) -> reason or None`. `work` says how its executed FLOPs are counted: "dense" (every score, masked or
    not), "tiled" (the scores that count), "expanded" (those, with queries and keys `min(cq, ck)` times as long) or
    "banded" (those, and a banded product a tap).
    `splits_used`, where decode can split its keys, names a function `(case) -> int`: the splits that a cell takes.
    """

    name: str
    op: str
    passes: tuple[str, ...]
    devices: tuple[str, ...]
    work: str
    summary: str
    target: str
    unsupported: str
    note: str = ""
    splits_used: str = ""


IMPLEMENTATIONS = (
    Implementation(
        name="eager",
        op="conv-attention",
        passes=("fwd", "bwd", "decode"),
        devices=("cuda", "cpu"),
        work="dense",
        summary="the definition in eager PyTorch; stores the N x N scores",
        target="mtabench.implementations:eager",
        unsupported="mtabench.implementations:never_unsupported",
    ),
    Implementation(
        name="compile",
        op="conv-attention",
        passes=("fwd", "bwd", "decode"),
        devices=("cuda", "cpu"),
        work="dense",
        summary="torch.compile of the definition",
        target="mtabench.implementations:compiled",
        unsupported="mtabench.implementations:compile_unsupported",
    ),
    Implementation(
        name="triton",
        op="conv-attention",
        passes=("fwd", "bwd", "decode"),
        devices=("cuda",),
        work="expanded",
        summary="fused Triton kernels in the expanded form, O(N) memory",
        target="mtabench.implementations:triton",
        unsupported="mtabench.implementations:triton_unsupported",
        note="backward keeps scores of 2048 query rows at a time",
        splits_used="mtabench.implementations:triton_splits_used",
    ),
    Implementation(
        name="hopper",
        op="conv-attention",
        passes=("fwd", "bwd"),
        devices=("cuda",),
        work="banded",
        summary="fused CUDA kernels for H100 and H200, the convolution as banded products on the tensor cores",
        target="mtabench.implementations:hopper",
        unsupported="mtabench.implementations:hopper_unsupported",
        note="checked in an emulator, not yet run on a GPU: measured if --impl names it",
    ),
    Implementation(
        name="sdpa-flash",
        op="attention",
        passes=("fwd", "bwd", "decode"),
        devices=("cuda", "cpu"),
        work="tiled",
        summary="plain attention: PyTorch's SDPA, FlashAttention backend",
        target="mtabench.implementations:sdpa",
        unsupported="mtabench.implementations:sdpa_unsupported",
    ),
    Implementation(
        name="sdpa-cudnn",
        op="attention",
        passes=("fwd", "bwd", "decode"),
        devices=("cuda",),
        work="tiled",
        summary="plain attention: PyTorch's SDPA, cuDNN backend",
        target="mtabench.implementations:sdpa",
        unsupported="mtabench.implementations:sdpa_unsupported",
    ),
    Implementation(
        name="sdpa-math",
        op="attention",
        passes=("fwd", "bwd", "decode"),
        devices=("cuda", "cpu"),
        work="dense",
        summary="plain attention: PyTorch's SDPA, unfused; stores the N x N scores",
        target="mtabench.implementations:sdpa",
        unsupported="mtabench.implementations:sdpa_unsupported",
    ),
)


def names() -> list[str]:
    """Names of all implementations, in the table's order."""
    return [implementation.name for implementation in IMPLEMENTATIONS]


def find(name: str) -> Implementation:
    """The implementation called `name`; raises UsageError with the nearest names if there is none."""
    for implementation in IMPLEMENTATIONS:
        if implementation.name == name:
            return implementation
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names())}"
    raise UsageError(f"no implementation is called {name!r}; {hint} (`mtabench list` shows all)")


def splitting_names() -> list[str]:
    """Names of the implementations whose decode takes a number of splits."""
    return [implementation.name for implementation in IMPLEMENTATIONS if implementation.splits_used]


def load(reference: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, function = reference.split(":")
    return getattr(importlib.import_module(module), function)


def default_names(pass_: str, device: str) -> list[str]:
    """What a sweep measures without --impl: whatever runs there, but for what is listed in BY_NAME_ALONE."""
    return [
        implementation.name
        for implementation in IMPLEMENTATIONS
        if pass_ in implementation.passes
        and device in implementation.devices
        and implementation.name not in BY_NAME_ALONE
    ]
