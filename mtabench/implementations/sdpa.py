"""Plain attention by PyTorch's scaled_dot_product_attention, an implementation a backend of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mtabench.implementations import Closure, Implementation, Style
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from mtabench.problem.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Closure:
    """Plain attention by the SDPA backend that the implementation is named after; decode: the newest query."""
    from mta_ladder import attention_sdpa

    backend, options = _backend(case), case.operation.options
    if case.pass_ == "decode":
        options["causal"] = False  # the newest query sees every key
    q, k, v = inputs.q[:, :, -1:] if case.pass_ == "decode" else inputs.q, inputs.k, inputs.v
    return lambda: attention_sdpa(q, k, v, backend=backend, **options)


def why_not(case: Case) -> str | None:
    """Why PyTorch has no such SDPA kernel for this case, or None."""
    import torch

    from mta_ladder import sdpa_unsupported
    from mtabench.problem.inputs import DTYPES

    return sdpa_unsupported(
        device=torch.device(case.device), dtype=DTYPES[case.dtype], head_dim=case.head_dim, backend=_backend(case),
        keys=case.seq,
    )  # fmt: skip


def _backend(case: Case) -> str:
    return case.impl.removeprefix("sdpa-")


_sdpa = partial(
    Implementation, op="attention", passes=("fwd", "bwd", "decode"), build=build, why_not=why_not, yardstick=True
)

ENTRIES = (
    _sdpa(
        order=200, name="sdpa-flash", devices=("cuda", "cpu"), work="tiled",
        summary="plain attention: PyTorch's SDPA, FlashAttention backend", groups=("ladder",),
        style=Style("#6E6E6E", "#A3A3A3", "D", (0, (4, 1.6))),
    ),
    _sdpa(
        order=210, name="sdpa-cudnn", devices=("cuda",), work="tiled",
        summary="plain attention: PyTorch's SDPA, cuDNN backend", groups=("ladder",),
        style=Style("#6E6E6E", "#A3A3A3", "v", (0, (1.2, 1.2))),
        no_expanded_dout=(
            "PyTorch takes the plan of an earlier backward with the strides of q, k and v, whatever the strides of dout"
        ),
    ),
    _sdpa(
        order=220, name="sdpa-math", devices=("cuda", "cpu"), work="dense",
        summary="plain attention: PyTorch's SDPA, unfused; stores the N x N scores", by_name=True,
        style=Style("#8C8C8C", "#858585", "P", (0, (5, 1.5, 1, 1.5))),
    ),
)  # fmt: skip
