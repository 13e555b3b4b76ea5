"""What mixes scores and probabilities: the tensors of an `Operation`, in the one form that every backend takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Mixers(NamedTuple):
    """The tensors of an `Operation`, each None where the operation has no such step; H counts the query heads.

    Mixings are dense here: groups of heads are the blocks on the diagonal. Dtypes are q's or float32. The same tuple
    holds the gradients, each in the dtype of its mixer.
    """

    pre_conv: Tensor | None = None  # [H, cq, ck], of the scores
    pre_mix: Tensor | None = None  # [H, H], (out, in): l_h = sum_g pre_mix[h, g] c_g
    post_conv: Tensor | None = None  # [H, cq2, ck2], of the probabilities
    post_mix: Tensor | None = None  # [H, H], (in, out): b_h = sum_g a_g post_mix[g, h]
