"""Eager PyTorch: products, passes over the N x N scores, and a convolution on the CUDA cores."""

from __future__ import annotations

from mtabench.model.kernel import Kernel, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.work import gated, mixed, pairs, taps, tokens

# Fused multiply-adds a second of PyTorch's convolution, one channel a head, calibrated on results/nvidia-h200/*.csv.
# It counts elements in 32 bits; from 2^31 scores on another, slower kernel takes its place.
CONVOLUTION = {"fwd": 1.45e12, "bwd": 0.77e12, "decode": 1.45e12}
LARGE_CONVOLUTION = {"fwd": 0.54e12, "bwd": 0.115e12, "decode": 0.54e12}
INDEX_LIMIT = 2**31
# How often all scores are read or written: by the products, scale, two masks, padding, convolution and softmax;
# backward by the same the other way round.
PASSES = {"fwd": 14, "bwd": 24, "decode": 14}
PRODUCT_SHARE = 0.6
# Multiply-adds a second of a mixing of heads, a product whose inner dimension is the heads: eager of both mixings took
# 15.5 ms and its backward 28.6 on an H200 (16 heads of 64, 4096 tokens), a run whose rows are not kept.
MIXING = 0.66e12
# How often the output is read or written, in elements of 16 bits: by the norm, most of whose steps are in float32, by a
# gate a row, and by one a head dim; backward by the same the other way round.
NORM_PASSES, GATE_PASSES, FULL_GATE_PASSES = 20, 3, 7
# A decode step multiplies a few rows with the whole cache, far below a copy's bandwidth, and masks the values; and some
# small kernels cut out what is there of the cache.
DECODE_CACHE_SHARE, DECODE_LAUNCHES = 0.24, 12


def kernels(case: Case) -> list[Kernel]:
    """The kernels of one call of "eager", by kind."""
    steps = filter(None, (case.operation.pre_conv, case.operation.post_conv))
    window = min(case.seq, max((step.query_taps for step in steps), default=1)) if case.pass_ == "decode" else 1
    dense = pairs(case, dense=True) * window
    products = 4 if case.pass_ == "bwd" else 2
    element = BYTES_PER_ELEMENT[case.dtype]
    _, keys = tensor_bytes(case)
    passes = PASSES[case.pass_]
    repeated = 2 if case.pass_ == "bwd" else 1  # a step's gradient, and its mixer's
    rates = LARGE_CONVOLUTION if dense >= INDEX_LIMIT else CONVOLUTION
    found = [
        Kernel(
            "products", launches=products, macs=dense * products * case.head_dim, tensor_share=PRODUCT_SHARE,
            memory_bytes=2 * keys * products, memory_share=DECODE_CACHE_SHARE if case.pass_ == "decode" else 1.0,
        ),
        Kernel(
            "passes over scores", launches=passes // 2 + (DECODE_LAUNCHES if case.pass_ == "decode" else 0),
            memory_bytes=passes * dense * element,
        ),
        Kernel("convolution", launches=repeated, fmas=repeated * dense * taps(case), fma_rate=rates[case.pass_]),
    ]  # fmt: skip
    if case.mixings:
        count = repeated * len(case.mixings)
        found.append(
            Kernel(
                "mixing", launches=count, fmas=repeated * dense * mixed(case), fma_rate=MIXING,
                memory_bytes=2 * count * dense * element,
            )
        )  # fmt: skip
    norm, gate = case.operation.norm, case.operation.gate
    if norm or gate:
        passes = (NORM_PASSES if norm else 0) + ((FULL_GATE_PASSES if gate.full else GATE_PASSES) if gate else 0)
        found.append(
            Kernel(
                "norm and gate", launches=repeated * ((8 if norm else 0) + (3 if gate else 0)),
                macs=(3 if repeated > 1 else 1) * gated(case), tensor_share=PRODUCT_SHARE,
                memory_bytes=repeated * passes * tokens(case) * case.heads * case.head_dim * element,
            )
        )  # fmt: skip
    return found
