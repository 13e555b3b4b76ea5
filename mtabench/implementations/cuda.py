"""The CUDA kernels: those for Hopper GPUs, and those for every NVIDIA GPU from sm_80 on."""

from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by

ENTRIES = (
    Implementation(
        order=40, name="hopper", op="conv-attention", passes=("fwd", "bwd"), devices=("cuda",), work="banded",
        summary="fused CUDA kernels for H100 and H200, the convolution as banded products on the tensor cores",
        note="above head dim 128 with the backward of cuda",
        build=partial(conv_attention_by, "hopper"), why_not=partial(backend_why_not, "hopper"),
        style=Style("#0072B2", "#4FA3FF", "X", "-"), compiles=True,
        planned=True,
    ),
    Implementation(
        order=50, name="cuda", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda",), work="banded",
        summary="fused CUDA kernels for every NVIDIA GPU from sm_80 on, the convolution as banded products on the "
        "tensor cores; in decode, the keys shared evenly by all programs",
        build=partial(conv_attention_by, "cuda"), why_not=partial(backend_why_not, "cuda"), splits=True,
        pages=True,
        style=Style("#00796B", "#2BC4B0", "p", "-"),
        compiles=True, planned=True,
    ),
)  # fmt: skip
