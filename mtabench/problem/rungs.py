"""What the rungs of plain attention keep in memory and move through it, as read off their sources."""

from __future__ import annotations

from typing import NamedTuple

from mtabench.problem.case import Case
from mtabench.problem.work import pairs, tensor_bytes


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


def beyond_output(case: Case, rung: Rung) -> int:
    """Bytes that a forward of a rung allocates at its peak beside its output."""
    mask = rung.mask_bytes * case.seq**2 if case.operation.causal else 0
    return copies(case, rung) + stored_scores(case, rung) + mask


def stored_scores(case: Case, rung: Rung) -> int:
    """Bytes of scores that a rung stores at once."""
    return rung.score_bytes * case.seq**2 * (1 if rung.one_head else case.batch * case.heads)


def copies(case: Case, rung: Rung) -> int:
    """Bytes of the copies of inputs that a rung makes."""
    queries, keys = tensor_bytes(case)
    return sum(queries if name == "q" else keys for name in rung.copies)


def traffic(case: Case, rung: Rung) -> int:
    """Bytes through memory of a forward: inputs and output once, copies written and read, passes over the scores."""
    passes = rung.passes + (-(-case.head_dim // rung.columns) if rung.columns else 1)
    scores = rung.score_bytes * pairs(case, dense=not rung.causal_skips)
    return 2 * sum(tensor_bytes(case)) + 2 * copies(case, rung) + passes * scores
