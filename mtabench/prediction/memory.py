"""Bytes of memory that a case needs, by its shape alone, and the longest sequence that fits."""

import math
from dataclasses import replace

from mta_kernels import score_chunks
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.layers import VOCABULARY, embedding_parameters, matrix_parameters
from mtabench.problem.operations import PLAIN
from mtabench.problem.work import chunk_of, chunks_of, halo_of, tensor_bytes
from mtabench.registry import implementation_of

# `N x N` matrices a head alive at the peak where scores are stored, as measured. On a CPU oneDNN convolves copies of
# them besides, in a layout whose heads are padded to a multiple of 16.
DENSE_MATRICES = {"cuda": {"fwd": 3, "bwd": 5, "decode": 3}, "cpu": {"fwd": 3, "bwd": 6, "decode": 3}}
# Of the whole multi-token attention on a GPU, with heads mixed alone and with convolutions, as measured (mta-550m.csv,
# mta-550m-all.csv).
WHOLE_MATRICES = {"fwd": (6, 6), "bwd": (11, 10)}
CONVOLUTION_COPIES, HEAD_BLOCK = {"fwd": 1, "bwd": 2, "decode": 1}, 16
MOST_TOKENS = 2**16  # of a planned backward in the expanded form: a longer one plans more chunks
MOST_ROWS = 2**25  # of all heads and sequences of a plan, whose storages end at 256 GiB; more take as much memory a row
MANY_CHUNKS = 1024  # the largest of more has the scores it may have, to 0.1 %; to find all takes up to minutes
SUM = 4  # bytes of a float32
LONGEST = 2**30


def input_bytes(case: Case) -> int:
    """Bytes of a case's inputs, but for the mixers; a cache in pages has whole ones."""
    queries = {"fwd": 1, "bwd": 2, "decode": 0}[case.pass_]
    q, k = tensor_bytes(case)
    post = case.operation.post_conv
    # What a decode step before left for a convolution of probabilities.
    state = post.query_taps * _score_row(case) if post and case.pass_ == "decode" else 0
    return queries * q + 2 * k * case.capacity // case.seq + state


def measuring_bytes(case: Case) -> int:
    """Roughly what measuring a case takes: its inputs, its peak, and the cache from which those in pages are made."""
    cache = 0 if case.page_size is None else 2 * tensor_bytes(case)[1]
    return cache + input_bytes(case) + expected_memory_bytes(case, implementation_of(case).work)


def model_bytes(case: Case) -> int:
    """Roughly what a model takes: weights, for training with gradients and the optimizer, and its logits or caches."""
    parameters, size = matrix_parameters(case) + embedding_parameters(case), BYTES_PER_ELEMENT[case.dtype]
    if case.pass_ == "train":
        return 16 * parameters + 2 * SUM * case.batch * case.seq * VOCABULARY
    assert case.layers is not None
    return size * (parameters + 2 * case.layers * case.batch * case.seq * case.kv_heads * case.head_dim)


