"""Copies of a case, with an operation named as on the command line."""

from dataclasses import replace

from mta_kernels.operation import Operation


def with_changes(case, **changes):
    """A copy of a case; `taps` (None for plain attention) and `causal` change its operation."""
    convolution, head_dim = case.operation.pre_conv, changes.get("head_dim", case.head_dim)
    taps = changes.pop("taps", convolution and convolution.taps)
    causal = changes.pop("causal", case.operation.causal)
    return replace(case, operation=Operation.of(taps, head_dim, causal=causal), **changes)
