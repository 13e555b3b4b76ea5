"""Ways to run a whole model: plain attention in all layers, or its own attention by the definition or by kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mtabench.implementations import Implementation, Style
from mtabench.problem.case import MODES, Case

if TYPE_CHECKING:
    from mtabench.transformer.model import Transformer
    from mtabench.transformer.shared import Shared


def build(case: Case, shared: Shared, *, backend: str, compiled: bool = False) -> Transformer:
    """The model of a case, its attention by a backend of the kernels."""
    return shared.model(case, backend, compiled=compiled)


def why_not(case: Case) -> str | None:
    """Why no model runs in this dtype, or None."""
    return "models run in bf16 and fp32: fp16 would need its loss scaled" if case.dtype == "fp16" else None


def compile_why_not(case: Case) -> str | None:
    """The same, or what torch.compile lacks."""
    from mta_kernels import torch_compile

    return why_not(case) or torch_compile.missing(case.device)


def _entries(name: str, order: int, backend: str, summary: str, **more: Any) -> tuple[Implementation, ...]:
    """An entry for conv attention and one for all of multi-token attention."""
    entry = partial(
        Implementation, name=name, devices=("cuda", "cpu"), summary=summary, build=partial(build, backend=backend),
        work="dense",
    )  # fmt: skip
    settings = {"passes": MODES, "why_not": why_not, **more}
    return (
        entry(op="conv-attention", order=order, **settings),
        entry(op="mta", order=order + 1, **settings),
    )


ENTRIES = (
    Implementation(
        name="plain", op="attention", order=300, passes=MODES, devices=("cuda", "cpu"), work="tiled",
        summary="a model with plain attention: PyTorch's SDPA; a generated token by this project's decode",
        build=partial(build, backend="auto"), why_not=why_not, style=Style("#6E6E6E", "#A3A3A3", "o", (0, (4, 1.6))),
    ),
    *_entries(
        "eager", 310, "reference", "a model with the definition in eager PyTorch",
        style=Style("#000000", "#F5F5F5", "o", "-"),
    ),
    *_entries(
        "compile", 320, "reference", "a model with the definition through torch.compile", passes=("train",),
        build=partial(build, backend="reference", compiled=True), why_not=compile_why_not, compiles=True,
        slow_to_compile=True, style=Style("#B8558F", "#E58FC2", "s", "-"),
    ),
    *_entries("auto", 330, "auto", "a model with the backend that each call takes by itself"),
)  # fmt: skip
