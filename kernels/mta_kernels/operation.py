"""The operation to compute, as one object that every layer passes on, from the command line to the kernels.

It knows no tensor and imports no torch. A further step of the operation is one more field of `Operation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PAD_KEYS = ("both", "left", "right")
PAGE_SIZES = (16, 32, 64, 128, 256)  # keys of a page of a cache


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


def format_value(x: object) -> str:
    """The value as an error message shows it: a whole number of hundreds of digits by its size."""
    if not isinstance(x, int) or x.bit_length() <= 64:
        return repr(x)
    return f"about {'-' if x < 0 else ''}1e{round(x.bit_length() * math.log10(2))}"


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The factor on `q . k`: `1 / sqrt(head_dim)` unless given.

    Raises TypeError for what is no number, or would lose a gradient, and ValueError for infinity and NaN.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not isinstance(scale, float | int):  # torch.compile's numbers are these; it cannot trace hasattr of them
        if not hasattr(scale, "__float__"):  # numpy's have it
            raise TypeError(f"scale is {scale!r}; expected a number, or None for 1 / sqrt(head_dim)")
        if getattr(scale, "requires_grad", False):
            raise TypeError("scale is a tensor that requires a gradient, and gets none; multiply q by it instead")
    try:
        number = float(scale)
    except (TypeError, ValueError):  # of several numbers
        raise TypeError(f"scale is {scale!r}; expected one number, or None for 1 / sqrt(head_dim)") from None
    except OverflowError:  # of a whole number
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"scale is {format_value(scale)}; expected a finite number, or None for 1 / sqrt(head_dim)")
    return number


def is_causal(causal: Any) -> bool:
    """The flag as a Python bool. Raises TypeError for anything but True and False: another word would count as True."""
    if isinstance(causal, bool):
        return causal
    try:
        is_flag = not isinstance(causal, str) and causal in (True, False)
    except (RuntimeError, ValueError):  # of a tensor, or an array, of several
        is_flag = False
    if not is_flag:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    return bool(causal)


@dataclass(frozen=True)
class Convolution:
    """A convolution of each head's scores by `query_taps x key_taps` numbers; `pad` as `key_padding` gives it."""

    query_taps: int
    key_taps: int
    pad: int

    @property
    def taps(self) -> tuple[int, int]:
        return self.query_taps, self.key_taps

    @property
    def pad_key(self) -> str:
        """The first word for `pad`: an only key tap is "both"."""
        return next(word for word in PAD_KEYS if key_padding(self.key_taps, word) == self.pad)

    def __str__(self) -> str:
        return f"{self.query_taps}x{self.key_taps}"


ONE_TAP = Convolution(1, 1, 0)


@dataclass(frozen=True)
class HeadMix:
    """A mixing of heads: `groups` of equally many heads, each mixed among themselves; one group is all heads."""

    groups: int = 1

    def __str__(self) -> str:
        return "heads" if self.groups == 1 else f"{self.groups} groups"


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of each head's output; `depth` is the index of the layer that rescales it, None without."""

    depth: int | None = None


@dataclass(frozen=True)
class Gate:
    """A gate behind the norm: one number a head and row, or `full`, one a head dim."""

    full: bool = False


@dataclass(frozen=True)
class Operation:
    """`gate(norm(post_mix(post_conv(softmax(pre_mix(pre_conv(scale * q k^T))))) v))`; None leaves a step out.

    `causal` hides from a query the keys after it. A convolution is of each head alone, a mixing of positions alone.
    Norm and gate run after the kernels of a backend, which receive only the other steps.
    """

    pre_conv: Convolution | None  # of the scores, before the softmax
    scale: float
    causal: bool = True
    pre_mix: HeadMix | None = None
    post_conv: Convolution | None = None  # of the probabilities
    post_mix: HeadMix | None = None
    # Not in the repr, which seeds the random inputs of a cell: a seed draws the same as before these fields existed.
    norm: Norm | None = field(default=None, repr=False)
    gate: Gate | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, taps: Sequence[int] | None, head_dim: int, *, causal: bool = True, scale: float | None = None,
        pad_key: str = "both",
    ) -> Operation:  # fmt: skip
        """The operation of the public functions' arguments; `taps` counts the taps along queries and along keys.

        Raises ValueError for an unknown `pad_key`, and TypeError for a scale or `causal` of another kind.
        """
        convolution = None
        if taps is not None:
            query_taps, key_taps = taps
            convolution = Convolution(query_taps, key_taps, key_padding(key_taps, pad_key))
        return cls(convolution, softmax_scale(scale, head_dim), is_causal(causal))

    @property
    def conv(self) -> Convolution:
        """The convolution before the softmax; one tap where there is none."""
        return self.pre_conv or ONE_TAP

    @property
    def is_convolved(self) -> bool:
        """Whether scores or probabilities are convolved."""
        return self.pre_conv is not None or self.post_conv is not None

    @property
    def is_more_than_conv_attention(self) -> bool:
        """Whether a step is there that `conv_attention` does not have."""
        return any((self.pre_mix, self.post_conv, self.post_mix, self.norm, self.gate))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments with which the public functions compute it."""
        convolution = {"pad_key": self.pre_conv.pad_key} if self.pre_conv else {}
        depth = {} if self.norm is None or self.norm.depth is None else {"depth": self.norm.depth}
        return {"causal": self.causal, "scale": self.scale, **convolution, **depth}

    @property
    def decode_options(self) -> dict[str, Any]:
        """The same for a decode step, which is always causal."""
        return {name: value for name, value in self.options.items() if name != "causal"}

    @property
    def band(self) -> int:
        """Width of the causal band: the last keys that a query sees, in whose scores some taps reach later keys."""
        if not self.causal:
            return 0
        return (self.conv.query_taps - 1) + (self.conv.key_taps - 1 - self.conv.pad)
