"""Launches the kernels that mix heads: how warps divide a chunk, and the kernels' arguments."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.gpu_limits import capability, sm_count
from mta_kernels.multi_token_attention.bands_cuda import bands
from mta_kernels.multi_token_attention.bands_cuda.bands import BandArguments, BandRows
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.kernel import SecondKernel, kernel
from mta_kernels.nvrtc.structures import ELEMENTS, fields
from mta_kernels.operation import Convolution

FOLDER = Path(__file__).parent
MOST_HEADS = 16
OPERANDS = {"probabilities": 1, "logits": 2}  # operands of a kernel, by its source's name
KERNELS = {
    "probabilities": "mix_probabilities", "heads": "convolve_heads", "logits": "differentiate_logits",
    "pre": "pre_heads", "post": "post_heads", "rebuild": "rebuild_probabilities",
}  # fmt: skip


@dataclass(frozen=True)
class MixSizes:
    """Keys of a tile, stages of a warp's ring, warps an SM, and consecutive keys of a row in a warp."""

    keys: int
    stages: int
    warps: int
    run: int


TILES = {"probabilities": MixSizes(128, 3, 12, 512), "logits": MixSizes(128, 2, 12, 512)}


@dataclass(frozen=True)
class WalkSizes:
    """Approximate rows of a task, stages of a warp's ring, tiles, warps that mix, and keys of a row that each takes."""

    rows: int
    stages: int
    tiles: int
    mixers: int
    unit: int

    @property
    def of_a_head(self) -> bands.BandSizes:
        return bands.BandSizes(self.rows, self.stages, 1)  # a block of all heads has an SM to itself


WALKS = {
    "pre": WalkSizes(104, 2, 3, 4, 64), "post": WalkSizes(104, 2, 3, 4, 64), "heads": WalkSizes(104, 2, 2, 4, 64),
    "rebuild": WalkSizes(104, 2, 3, 4, 64),
}  # fmt: skip
# The kernels with exponentials, on Hopper, where registers go to the warps that need them.
HOPPER_WALKS = {name: dataclasses.replace(WALKS[name], mixers=8) for name in ("pre", "rebuild")}


def walk_sizes(name: str, capability: tuple[int, int] | None) -> WalkSizes:
    """The sizes of a kernel on a GPU, or in the emulator."""
    hopper = capability is not None and capability[0] == 9
    return HOPPER_WALKS.get(name, WALKS[name]) if hopper else WALKS[name]


# A task that has an SM to itself: its fixed cost, in turns; its most turns over its least.
START, MOST_TURNS = 1.5, 5 / 3


