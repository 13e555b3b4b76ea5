"""Forward and backward of the whole multi-token attention, counted from kernels/mta_kernels/multi_token_attention.

Which kernels run is what `stages` of the kernels chooses for the device, and names are theirs. Scores of a chunk of
rows are stored, of all heads, in the dtype of q. Each kernel reads and writes them so many times, and multiplies so
often for each of them:

- products of queries, keys and values: once 2 bytes, the head dim;
- a convolution: read and written, `mma.convolution_macs`, those of rows that tasks read twice included;
- the gradients of one: two read and one written, and 8 keys by 8 more for each pair of rows of taps and each shift;
- a mixing of heads: a 16 x 16 matrix for each 16 heads, so 16 multiplications where there are 16;
- `mix_logits` and `mix_values`: a product, and a mixing by warps that do nothing else, at so many scores a second.

How far kernels stay below what the device does was calibrated on committed results of an H200: kernels of their own on
mta-backward.csv, mta-stages.csv, mta-rows.csv and mta-forward-heads.csv of experiments/, `mix_logits` and `mix_values`
on mta-mix-fwd.csv. A constant is of a kernel or of a kind of kernels, whatever the shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mta_kernels import score_chunks
from mta_kernels.gpu_limits import Gpu
from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.bands_cuda.plan import CONVOLVE, GRADIENTS
from mta_kernels.multi_token_attention.heads_cuda.plan import WalkConstants, walk_sizes
from mta_kernels.multi_token_attention.rows_cuda.plan import plan_on as rows_plan_on
from mta_kernels.operation import ONE_TAP, Convolution
from mtabench.model import fused, mma
from mtabench.model.devices import Device
from mtabench.model.kernel import Kernel, scores, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.inputs import DTYPES
from mtabench.problem.work import chunk_of, chunks_of, halo_of, mixed, taps

# Of a product with stored scores: what it reaches of a copy's bandwidth, and of a plain product's rate.
SCORE_PRODUCT, ROW_PRODUCT, TRANSPOSED_PRODUCT = (0.76, 0.43), (0.86, 0.54), (0.81, 0.42)
# Warps that walk down their keys wait for shared memory, for each other and for L2 (decisions 50, 72 and 84): what they
# reach of the rate of `mma.sync`, and of a copy's bandwidth.
WALK_SHARE, WALK_MEMORY_SHARE = 0.36, 0.71
# The row kernels' of a copy's bandwidth, where clusters of so many blocks fit on so many of an H200's 132 SMs.
ROWS_SHARE = 0.76
SMS, SMS_OF_CLUSTERS = 132, {1: 132, 2: 132, 4: 120, 8: 120, 16: 112}
# The same of Triton's stages: rows forward, whose second reading finds a part in L2, and backward; a convolution, and
# its taps' gradient.
TRITON_ROWS_SHARE, TRITON_ROWS_BACKWARD_SHARE, TRITON_CONVOLUTION_SHARE = 1.0, 0.72, 0.52
# Scores a second that warps mix, beside their products and exponentials: one warp a scheduler, which waits for each.
LOGITS_RATE, VALUES_RATE = 2.05e12, 3.3e12
FLOAT = 4


@dataclass(frozen=True)
class Chunk:
    """Rows that have their scores stored at a time, their keys, and stored scores of a head: all, and of own rows.

    The others, above and below, are there for convolutions alone.
    """

    rows: int
    keys: int
    stored: int
    own_stored: int


@dataclass(frozen=True)
class Call:
    """A forward or backward on a GPU."""

    case: Case
    gpu: Gpu
    dtype: torch.dtype
    sequences: int
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, case: Case, device: Device) -> Call:
        gpu = Gpu(device.capability, device.shared_memory)
        sequences, _ = chunk_of(case)
        halo = halo_of(case)
        chunks = tuple(_chunk(case, own, **halo) for own in chunks_of(case))
        return cls(case, gpu, DTYPES[case.dtype], sequences, chunks)

    @property
    def launches(self) -> int:
        """Of a kernel that runs once a chunk."""
        return -(-self.case.batch // self.sequences) * len(self.chunks)

    @property
    def heads(self) -> int:
        """Of all sequences."""
        return self.case.batch * self.case.heads

    @property
    def stored(self) -> int:
        """Scores of all chunks."""
        return self.heads * sum(chunk.stored for chunk in self.chunks)

    @property
    def own_stored(self) -> int:
        """The same of rows that chunks own."""
        return self.heads * sum(chunk.own_stored for chunk in self.chunks)

    @property
    def padding(self) -> float:
        """Heads that are mixed for each that there is: a matrix has 16."""
        return -(-self.case.heads // 16) * 16 / self.case.heads

    @property
    def mixing_macs(self) -> float:
        """Of a mixing, a score."""
        return self.padding * self.padding * self.case.heads

    def bytes_of(self, numbers: float) -> float:
        """Bytes of so many of a score's numbers."""
        return numbers * self.stored * BYTES_PER_ELEMENT[self.case.dtype]


