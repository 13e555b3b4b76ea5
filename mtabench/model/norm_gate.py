"""What runs behind the output, counted from kernels/mta_kernels/multi_token_attention/norm_gate.py.

Norm and gate read the output and write another; backward they read what they read, and its gradient, and write one. A
gate of a number a head dim stores three such tensors in between, of which its products make gradients.
"""

from __future__ import annotations

from mtabench.model.kernel import Kernel
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.work import gated, tokens

PRODUCT_SHARE = 0.5  # of a plain product's rate, as the products of a first prototype; no committed results hold it


def kernels(case: Case) -> list[Kernel]:
    """What runs behind the output, if anything does."""
    norm, gate = case.operation.norm, case.operation.gate
    if norm is None and gate is None:
        return []
    output = tokens(case) * case.heads * case.head_dim * BYTES_PER_ELEMENT[case.dtype]
    products = gated(case) if gate and gate.full else 0
    if case.pass_ != "bwd":
        return [Kernel("norm and gate", macs=products, tensor_share=PRODUCT_SHARE, memory_bytes=2 * output)]
    through = Kernel("norm and gate, backward", memory_bytes=3 * output)
    if not products:
        return [through]
    gradients = Kernel(
        "products of the gate", launches=4, macs=3 * products, tensor_share=PRODUCT_SHARE, memory_bytes=11 * output
    )
    return [gradients, through]
