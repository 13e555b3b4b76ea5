"""What a model runs that names no backend: the fastest that can, which differs from call to call and GPU to GPU."""

from functools import partial

from mtabench.implementations import Implementation
from mtabench.implementations._calls import conv_attention_by, mta_by_backend

_auto = partial(
    Implementation, name="auto", passes=("fwd", "bwd", "decode"), devices=("cuda",), by_name=True, compiles=True,
    pages=True, why_not=lambda case: None, summary="the backend that a call takes by itself, as in a model",
)  # fmt: skip

ENTRIES = (
    # Of whichever backend: what any of them has to do.
    _auto(order=65, op="conv-attention", work="tiled", build=partial(conv_attention_by, "auto")),
    # The one backend of all steps is Triton's.
    _auto(order=95, op="mta", work="staged", build=partial(mta_by_backend, "auto"), planned=True),
)
