"""The staged pipeline of the whole multi-token attention: scores of a chunk of rows, written and read by each stage.

Forward: the product writes them; a kernel over rows reads them for the sums of the softmax, reads them again, and
writes what is mixed in their place; the product with the values reads that. Backward: two products write scores and
gradients of probabilities, the kernel over rows reads both twice and writes both, three products read them. A
convolution reads and writes the scores once more; backward it does so forth and back, and its taps read both. Norm and
gate read the output and write another; backward they read what they read, and its gradient, and write one. A gate of a
number a head dim stores three such tensors in between, of which its products make gradients.

Decode: one kernel reads K, and another V, each of which takes its time to start. A convolution before has its scores
made into logits by one more, and one after has what older rows add computed by one that reads their logits. CUDA
kernels do with the first two: that of V reads the older rows' logits, too, and either takes BAND_S more to convolve.
Partial outputs of all programs are added up at last. So a step is `(K + V) / bandwidth`, with two bytes a key and head
written and read between the kernels, `2 START_S`, `GAP_S` a kernel, `older rows x scores / EARLY` and `programs x
MERGE_S`.
"""

from __future__ import annotations

from dataclasses import replace

from mta_kernels.operation import Convolution
from mtabench.model.kernel import Kernel, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.work import chunk_of, gated, mixed, staged_scores, taps, tokens

# The kernel over rows of the first prototype moved its bytes at 0.65 of a copy's bandwidth on an H200, and the products
# of chunks reached half of a plain product's rate; no committed results stand behind these numbers yet.
ROWS_SHARE, PRODUCT_SHARE = 0.65, 0.5
# Of decode, calibrated on results/nvidia-h200/experiments/mta-decode.csv: seconds until a kernel reads a cache as fast
# as it can, and after that; scores of older rows a second, of which the kernels beside it hide a third; seconds to add
# a program's partial output; and the keys of a program, of which there are so many at most. CUDA's have one an SM.
START_S, EARLY, MERGE_S = 3.8e-6, 4.5e11, 5.7e-9
CUDA_START_S, BAND_S = 3.0e-6, 1.5e-6
PROGRAM_KEYS, MOST_PROGRAMS, MOST_CUDA_PROGRAMS = 128, 512, 132
SUM_BYTES = 4  # of a float32


def kernels(case: Case) -> list[Kernel]:
    """The launches of a call, by stage."""
    if case.pass_ == "decode":
        return [*_decode(case), *norm_and_gate(case)]
    backward = case.pass_ == "bwd"
    scores, stored = staged_scores(case), staged_scores(case) * BYTES_PER_ELEMENT[case.dtype]
    sequences, rows = chunk_of(case)
    launches = -(-case.batch // sequences) * -(-case.seq // rows)
    queries, keys = tensor_bytes(case)
    written, read = (2, 3) if backward else (1, 1)  # products that write scores, and that read them
    convolutions = [step for step in (case.operation.pre_conv, case.operation.post_conv) if step]
    # Behind a convolution of probabilities the heads are mixed by a kernel of its own, and rows are read once more.
    apart = case.operation.post_conv is not None
    passes = (6 + apart if backward else 3) + (4 if backward else 2) * (apart and case.operation.post_mix is not None)
    steps = 3 if backward else 1
    found = [
        Kernel(
            "products to scores", launches=written * launches, macs=written * scores * case.head_dim,
            tensor_share=PRODUCT_SHARE, memory_bytes=written * (stored + queries + keys),
        ),
        Kernel(
            "rows: mix, softmax, mix", launches=launches, macs=steps * scores * mixed(case), exponentials=2 * scores,
            memory_bytes=passes * stored, memory_share=ROWS_SHARE,
        ),
        Kernel(
            "products of scores", launches=read * launches, macs=read * scores * case.head_dim,
            tensor_share=PRODUCT_SHARE, memory_bytes=read * (stored + queries + keys),
        ),
    ]  # fmt: skip
    if convolutions:
        convolved = Kernel(
            "convolutions", launches=steps * len(convolutions) * launches, macs=steps * scores * taps(case),
            tensor_share=PRODUCT_SHARE, memory_bytes=2 * steps * len(convolutions) * stored,
        )  # fmt: skip
        found.insert(1, convolved)
    return found + norm_and_gate(case)


def norm_and_gate(case: Case) -> list[Kernel]:
    """What runs behind the output, if anything does."""
    norm, gate = case.operation.norm, case.operation.gate
    if norm is None and gate is None:
        return []
    output = tokens(case) * case.heads * case.head_dim * BYTES_PER_ELEMENT[case.dtype]
    products = gated(case) if gate and gate.full else 0
    if case.pass_ != "bwd":
        return [Kernel("norm and gate", macs=products, tensor_share=PRODUCT_SHARE, memory_bytes=2 * output)]
    through = Kernel("norm and gate, backward", memory_bytes=3 * output)
    if not products:
        return [through]
    gradients = Kernel(
        "products of the gate", launches=4, macs=3 * products, tensor_share=PRODUCT_SHARE, memory_bytes=11 * output
    )
    return [gradients, through]


def _decode(case: Case) -> list[Kernel]:
    """A step: K is read for the logits, which are kept, and V for the output, with what the rows before add."""
    before, post = case.operation.pre_conv, case.operation.post_conv
    scores = staged_scores(case)
    _, keys = tensor_bytes(case)
    row, wide = scores * BYTES_PER_ELEMENT[case.dtype], scores * SUM_BYTES  # of every head
    older = post.query_taps - 1 if post else 0
    by_cuda = _by_cuda(case)

    def reads_cache(name: str, convolution: Convolution | None) -> Kernel:
        start = CUDA_START_S + (BAND_S if convolution else 0) if by_cuda else START_S
        return Kernel(name, macs=scores * case.head_dim, waves=1, wave_s=start)

    of_keys = reads_cache("convolved scores" if before and not by_cuda else "logits", before)
    found = [replace(of_keys, memory_bytes=keys + row)]
    if older and not by_cuda:
        found.append(Kernel("older rows", fmas=older * scores, fma_rate=EARLY, memory_bytes=older * row + wide))
    if before and not by_cuda:
        found.append(Kernel("logits", memory_bytes=2 * row))
    programs = min(MOST_CUDA_PROGRAMS if by_cuda else MOST_PROGRAMS, -(-case.seq // PROGRAM_KEYS))
    partial = case.batch * programs * case.heads * case.head_dim * SUM_BYTES
    values = keys + row + (older * row if by_cuda else wide if older else 0)
    return [
        *found,
        replace(reads_cache("values", post), exponentials=scores, memory_bytes=values),
        Kernel("merge", l2_bytes=2 * partial, waves=programs, wave_s=MERGE_S),
    ]


def _by_cuda(case: Case) -> bool:
    """Whether the CUDA kernels take a step, where a GPU's blocks have room for them."""
    convolutions = [step for step in (case.operation.pre_conv, case.operation.post_conv) if step]
    fits = case.heads == case.kv_heads and 8 <= case.heads <= 16 and case.head_dim % 16 == 0 and case.head_dim <= 128
    fits = fits and all(max(step.query_taps, step.key_taps) <= 16 for step in convolutions)
    return fits and BYTES_PER_ELEMENT[case.dtype] == 2