def _chunk(case: Case, own: range, above: int, below: int) -> Chunk:
    """As `triton/chunks.py` has it, for its own query rows."""
    start, stop = own.start - above, own.stop + below
    keys = score_chunks.keys_before(stop, case.seq, case.seq, causal=case.operation.causal)
    pitch = score_chunks.pitch_of(keys)

    def stored(row: int, stop: int) -> int:
        if not case.operation.causal:
            return (stop - row) * pitch
        block, total = score_chunks.BLOCK, 0
        reach = 2 * block - 1 if case.operation.is_convolved else block
        while row < stop:
            end = (row + reach) // block * block
            further = min(stop, end + block - reach)  # the first row that is stored to another key
            total += (further - row) * min(end, pitch)
            row = further
        return total

    return Chunk(stop - start, keys, stored(start, stop), stored(own.start, own.stop))


def kernels(case: Case, device: Device) -> list[Kernel]:
    """The launches of a forward or backward, by kernel."""
    call = Call.of(case, device)
    return _backward(call) if case.pass_ == "bwd" else _forward(call)


def _forward(call: Call) -> list[Kernel]:
    case, longest = call.case, call.chunks[0]
    by = stages.forward(
        case.operation, call.gpu, call.dtype, case.heads, case.head_dim, documents=False, key_rows=case.seq,
        rows=longest.rows, sequences=call.sequences,
    )  # fmt: skip
    if by == "mix":
        return _mix(call)
    between = {"heads": _between_by_heads, "stages": _between_by_stages}[by]
    return [_product(call, "_score_product_kernel", SCORE_PRODUCT), *between(call), _row_product(call)]


