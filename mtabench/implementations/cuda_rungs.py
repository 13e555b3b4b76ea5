"""The ladder's rungs in CUDA."""

from __future__ import annotations

from mtabench.implementations import Style
from mtabench.implementations._calls import gpu_rung
from mtabench.problem.rungs import Rung

ENTRIES = (
    gpu_rung(
        order=130, name="cuda-naive", work="dense",
        summary="plain attention: three CUDA kernels, a thread an element; stores the N x N scores",
        style=Style("#117733", "#3CC46B", "o", (0, (1.2, 1.2)), alone=True),
        flops=1e12,  # a guess, as the others
        stores=Rung(score_bytes=4, passes=6),
    ),
    gpu_rung(
        order=140, name="cuda-tiled", work="tiled",
        summary="plain attention: the same by tiles in shared memory; stores the N x N scores",
        style=Style("#117733", "#3CC46B", "s", (0, (4, 1.6)), alone=True), flops=1e13,
        stores=Rung(score_bytes=4, passes=6, columns=64, causal_skips=True),
    ),
    gpu_rung(
        order=150, name="cuda-flash", work="tiled",
        summary="plain attention: one fused CUDA kernel, tensor cores, online softmax",
        style=Style("#117733", "#3CC46B", "^", "-", alone=True),
        stores=Rung(),
    ),
)  # fmt: skip
