"""Launches the persistent kernels in which heads meet.

The forward's make exponentials of scores, and mixed probabilities of these. The backward's makes probabilities of
scores whose logsumexp is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.gpu_limits import capability, sm_count
from mta_kernels.multi_token_attention.bands_cuda import bands
from mta_kernels.multi_token_attention.bands_cuda.bands import Arguments, Rows
from mta_kernels.multi_token_attention.heads_cuda import heads, plan
from mta_kernels.multi_token_attention.heads_cuda.plan import WalkConstants
from mta_kernels.nvrtc.kernel import SecondKernel, kernel
from mta_kernels.operation import Convolution

MERGE_THREADS, MERGE_BYTES = 128, 1024


def pre_heads(
    x: Tensor, taps: Tensor, conv: Convolution, mix: Tensor, out: Tensor, logsumexp: Tensor, where: Rows, *, above: int,
    owned: int, sizes: plan.WalkSizes | None = None,
) -> Tensor:  # fmt: skip
    """`out` is exponentials of logits: the convolution of `x` by `taps [H, cq, ck]`, mixed by `mix [H, H]` (out, in).

    `x` and `out` are `[B, H, rows, pitch]` of a chunk (`Rows`), contiguous, fp16 or bf16. Returns what makes
    probabilities of the exponentials, for `post_heads`: factors `[B, units, rows, H]`, each of the keys of a unit, as
    float32 or for bf16 as two numbers that add up to it. What a row does not see may be anything in both. logsumexp
    `[B, H, M]` of all queries, float32 and contiguous, gets those of the `owned` rows from `above` on.

    `sizes` override what would be chosen, for measurements. Nothing waits for the GPU; the same call gives the same
    bits.
    """
    arguments, constants, kept = _arguments("pre", x, taps, conv, mix, out, where, sizes)
    batch, count, rows, _ = x.shape
    shape = batch, arguments.key_tiles * bands.plan.KEYS // constants.sizes.unit, rows, count
    pieces = empty(*shape, 2, dtype=torch.float32, device=x.device)
    factors = empty(shape, dtype=torch.int32, device=x.device)
    arguments.pieces, arguments.factors = pieces.data_ptr(), factors.data_ptr()
    arguments.logsumexp, arguments.above, arguments.owned = logsumexp.data_ptr(), above, owned
    kernel(constants, x.device.index).launch((arguments.blocks, 1), arguments)
    merge = kernel(SecondKernel(constants, "merge_pieces", MERGE_THREADS, MERGE_BYTES), x.device.index)
    merge.launch((batch * rows, 1), arguments)
    del kept
    return factors


def post_heads(
    x: Tensor, factors: Tensor, taps: Tensor, conv: Convolution, mix: Tensor, out: Tensor, where: Rows, *,
    sizes: plan.WalkSizes | None = None,
) -> None:  # fmt: skip
    """`out` is the probabilities of exponentials `x`, convolved by `taps` and mixed by `mix [H, H]` (in, out).

    As stored by `Rows`: zeros at keys that a row does not see. `out` is other memory than `x`. All else as `pre_heads`,
    with units of as many keys.
    """
    arguments, constants, kept = _arguments("post", x, taps, conv, mix, out, where, sizes)
    arguments.factors = factors.data_ptr()
    kernel(constants, x.device.index).launch((arguments.blocks, 1), arguments)
    del kept


def rebuild_probabilities(
    x: Tensor, mix: Tensor, convolved: Tensor, out: Tensor, logsumexp: Tensor, where: Rows, *, taps: Tensor,
    conv: Convolution, sizes: plan.WalkSizes | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """`convolved` is `x` convolved by `taps`, `out` is `exp(mix convolved - logsumexp)`: the forward's probabilities.

    Both are other memory than `x`, and zero at keys that a row does not see, as stored by `Rows`. logsumexp `[B, H, M]`
    of all queries is float32 and contiguous. Returns sums of out `[B, H, rows, units]`, not contiguous, and of how many
    keys each is; those of units in which a row sees no key may not be written. All else as `pre_heads`.
    """
    arguments, constants, kept = _arguments("rebuild", x, taps, conv, mix, out, where, sizes, even=sizes is None)
    batch, count, rows, _ = x.shape
    unit = constants.sizes.unit
    shape = batch, arguments.key_tiles * bands.plan.KEYS // unit, rows, count
    sums = empty(shape, dtype=torch.float32, device=x.device)
    arguments.convolved, arguments.sums = convolved.data_ptr(), sums.data_ptr()
    arguments.logsumexp = logsumexp.data_ptr()
    kernel(constants, x.device.index).launch((arguments.blocks, 1), arguments)
    del kept
    return sums.permute(0, 3, 2, 1), unit


def _arguments(
    name: str, x: Tensor, taps: Tensor, conv: Convolution, mix: Tensor, out: Tensor, where: Rows,
    sizes: plan.WalkSizes | None, *, even: bool = False,
) -> tuple[Arguments, WalkConstants, Any]:  # fmt: skip
    """What all of them take, the constants, and tensors to keep until the launch; with `even` tasks or not.

    Even tasks are longer, and with these the forward's blocks drift apart.
    """
    sizes = sizes or plan.walk_sizes(name, capability(x.device) if x.is_cuda else None)
    constants = WalkConstants(name, x.dtype, x.shape[1], where.causal, where.documents is not None, conv, sizes)
    arguments, kept = bands.arguments_of(sizes.of_a_head, x, out, taps, where)
    if even:
        heads.make_tasks_even(arguments, constants, where, x)
    mix = mix.to(x.dtype).contiguous()
    arguments.mix, arguments.batch = mix.data_ptr(), x.shape[0]
    arguments.blocks = min(sm_count(x.device), x.shape[0] * arguments.row_tiles * arguments.key_tiles)
    return arguments, constants, (kept, mix)
