"""What decode steps keep of earlier rows for the convolution of probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import as_int, check_count, check_floating_point
from mta_kernels.multi_token_attention.mixers import Mixers


@dataclass(frozen=True)
class DecodeState:
    """Logits of the last rows of each sequence, which the next steps convolve: a step changes it in place.

    Row i, the query of position i, is in slot `i % query_taps` (the query taps of `post_conv`). There is one slot more
    than the older rows that a step reads, so that a step may be repeated, as a CUDA graph's warm-up does. The logsumexp
    of an unknown row is NaN. To put a new sequence into a place of the batch, write its rows of all three tensors, or
    its length as 0.
    """

    logits: Tensor  # [B, H, query taps, capacity] in q's dtype, after the mixing; undefined where no key is
    logsumexp: Tensor  # [B, H, query taps], float32, float64 for float64: of each row's visible logits
    lengths: Tensor  # [B], int32: the tokens of each sequence that it has seen

    @classmethod
    def empty(
        cls, batch: int, heads: int, query_taps: int, capacity: int, *, dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> DecodeState:  # fmt: skip
        """The state of sequences without tokens, with room for `capacity` keys each.

        Raises ValueError for counts that are no whole numbers from 1 on, and TypeError for another dtype.
        """
        batch, heads, query_taps, capacity = map(as_int, (batch, heads, query_taps, capacity))
        sizes = {"batch": batch, "heads": heads, "query_taps": query_taps, "capacity": capacity}
        for name, count in sizes.items():
            check_count(name, count)
        check_floating_point(dtype)
        return cls(
            torch.zeros(batch, heads, query_taps, capacity, dtype=dtype, device=device),
            torch.zeros(
                batch, heads, query_taps, dtype=torch.promote_types(dtype, torch.float32), device=device
            ),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )  # fmt: skip

    def clone(self) -> DecodeState:
        """A copy, which later steps do not change."""
        return DecodeState(self.logits.clone(), self.logsumexp.clone(), self.lengths.clone())


def needs_state(given: Mixers) -> bool:
    """Whether a row's output depends on the probabilities of earlier rows."""
    return given.post_conv is not None and given.post_conv.shape[1] > 1