def expected_memory_bytes(case: Case, work: str) -> int:
    """Roughly what a case allocates at its peak beyond its inputs; `work` as in its entry.

    On a GPU the expanded form, banded and auto are planned, as are rungs of plain attention. Dense implementations
    store several `N x N` matrices of scores. Staged stores a chunk of scores, backward two, and more if it convolves.
    If there are several chunks of rows, backward also stores float32 sums of dk and dv of a chunk's sequences.
    Overlapped multiplies the output by its gradient in float32 before its backward. The others store outputs, and
    backward a float32 sum of dq.
    """
    is_ours = case.op == PLAIN or work in ("banded", "expanded", "tiled")
    if implementation_of(case).planned and is_ours and case.device == "cuda":
        from mtabench.prediction.plans import plan_of

        seq = min(case.seq, max(MOST_ROWS // (case.batch * case.heads), 256))
        if (work, case.pass_) == ("expanded", "bwd"):
            seq = min(seq, MOST_TOKENS)
        return plan_of(replace(case, seq=seq)).peak_bytes * case.seq // seq
    rows = 1 if case.pass_ == "decode" else case.seq
    out = case.batch * case.heads * rows * case.head_dim * BYTES_PER_ELEMENT[case.dtype]
    queries, keys = tensor_bytes(case)
    floats = queries // BYTES_PER_ELEMENT[case.dtype] * SUM
    if work == "staged":
        if case.pass_ == "decode":
            return out + _staged_scores(case)
        of_rows = case.batch * case.heads * case.seq * SUM  # the logarithms of the sums of exponentials
        sequences, chunk_rows = chunk_of(case)
        sums = 2 * sequences * case.kv_heads * case.seq * case.head_dim * SUM if chunk_rows < case.seq else 0
        gradients = queries + 2 * keys + sums if case.pass_ == "bwd" else 0
        peak = out + of_rows + gradients + _staged_scores(case)
        if case.operation.norm or case.operation.gate:
            # They read an output and write another; backward the first is kept, and there is its gradient.
            return peak + 2 * out if case.pass_ == "bwd" else max(peak, 2 * out)
        return peak
    if case.pass_ == "decode":
        if work != "dense":
            return out
        copies = 1 if case.page_size is None else 3  # values are masked; pages are gathered first
        return out + copies * keys + _score_matrices(case)
    gradients = queries + 2 * keys if case.pass_ == "bwd" else 0
    if work == "overlapped":
        return out + (max(gradients, 3 * floats) if case.pass_ == "bwd" else 0)
    if work == "dense":
        return out + gradients + _score_matrices(case)
    return out + gradients + (floats if case.pass_ == "bwd" else 0)


def longest_seq(case: Case, work: str, memory_bytes: float, multiple: int = 1024) -> int:
    """The longest sequence, otherwise as `case`, whose inputs and peak fit, rounded down to a multiple if longer."""

    def fits(seq: int) -> bool:
        longer = replace(case, seq=seq)
        beside = memory_bytes - input_bytes(longer)  # where inputs alone do not fit, no storage could be planned
        return beside > 0 and expected_memory_bytes(longer, work) <= beside

    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low // multiple * multiple if low >= multiple else low


def _score_matrices(case: Case) -> int:
    """The scores that dense implementations store at once."""
    rows = case.window if case.pass_ == "decode" else case.seq
    if (case.op, case.device) == ("mta", "cuda") and case.pass_ in WHOLE_MATRICES:
        matrices = case.heads * WHOLE_MATRICES[case.pass_][case.operation.is_convolved]
    else:
        matrices = case.heads * DENSE_MATRICES[case.device][case.pass_]
    if case.device == "cpu" and (case.operation.pre_conv or case.operation.post_conv):
        matrices += math.ceil(case.heads / HEAD_BLOCK) * HEAD_BLOCK * CONVOLUTION_COPIES[case.pass_]
    return matrices * case.batch * rows * case.seq * BYTES_PER_ELEMENT[case.dtype]


def _staged_scores(case: Case) -> int:
    """Buffers of scores of a chunk, more of them for convolutions, which are not in place; of a decode step a row."""
    if case.pass_ == "decode":
        return _score_row(case)
    sequences, rows = chunk_of(case)
    before, after = case.operation.pre_conv is not None, case.operation.post_conv is not None
    buffers = 2 + before + 2 * after if case.pass_ == "bwd" else 1 + (before or after)
    operation, halo, seq = case.operation, halo_of(case), case.seq
    chunks = (range(seq - rows, seq),) if seq > MANY_CHUNKS * rows else chunks_of(case)
    stored = max(score_chunks.stored_scores(operation, seq, seq, own, **halo) for own in chunks)
    return buffers * sequences * case.heads * stored * BYTES_PER_ELEMENT[case.dtype]


def _score_row(case: Case) -> int:
    """Bytes of the scores of one query of every head, in all sequences."""
    return case.batch * case.heads * case.seq * BYTES_PER_ELEMENT[case.dtype]