@functools.lru_cache(1024)
def rows_of_even_tasks(
    least: int, query_taps: int, rows: int, keys: int, key_tiles: int, batch: int, blocks: int
) -> int:  # fmt: skip
    """Rows of a task, at least `least`, with which the last of `blocks` concurrent tasks ends earliest.

    The chunk has `rows` rows: the last sees `keys` keys, each earlier one a key less; all see all keys if `keys` is 0.
    """
    found = []
    first = -(-(least + query_taps - 1) // query_taps)
    for turns in range(first, int(first * MOST_TURNS) + 1):
        run = bands.rows_of_turns(turns, query_taps)
        ends = range(run, rows + run, run)
        seen = (keys - rows + min(end, rows) for end in ends)
        tasks = batch * sum(min(max(-(-x // bands.KEYS), 1), key_tiles) if keys else key_tiles for x in seen)
        found.append((-(-tasks // blocks) * (turns + START), run))
    return min(found)[1]


@dataclass(frozen=True)
class HeadConstants:
    """The constants that all kernels share; `name` is the source's name."""

    name: str
    dtype: torch.dtype
    heads: int
    causal: bool
    documents: bool

    @property
    def kernel_name(self) -> str:
        return KERNELS[self.name]

    def _source(self, architecture: str, constants: dict[str, Any]) -> Source:
        architecture += "a" if architecture == "sm_90" else ""  # for setmaxnreg
        return Source(FOLDER / f"{self.name}.cu", architecture, constants, headers_in(bands.FOLDER, FOLDER))


@dataclass(frozen=True)
class MixTileConstants(HeadConstants):
    """The constants of probabilities.cu or logits.cu."""

    sizes: MixSizes

    threads = bands.THREADS

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes of a block, as tiles.cuh lays them out."""
        return self.sizes.stages * OPERANDS[self.name] * self.heads * (self.sizes.keys * 2 + 16)

    def source(self, architecture: str) -> Source:
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads, "KEYS": self.sizes.keys,
            "OPERANDS": OPERANDS[self.name], "CAUSAL": int(self.causal), "DOCUMENTS": int(self.documents),
            "STAGES": self.sizes.stages, "SHARED_BYTES": self.shared_memory, "BLOCKS_AN_SM": self.sizes.warps,
        }  # fmt: skip
        return self._source(architecture, constants)


@dataclass(frozen=True)
class WalkConstants(HeadConstants):
    """The constants of pre.cu, post.cu, heads.cu or rebuild.cu."""

    conv: Convolution
    sizes: WalkSizes

    @property
    def of_a_head(self) -> bands.BandConstants:
        sizes = self.sizes.of_a_head
        return bands.BandConstants(False, self.dtype, self.conv, False, self.causal, self.documents, sizes)

    @property
    def rows_of_task(self) -> int:
        """Rows that fill a task's turns together with their halo."""
        taps = self.conv.query_taps
        return bands.rows_of_turns(-(-self.sizes.rows // taps), taps)

    @property
    def threads(self) -> int:
        return bands.THREADS * (self.heads + self.sizes.mixers)

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes of a block, as walk.cuh and heads.cu lay them out."""
        tile = self.conv.query_taps * self.heads * (bands.KEYS * 2 + 16)
        tiles = self.sizes.tiles
        if self.name == "heads":
            tiles += self.sizes.stages + tiles - 1  # of the gradient
        return self.heads * self.of_a_head.shared_memory + tiles * tile

    def source(self, architecture: str) -> Source:
        constants = {
            **self.of_a_head.constants(), "HEADS": self.heads, "TILES": self.sizes.tiles,
            "MIXERS": self.sizes.mixers, "UNIT": self.sizes.unit, "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        return self._source(architecture, constants)


MERGE_THREADS, MERGE_BYTES = 128, 1024


def pre_heads(
    x: Tensor, taps: Tensor, conv: Convolution, mix: Tensor, out: Tensor, logsumexp: Tensor, where: BandRows, *,
    above: int, owned: int, sizes: WalkSizes | None = None,
) -> Tensor:  # fmt: skip
    """`out` is exponentials of logits: the convolution of `x` by `taps [H, cq, ck]`, mixed by `mix [H, H]` (out, in).

    `x` and `out` are `[B, H, rows, pitch]` of a chunk (`Rows`), contiguous, fp16 or bf16. Returns the factors that
    turn exponentials into probabilities, for `post_heads`: `[B, units, rows, H]`, one for the keys of a unit. A factor
    is a float32, or for bf16 two numbers that add up to it. `out` and the factors are undefined where a row sees no
    key. Writes the `owned` rows' logsumexp, from `above`, to `logsumexp [B, H, M]`, contiguous float32 of all queries.

    `sizes` override the chosen sizes, for measurements. Nothing waits for the GPU; the same call gives the same
    bits.
    """
    arguments, constants, kept = _arguments("pre", x, taps, conv, mix, out, where, sizes)
    batch, count, rows, _ = x.shape
    shape = batch, arguments.key_tiles * bands.KEYS // constants.sizes.unit, rows, count
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
    x: Tensor, factors: Tensor, taps: Tensor, conv: Convolution, mix: Tensor, out: Tensor, where: BandRows, *,
    sizes: WalkSizes | None = None,
) -> None:  # fmt: skip
    """`out` is the probabilities of exponentials `x`, convolved by `taps` and mixed by `mix [H, H]` (in, out).

    As stored by `Rows`: zeros at keys that a row does not see. `out` must not share memory with `x`. All else is as for
    `pre_heads`, with units of as many keys.
    """
    arguments, constants, kept = _arguments("post", x, taps, conv, mix, out, where, sizes)
    arguments.factors = factors.data_ptr()
    kernel(constants, x.device.index).launch((arguments.blocks, 1), arguments)
    del kept


def rebuild_probabilities(
    x: Tensor, mix: Tensor, convolved: Tensor, out: Tensor, logsumexp: Tensor, where: BandRows, *, taps: Tensor,
    conv: Convolution, sizes: WalkSizes | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """`convolved` is `x` convolved by `taps`, `out` is `exp(mix convolved - logsumexp)`: the forward's probabilities.

    Neither shares memory with `x`; both are zero at keys that a row does not see, as stored by `Rows`. logsumexp
    `[B, H, M]` of all queries is float32 and contiguous. Returns sums of out `[B, H, rows, units]`, not contiguous, and
    the keys of a unit. Sums of units without visible keys may be undefined. All else as for `pre_heads`.
    """
    arguments, constants, kept = _arguments("rebuild", x, taps, conv, mix, out, where, sizes, even=sizes is None)
    batch, count, rows, _ = x.shape
    unit = constants.sizes.unit
    shape = batch, arguments.key_tiles * bands.KEYS // unit, rows, count
    sums = empty(shape, dtype=torch.float32, device=x.device)
    arguments.convolved, arguments.sums = convolved.data_ptr(), sums.data_ptr()
    arguments.logsumexp = logsumexp.data_ptr()
    kernel(constants, x.device.index).launch((arguments.blocks, 1), arguments)
    del kept
    return sums.permute(0, 3, 2, 1), unit


def _arguments(
    name: str, x: Tensor, taps: Tensor, conv: Convolution, mix: Tensor, out: Tensor, where: BandRows,
    sizes: WalkSizes | None, *, even: bool = False,
) -> tuple[BandArguments, WalkConstants, Any]:  # fmt: skip
    """The arguments that they share, the constants, and tensors to keep until the launch; `even` makes tasks even.

    Even tasks are longer; in the forward, blocks with longer tasks drift apart.
    """
    sizes = sizes or walk_sizes(name, capability(x.device) if x.is_cuda else None)
    constants = WalkConstants(name, x.dtype, x.shape[1], where.causal, where.documents is not None, conv, sizes)
    arguments, kept = bands.arguments_of(sizes.of_a_head, x, out, taps, where)
    if even:
        make_tasks_even(arguments, constants, where, x)
    mix = mix.to(x.dtype).contiguous()
    arguments.mix, arguments.batch = mix.data_ptr(), x.shape[0]
    arguments.blocks = min(sm_count(x.device), x.shape[0] * arguments.row_tiles * arguments.key_tiles)
    return arguments, constants, (kept, mix)


class TileArguments(ctypes.Structure):
    """`struct Arguments` of tiles.cuh."""

    _fields_ = (
        *fields(c_void_p, "x grad out mix documents logsumexp residual delta sums parts"),
        *fields(c_int, "rows pitch first_position first_row query_rows key_rows above owned"),
        *fields(c_int, "run segments tasks warps"),
        ("loss_scale", c_void_p),
    )


def shape_unsupported(
    limit: int, dtype: torch.dtype, heads: int, convolutions: Mapping[str, Convolution]
) -> str | None:  # fmt: skip
    """Why no GPU whose blocks may have `limit` bytes of shared memory can take so many heads, or None.

    `convolutions` are the kernels' convolutions by their names in `WALKS`; `HeadMixings` has "heads".
    """
    if heads > MOST_HEADS:
        return f"{heads} heads are more than the {MOST_HEADS} of the CUDA kernels that mix heads"
    for name, conv in convolutions.items():
        if reason := bands.shape_unsupported(dtype, conv):
            return reason
        needed = WalkConstants(name, dtype, heads, True, False, conv, WALKS[name]).shared_memory
        if needed > limit:
            return f"{heads} heads and {conv} taps need {needed} bytes of shared memory; a block may have {limit}"
    return None


class HeadMixings:
    """The mixings of a backward and the convolution between them, chunk after chunk; the mixings' gradients are summed.

    Stored numbers are `[B, H, rows, pitch]` of a chunk (`Rows`), contiguous, fp16 or bf16. Nothing waits for the GPU;
    the same calls give the same bits.
    """

    def __init__(
        self, pre_mix: Tensor, post_mix: Tensor, taps: Tensor, conv: Convolution, dtype: torch.dtype, batch: int,
        chunks: Iterable[tuple[int, int]], *, tiles: dict[str, MixSizes] | None = None,
        heads: WalkSizes | None = None,
    ) -> None:  # fmt: skip
        """`pre_mix [H, H]` (out, in), `post_mix [H, H]` (in, out), `taps [H, cq, ck]` of the convolution between them.

        For `chunks` with so many rows and keys (`rows`, `pitch`), and up to `batch` sequences. `tiles` and `heads`
        override the chosen sizes, for measurements.
        """
        self.pre, self.post, self.taps = (x.to(dtype).contiguous() for x in (pre_mix, post_mix, taps))
        self.conv = conv
        self.tiles, self.heads, self.even = tiles or TILES, heads or WALKS["heads"], heads is None
        count, device = pre_mix.shape[0], pre_mix.device

        def parts(*places: int) -> Tensor:
            return torch.zeros(*places, count, count, dtype=torch.float32, device=device)

        self.parts_pre = parts(self.tiles["logits"].warps * sm_count(device))
        self.parts_post = parts(batch, bands.most_tasks(self.heads.of_a_head, conv.query_taps, chunks))

    def probabilities(self, x: Tensor, out: Tensor, logsumexp: Tensor, where: BandRows) -> tuple[Tensor, int]:
        """`out = exp(pre_mix x - logsumexp)`, zeros at keys that a row does not see.

        logsumexp `[B, H, M]` of all queries is float32 and contiguous. Returns sums of out `[B, H, rows, segments]` and
        the keys of a segment; sums of segments without stored keys are undefined.
        """
        arguments = self._arguments("probabilities", x, where)
        sums = empty(*x.shape[:3], arguments.segments, dtype=torch.float32, device=x.device)
        arguments.out, arguments.sums, arguments.logsumexp = out.data_ptr(), sums.data_ptr(), logsumexp.data_ptr()
        self._launch("probabilities", arguments, x, where)
        return sums, arguments.run

    def convolve(self, x: Tensor, out: Tensor, grad: Tensor, where: BandRows, *, above: int, owned: int) -> None:
        """`out` is x convolved and mixed by post_mix; replaces grad, out's gradient, by the convolved x's gradient.

        The `owned` rows from `above` on count for the gradient of post_mix. `out` shares no memory with x and grad.
        """
        constants = WalkConstants(
            "heads", x.dtype, x.shape[1], where.causal, where.documents is not None, self.conv, self.heads
        )
        arguments, kept = bands.arguments_of(self.heads.of_a_head, x, out, self.taps, where)
        if self.even:
            make_tasks_even(arguments, constants, where, x)
        arguments.grad, arguments.above, arguments.owned = grad.data_ptr(), above, owned
        arguments.mix, arguments.parts = self.post.data_ptr(), self.parts_post.data_ptr()
        arguments.tasks = self.parts_post.shape[1]
        blocks = x.shape[0] * arguments.row_tiles * arguments.key_tiles
        kernel(constants, x.device.index).launch((blocks, 1), arguments)
        del kept

    def differentiate(
        self, x: Tensor, grad: Tensor, logsumexp: Tensor, residual: Tensor, delta: Tensor, where: BandRows, *,
        above: int, owned: int,
    ) -> None:  # fmt: skip
        """Replaces grad, the gradient of `probabilities` of `x`, by the gradient of x.

        `residual` is how much the logsumexp is too small, and delta is `sum_j p grad`: `[B, H, rows]`, float32 and
        contiguous. The other arguments are as for `probabilities` and `convolve`.
        """
        arguments = self._arguments("logits", x, where)
        arguments.grad, arguments.parts = grad.data_ptr(), self.parts_pre.data_ptr()
        arguments.logsumexp, arguments.residual = logsumexp.data_ptr(), residual.data_ptr()
        arguments.delta, arguments.above, arguments.owned = delta.data_ptr(), above, owned
        self._launch("logits", arguments, x, where)

    def dpre(self) -> Tensor:
        """`[H, H]` (out, in) float32."""
        return self.parts_pre.sum(0)

    def dpost(self) -> Tensor:
        """`[H, H]` (in, out) float32."""
        return self.parts_post.sum((0, 1))

    def _arguments(self, name: str, x: Tensor, where: BandRows) -> TileArguments:
        batch, _, rows, pitch = x.shape
        sizes = self.tiles[name]
        segments = -(-pitch // sizes.run)
        warps = min(sizes.warps * sm_count(x.device), batch * rows * segments)
        while math.gcd(warps, segments) > 1:  # a warp takes all segments of rows in turn, long and short ones
            warps -= 1
        arguments = TileArguments(
            x=x.data_ptr(), mix=self.pre.data_ptr(), rows=rows, pitch=pitch, first_position=where.first_position,
            first_row=where.first_row, query_rows=where.query_rows, key_rows=where.key_rows, run=sizes.run,
            segments=segments, tasks=batch * rows * segments, warps=warps,
        )  # fmt: skip
        if where.documents is not None:
            arguments.documents = where.documents.data_ptr()
        if where.loss_scale is not None:
            arguments.loss_scale = where.loss_scale.data_ptr()
        return arguments

    def _launch(self, name: str, arguments: TileArguments, x: Tensor, where: BandRows) -> None:
        constants = MixTileConstants(
            name, x.dtype, x.shape[1], where.causal, where.documents is not None, self.tiles[name]
        )
        kernel(constants, x.device.index).launch((arguments.warps, 1), arguments)


def make_tasks_even(arguments: BandArguments, constants: WalkConstants, where: BandRows, x: Tensor) -> None:
    """Give tasks of `x [B, H, rows, pitch]` so many rows that the last of them end nearly together."""
    last = max(where.first_position + arguments.rows, 1) if where.causal else 0
    arguments.run = rows_of_even_tasks(
        constants.rows_of_task, constants.conv.query_taps, arguments.rows, last, arguments.key_tiles, x.shape[0],
        sm_count(x.device),
    )  # fmt: skip
    arguments.row_tiles = -(-arguments.rows // arguments.run)
