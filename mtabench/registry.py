"""What can be measured: one literal table. Knows nothing of torch; what an implementation needs is imported by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mtabench.errors import UsageError

BASELINE = "eager"
# Names of --impl that stand for several: plain attention from a triple loop to the fastest kernels, in that order.
GROUPS = {
    "ladder": (
        "c-loops", "c-tiled", "cuda-naive", "cuda-tiled", "cuda-flash", "triton-pointer", "triton-descriptor",
        "triton-fmha", "cutile-fmha", "sdpa-flash", "sdpa-cudnn", "flex", "flash-attn", "flash-attn-3",
    ),
}  # fmt: skip
# Plain attention by other projects: no commit of this one changes its time.
YARDSTICKS = ("sdpa-flash", "sdpa-cudnn", "sdpa-math", "flex", "flash-attn", "flash-attn-3")


@dataclass(frozen=True, slots=True)
class Implementation:
    """A way to compute attention.

    `target` names a function `(case, inputs) -> closure`, where the closure computes the output; `unsupported`
    one `(case) -> reason or None`. `work` says how its executed FLOPs are counted: "dense" (every score, masked or
    not), "tiled" (the scores that count), "expanded" (those, with queries and keys `min(cq, ck)` times as long),
    "banded" (those, and a banded product a tap) or "overlapped" (those, and the margins that tiles share).
    `splits_used`, where decode can split its keys, names a function `(case) -> int`: the splits that a cell takes.
    `interpreted`, where an interpreter can check on a CPU what only a GPU can run, one `(case) -> reason or None`.
    What is `by_name` is measured where --impl names it, and by no sweep without.
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
    interpreted: str = ""
    by_name: bool = False


def _rung(
    name: str, devices: tuple[str, ...], work: str, summary: str, *,
    passes: tuple[str, ...] = ("fwd",), unsupported: str = "rung_unsupported", interpreted: str = "",
) -> Implementation:  # fmt: skip
    """A rung of the ladder, `mta_kernels.attention.RUNGS`."""
    return Implementation(
        name=name,
        op="attention",
        passes=passes,
        devices=devices,
        work=work,
        summary=f"plain attention: {summary}",
        target="mtabench.implementations:rung",
        unsupported=f"mtabench.implementations:{unsupported}",
        interpreted=interpreted,
        by_name=True,
    )


def _triton_rung(name: str, work: str, summary: str) -> Implementation:
    checked = "mtabench.implementations:rung_unsupported"
    return _rung(name, ("cuda",), work, summary, unsupported="triton_rung_unsupported", interpreted=checked)


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
        interpreted="mtabench.implementations:triton_interpreted_unsupported",
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
        note="backward up to head dim 128; auto takes triton above",
    ),
    Implementation(
        name="cuda",
        op="conv-attention",
        passes=("decode",),
        devices=("cuda",),
        work="expanded",
        summary="one fused CUDA kernel for every NVIDIA GPU from sm_80 on, the keys shared evenly by all its programs",
        target="mtabench.implementations:cuda",
        unsupported="mtabench.implementations:cuda_unsupported",
        splits_used="mtabench.implementations:cuda_splits_used",
    ),
    Implementation(
        name="cuda-conv",
        op="conv-attention",
        passes=("fwd", "bwd", "decode"),
        devices=("cuda",),
        work="overlapped",
        summary="the published approach in CUDA: overlapping tiles, the convolution on the CUDA cores",
        target="mtabench.implementations:cuda_conv",
        unsupported="mtabench.implementations:cuda_conv_unsupported",
        splits_used="mtabench.implementations:cuda_conv_splits_used",
        by_name=True,
    ),
    _rung("c-loops", ("cpu",), "dense", "three loops in C; stores the N x N scores of a head"),
    _rung("c-tiled", ("cpu",), "tiled", "C in tiles that fit the caches, all cores and their vector units"),
    _rung("cuda-naive", ("cuda",), "dense", "three CUDA kernels, a thread an element; stores the N x N scores"),
    _rung("cuda-tiled", ("cuda",), "tiled", "the same by tiles in shared memory; stores the N x N scores"),
    _rung("cuda-flash", ("cuda",), "tiled", "one fused CUDA kernel, tensor cores, online softmax"),
    _triton_rung("triton-pointer", "dense", "fused in Triton, pointers and masks over the packed layout"),
    _triton_rung("triton-descriptor", "dense", "fused in Triton, tensor descriptors, keys stored transposed"),
    _triton_rung("triton-fmha", "tiled", "fused in Triton as it is run: exp2, skipped tiles, grouped heads"),
    _rung("cutile-fmha", ("cuda",), "tiled", "the same in NVIDIA's cuTile for Python"),
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
        by_name=True,
    ),
    _rung(
        "flex",
        ("cuda", "cpu"),
        "tiled",
        "PyTorch's FlexAttention, written by torch.compile",
        passes=("fwd", "bwd"),
        unsupported="flex_unsupported",
    ),
    _rung("flash-attn", ("cuda",), "tiled", "FlashAttention-2, the package of its authors", passes=("fwd", "bwd")),
    _rung("flash-attn-3", ("cuda",), "tiled", "FlashAttention-3, the package of its authors", passes=("fwd", "bwd")),
)


def names() -> list[str]:
    """Names of all implementations, in the table's order."""
    return [implementation.name for implementation in IMPLEMENTATIONS]


def find(name: str) -> Implementation:
    """The implementation called `name`; raises UsageError with the nearest names if there is none."""
    for implementation in IMPLEMENTATIONS:
        if implementation.name == name:
            return implementation
    if name in GROUPS:
        raise UsageError(
            f"{name!r} stands for several implementations, and one is expected here: {', '.join(GROUPS[name])}"
        )
    near = difflib.get_close_matches(name, [*names(), *GROUPS], n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join([*names(), *GROUPS])}"
    raise UsageError(f"no implementation is called {name!r}; {hint} (`mtabench list` shows all)")


def chosen(typed: Iterable[str]) -> list[Implementation]:
    """The implementations that these names, of groups too, stand for, each once; raises UsageError as `find`."""
    single = [one for name in typed for one in GROUPS.get(name, (name,))]
    return [find(name) for name in dict.fromkeys(single)]


def splitting_names() -> list[str]:
    """Names of the implementations whose decode takes a number of splits."""
    return [implementation.name for implementation in IMPLEMENTATIONS if implementation.splits_used]


def load(reference: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, function = reference.split(":")
    return getattr(importlib.import_module(module), function)


def default_names(pass_: str, device: str) -> list[str]:
    """What a sweep measures without --impl: whatever runs there, but for what is measured by name alone."""
    return [
        implementation.name
        for implementation in IMPLEMENTATIONS
        if pass_ in implementation.passes and device in implementation.devices and not implementation.by_name
    ]
