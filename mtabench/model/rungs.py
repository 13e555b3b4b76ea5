"""What the rungs of plain attention keep in memory, one row a rung, read off their sources in mta_kernels/attention."""

from __future__ import annotations

from typing import NamedTuple

from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.work import pairs


class Rung(NamedTuple):
    """What a rung allocates beside its output.

    Scores are stored in `score_bytes` each, of all heads or of one after the other (`one_head`); 0 where none is. They
    are written or read `passes` times, and once more by the product with the values for every `columns` of its result
    (0: for all of them); those in the future are not, if `causal_skips`. `copies` names the inputs that are copied into
    another layout before. `mask_bytes` is what a mask of `N x N` takes for a moment at the first call. `float32`: it
    takes nothing else.
    """

    score_bytes: int = 0
    passes: int = 0
    columns: int = 0
    causal_skips: bool = False
    one_head: bool = False
    copies: str = ""
    mask_bytes: int = 0
    float32: bool = False


RUNGS = {
    # Scores written; read for the maximum; exponentials, and then the division, in place.
    "c-loops": Rung(score_bytes=4, passes=6, one_head=True, float32=True),
    "c-tiled": Rung(float32=True),
    "cuda-naive": Rung(score_bytes=4, passes=6),
    "cuda-tiled": Rung(score_bytes=4, passes=6, columns=64, causal_skips=True),
    "cuda-flash": Rung(),
    "triton-pointer": Rung(copies="qkv"),  # the packed layout [B, N, heads * head_dim]
    "triton-descriptor": Rung(copies="k"),  # transposed
    "triton-fmha": Rung(),
    "cutile-fmha": Rung(),
    "flex": Rung(mask_bytes=2),  # two masks of booleans, of which the blocks to visit are made
}


def beyond_output(case: Case) -> int:
    """Bytes that a forward of a rung allocates at its peak beside its output."""
    return (
        copies(case) + stored_scores(case) + (RUNGS[case.impl].mask_bytes * case.seq**2 if case.operation.causal else 0)
    )


def stored_scores(case: Case) -> int:
    """Bytes of scores that a rung stores at once."""
    rung = RUNGS[case.impl]
    return rung.score_bytes * case.seq**2 * (1 if rung.one_head else case.batch * case.heads)


def copies(case: Case) -> int:
    """Bytes of the copies of inputs that a rung makes."""
    return sum(_input(case, name) for name in RUNGS[case.impl].copies)


def traffic(case: Case) -> int:
    """Bytes through memory of a forward: inputs and output once, copies written and read, passes over the scores."""
    rung = RUNGS[case.impl]
    passes = rung.passes + (-(-case.head_dim // rung.columns) if rung.columns else 1)
    scores = rung.score_bytes * pairs(case, dense=not rung.causal_skips)
    return 2 * _input(case, "q") + 2 * _input(case, "k") + 2 * copies(case) + passes * scores


def _input(case: Case, name: str) -> int:
    heads = case.heads if name == "q" else case.kv_heads
    return case.batch * heads * case.seq * case.head_dim * BYTES_PER_ELEMENT[case.dtype]
