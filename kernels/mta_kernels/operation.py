"""What is computed, in one object that every layer passes on, from the public functions to the kernels.

It knows no tensor and imports no torch. A further step of the operation is one more field of `Operation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PAD_KEYS = ("both", "left", "right")


def key_padding(key_taps: int, pad_key: str) -> int:
    """Columns of zeros left of the scores: `pad` in `c[i, j] = sum w[a, b] s[i-(cq-1)+a, j-pad+b]`.

    "both" centres the taps (an even count takes one more column on the right), "left" looks back only,
    "right" looks ahead only. Raises ValueError for any other word.
    """
    if pad_key == "both":
        return (key_taps - 1) // 2
    if pad_key == "left":
        return key_taps - 1
    if pad_key == "right":
        return 0
    raise ValueError(f"pad_key is {pad_key!r}; expected one of {', '.join(map(repr, PAD_KEYS))}")


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The factor on `q . k`: `1 / sqrt(head_dim)` unless given."""
    return 1.0 / math.sqrt(head_dim) if scale is None else float(scale)


@dataclass(frozen=True)
class Convolution:
    """A convolution of each head's scores by `query_taps x key_taps` numbers; `pad` as `key_padding` gives it."""

    query_taps: int
    key_taps: int
    pad: int


@dataclass(frozen=True)
class Operation:
    """`softmax(before(scale * q k^T)) v`, head by head; `causal` hides from a query the keys after it."""

    before: Convolution  # of the scores, before the softmax
    scale: float
    causal: bool = True

    @classmethod
    def of(
        cls, taps: Sequence[int], head_dim: int, *, causal: bool = True, scale: float | None = None,
        pad_key: str = "both",
    ) -> Operation:  # fmt: skip
        """The operation as the public functions are told of it; `taps` are those along queries and along keys.

        Raises ValueError for an unknown `pad_key`.
        """
        query_taps, key_taps = taps
        convolution = Convolution(query_taps, key_taps, key_padding(key_taps, pad_key))
        return cls(convolution, softmax_scale(scale, head_dim), causal)

    @property
    def band(self) -> int:
        """Width of the causal band: the last keys that a query sees, in whose scores some taps reach later keys."""
        if not self.causal:
            return 0
        return (self.before.query_taps - 1) + (self.before.key_taps - 1 - self.before.pad)