def _mix(call: Call) -> list[Kernel]:
    """Exponentials of mixed logits are stored, once, in tiles of 64 rows and keys, and read once.

    What is multiplied lies in slabs of 64 numbers: 96 take as long as 128.
    """
    case = call.case
    dims = -(-case.head_dim // 64) * 64
    stored = call.heads * scores(case.seq, 64, 64, case.operation.causal)
    moved = stored * BYTES_PER_ELEMENT[case.dtype] + sum(tensor_bytes(case))
    logits = Kernel(
        "mix_logits", launches=call.launches, macs=stored * dims, tensor_share=SCORE_PRODUCT[1],
        exponentials=stored * call.padding, fmas=stored * call.padding, fma_rate=LOGITS_RATE, memory_bytes=moved,
    )  # fmt: skip
    values = replace(logits, name="mix_values", exponentials=0.0, fma_rate=VALUES_RATE)
    return [logits, Kernel("finish_logits", launches=call.launches), values]


def _between_by_heads(call: Call) -> list[Kernel]:
    """Scores to exponentials, over a reference for each 64 keys, and to mixed probabilities."""
    before, after = call.case.operation.pre_conv or ONE_TAP, call.case.operation.post_conv
    assert after
    units = call.stored / walk_sizes("pre", call.gpu.capability).unit  # two sums of each, then a factor
    pre = _walk(call, "pre_heads", "pre", before, mixings=1.5, passes=2)  # the half is the product that sums
    post = _walk(call, "post_heads", "post", after, mixings=1, passes=2)
    return [
        replace(pre, exponentials=call.stored, overlapped=True, memory_bytes=pre.memory_bytes + units * 2 * FLOAT),
        Kernel("merge_pieces", launches=call.launches, memory_bytes=units * 3 * FLOAT, memory_share=fused.SMALL_SHARE),
        replace(post, memory_bytes=post.memory_bytes + units * FLOAT),
    ]


def _between_by_stages(call: Call) -> list[Kernel]:
    """A convolution, rows, a convolution and a mixing of heads, of which each reads and writes the scores."""
    operation = call.case.operation
    found = [_convolution(call, operation.pre_conv), *_rows(call, backward=False)]
    if operation.post_conv:
        found.append(_convolution(call, operation.post_conv))
        if operation.post_mix:
            found.append(_stream(call, "_mix_heads_kernel", passes=2))
    return [kernel for kernel in found if kernel]


def _backward(call: Call) -> list[Kernel]:
    operation = call.case.operation
    before, after = operation.pre_conv, operation.post_conv
    found: list[Kernel | None] = [_twice(_product(call, "_score_product_kernel", SCORE_PRODUCT))]
    if before and stages.rebuilds(operation, call.gpu, call.dtype, call.case.heads):
        rebuild = _walk(call, "rebuild_probabilities", "rebuild", before, mixings=1.5, passes=3)
        found.append(replace(rebuild, exponentials=call.stored, overlapped=True))
    else:
        found.append(_convolution(call, before))
        if stages.heads_meet_backward(operation, call.gpu, call.dtype, call.case.heads):
            found.append(replace(_stream(call, "mix_probabilities", passes=2, mixings=1), exponentials=call.stored))
    if after is None:
        found += _rows(call, backward=True)
    elif stages.heads_meet_backward(operation, call.gpu, call.dtype, call.case.heads):
        found += [
            Kernel("_mix_rows_kernel, sums of rows", launches=call.launches),
            _walk(call, "convolve_heads", "heads", after, mixings=3, passes=4),
            _gradients(call, after),
            replace(_stream(call, "differentiate_logits", passes=3, mixings=3), exponentials=call.stored),
        ]
    else:
        delta = stages.convolves(after, call.gpu, call.dtype)  # CUDA's convolution gives it, else rows are read twice
        found += [_triton_rows(call, "_mix_rows_kernel", 2), _convolution(call, after)]
        if operation.post_mix:
            found.append(_stream(call, "_mix_heads_kernel", passes=4))
        found += [_gradients(call, after), _triton_rows(call, "_mix_rows_backward_kernel", 3 if delta else 5)]
    found.append(_gradients(call, before) if before else None)
    return [*(kernel for kernel in found if kernel), *_gradient_products(call)]


def _gradient_products(call: Call) -> list[Kernel]:
    """dq; dk and dv, to which each chunk adds what those before it have summed in float32."""
    case = call.case
    passed_on = sum(chunk.keys for chunk in call.chunks[:-1]) * case.batch * case.kv_heads * case.head_dim
    transposed = _product(call, "_transposed_product_kernel", TRANSPOSED_PRODUCT, own=True)
    moved = transposed.memory_bytes + passed_on * 2 * FLOAT
    return [_row_product(call), _twice(replace(transposed, memory_bytes=moved))]


def _row_product(call: Call) -> Kernel:
    return _product(call, "_row_product_kernel", ROW_PRODUCT, own=True)


def _twice(kernel: Kernel) -> Kernel:
    """Both launches of a kernel on other tensors."""
    launches, macs, moved = (2 * x for x in (kernel.launches, kernel.macs, kernel.memory_bytes))
    return replace(kernel, launches=int(launches), macs=macs, memory_bytes=moved)


def _product(call: Call, name: str, shares: tuple[float, float], *, own: bool = False) -> Kernel:
    """Rows by keys to stored scores, or these, of a chunk's `own` rows, by keys or rows."""
    case, stored = call.case, call.own_stored if own else call.stored
    memory_share, tensor_share = shares
    return Kernel(
        name, launches=call.launches, macs=stored * case.head_dim, tensor_share=tensor_share,
        memory_bytes=stored * BYTES_PER_ELEMENT[case.dtype] + sum(tensor_bytes(case)), memory_share=memory_share,
    )  # fmt: skip


def _walk(call: Call, name: str, source: str, conv: Convolution, *, mixings: float, passes: int) -> Kernel:
    """A kernel in which the warps of heads convolve and others mix, as often as `mixings` says.

    A turn takes as long with fewer heads than 16: an SM has one block, whose warps wait for each other.
    """
    case, sizes = call.case, walk_sizes(source, call.gpu.capability)
    task = WalkConstants(source, call.dtype, case.heads, conv, case.operation.causal, False, sizes).rows_of_task
    macs = call.padding * mma.convolution_macs(conv, in_pairs=True) + mixings * call.mixing_macs
    return _walking(call, name, conv, task, macs, passes)


def _walking(call: Call, name: str, conv: Convolution, task: int, macs: float, passes: int) -> Kernel:
    """Warps that walk down tasks of so many rows, and read those above each task once more."""
    halo = 1 + (conv.query_taps - 1) / task
    return Kernel(
        name, launches=call.launches, macs=call.stored * halo * macs, by_mma=True, tensor_share=WALK_SHARE,
        memory_bytes=call.bytes_of(passes - 1 + halo), memory_share=WALK_MEMORY_SHARE,
    )  # fmt: skip


def _convolution(call: Call, conv: Convolution | None) -> Kernel | None:
    """A convolution of stored scores, None without one."""
    if conv is None:
        return None
    if stages.convolves(conv, call.gpu, call.dtype):
        return _walking(call, "convolve_rows", conv, CONVOLVE.rows, mma.convolution_macs(conv), 2)
    return _by_triton(call, "_convolution_kernel", 2)


def _gradients(call: Call, conv: Convolution) -> Kernel:
    """Both gradients of a convolution: two are read, one is written. Triton's convolve and sum taps apart."""
    if not stages.convolves(conv, call.gpu, call.dtype):
        return replace(_by_triton(call, "_convolution_kernel, _taps_gradient_kernel", 4), launches=2 * call.launches)
    of_taps = -(-conv.query_taps // 2) * mma.eights(conv) * mma.STEP  # pairs of rows of taps, by shifts
    return _walking(call, "convolution_gradients", conv, GRADIENTS.rows, mma.convolution_macs(conv) + of_taps, 3)


def _rows(call: Call, *, backward: bool) -> list[Kernel]:
    """Rows that are mixed, normalised and mixed again: of chunks that CUDA's kernels take, and that Triton's do."""
    case = call.case
    of_cuda: list[Chunk] = []
    of_triton: list[Chunk] = []
    for chunk in call.chunks:
        cuda = stages.mixes_rows(call.gpu, call.dtype, case.heads, chunk.keys, backward=backward)
        (of_cuda if cuda and not case.operation.is_convolved else of_triton).append(chunk)
    found = []
    if of_cuda:
        found.append(_cuda_rows(replace(call, chunks=tuple(of_cuda)), backward=backward))
    if of_triton:
        name, passes = ("_mix_rows_backward_kernel", 6) if backward else ("_mix_rows_kernel", 3)
        found.append(_triton_rows(replace(call, chunks=tuple(of_triton)), name, passes))
    return found


def _cuda_rows(call: Call, *, backward: bool) -> Kernel:
    """Each row is read once."""
    case, copied = call.case, 0.0
    for chunk in call.chunks:  # whose clusters have room for its keys: seconds of a copy are added up
        plan = rows_plan_on(*call.gpu, call.dtype, case.heads, chunk.keys, backward=backward)
        assert plan
        copied += chunk.stored * SMS / SMS_OF_CLUSTERS[plan.constants.cluster]
    # A warp multiplies 16 heads at a time: with fewer it takes as long, and moves fewer bytes.
    share = ROWS_SHARE * sum(chunk.stored for chunk in call.chunks) / copied / call.padding
    return Kernel(
        "mix_rows_backward" if backward else "mix_rows", launches=call.launches,
        macs=call.stored * mixed(case) * (3 if backward else 1), by_mma=True,
        memory_bytes=call.bytes_of(4 if backward else 2), memory_share=share,
    )  # fmt: skip


def _stream(call: Call, name: str, *, passes: int, mixings: int = 1) -> Kernel:
    """Heads that are mixed at each place by itself."""
    return Kernel(
        name, launches=call.launches, macs=call.stored * mixings * call.mixing_macs, by_mma=True,
        memory_bytes=call.bytes_of(passes), memory_share=fused.STREAM_SHARE,
    )  # fmt: skip


def _triton_rows(call: Call, name: str, passes: int) -> Kernel:
    backward = "backward" in name
    return Kernel(
        name, launches=call.launches, macs=call.stored * mixed(call.case) * (3 if backward else 1),
        exponentials=2 * call.stored, memory_bytes=call.bytes_of(passes),
        memory_share=TRITON_ROWS_BACKWARD_SHARE if backward else TRITON_ROWS_SHARE,
    )  # fmt: skip


def _by_triton(call: Call, name: str, passes: int) -> Kernel:
    """A convolution by Triton's kernel."""
    return Kernel(
        name, launches=call.launches, macs=call.stored * taps(call.case), memory_bytes=call.bytes_of(passes),
        memory_share=TRITON_CONVOLUTION_SHARE,
    )  # fmt: skip
