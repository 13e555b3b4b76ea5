"""FLOPs and bytes of a cell, counted from its shape. Useful work is what the operation needs in any implementation."""

import math
from dataclasses import replace

from mta_kernels import score_chunks
from mta_kernels.operation import Convolution
from mtabench.problem.case import BYTES_PER_ELEMENT, CACHED_PASSES, Case
from mtabench.problem.layers import embedding_parameters, layer_cases, matrix_parameters, ragged_lengths


def pairs(case: Case, dense: bool = False) -> int:
    """Query-key pairs over all sequences and heads; `dense` counts the masked ones too."""
    if case.pass_ == "decode":
        scores = case.seq
    elif case.operation.causal and not dense:
        scores = case.seq * (case.seq + 1) // 2
    else:
        scores = case.seq * case.seq
    return case.batch * case.heads * scores


def tensor_bytes(case: Case) -> tuple[int, int]:
    """Bytes of q, and of k, each of `case.seq` rows a head."""
    row = case.batch * case.seq * case.head_dim * BYTES_PER_ELEMENT[case.dtype]
    return case.heads * row, case.kv_heads * row


def taps(case: Case) -> int:
    """Multiplications of the convolutions a score: 0 for plain attention."""
    return _taps(case.operation.pre_conv) + _taps(case.operation.post_conv)


def _taps(step: Convolution | None) -> int:
    return math.prod(step.taps) if step else 0


def mixed(case: Case) -> int:
    """Multiplications of the mixings a score and head: each takes as many as heads are mixed among themselves."""
    return sum(case.heads // mix.groups for mix in case.mixings)


def gated(case: Case) -> int:
    """Multiplications of the gate in all heads and rows: a product of each output with one row, or with `[D, D]`."""
    gate = case.operation.gate
    numbers = 0 if gate is None else case.head_dim if gate.full else 1
    return tokens(case) * case.heads * case.head_dim * numbers


def tokens(case: Case) -> int:
    """Tokens of one call: of all sequences, in decode only the new ones."""
    return case.batch * (1 if case.pass_ in CACHED_PASSES else case.seq)


def useful_flops(case: Case) -> int:
    """FLOPs that the operation needs: `2 * pairs * (2D + steps)` forward, `2 * pairs * (5D + 3 * steps)` backward.

    `steps` are the multiplications a score beyond plain attention: `cq * ck` of a convolution, and of a mixing as many
    as it mixes heads. A gate has `2 * D`, or `2 * D * D`, a head and row beside that, backward three times as many. Of
    a model, its matrices and attention: of `train` three times the matrices' forward, of a prompt the logits of its
    last token.
    """
    if case.layers is not None:
        return _model_flops(case)
    return 2 * pairs(case) * _macs(case, products=5 if case.pass_ == "bwd" else 2) + _gate_flops(case)


def executed_flops(case: Case, work: str) -> int:
    """FLOPs that an algorithm executes; `work`, "dense", "tiled" and so on, as in the registry.

    Dense computes masked scores too, and its backward finds the scores stored. Tiled does what is useful. Staged stores
    scores of chunks of rows in whole blocks, and computes neighbouring scores that convolutions read again. Its
    backward has five products, and three times the steps. Expanded has scores of depth `min(cq, ck) * D`, and its
    backward two more products of that depth and two of depth D. Decode, banded too, folds the taps over queries into
    `ck` queries. Banded has 32 products a tap and score, backward twice that and 192 for the weight. Neighbouring tiles
    of 64 rows share `cq - 1` of them, backward 16. Overlapped works on tiles of 64 x 64 scores. Other tiles compute a
    margin of it again, backward twice as wide. Its two backward kernels have seven products and five convolutions. A
    decode step has 128 keys.
    """
    if work == "tiled" or case.layers is not None:
        return useful_flops(case)
    if work == "dense":
        return _dense_flops(case) + _gate_flops(case)
    if work == "staged":
        return 2 * staged_scores(case) * _macs(case, products=5 if case.pass_ == "bwd" else 2) + _gate_flops(case)
    if work in ("expanded", "banded") and case.pass_ == "decode":
        return 2 * pairs(case) * (case.conv.key_taps + 1) * case.head_dim
    if work == "expanded":
        depth = min(case.conv.taps) * case.head_dim
        if case.pass_ == "bwd":
            return 2 * pairs(case) * (3 * depth + 2 * case.head_dim)
        return 2 * pairs(case) * (depth + case.head_dim)
    if work == "banded":
        query_taps = case.conv.query_taps
        if case.pass_ == "bwd":
            return (
                2 * pairs(case) * (3 * case.head_dim + 64 * query_taps) * 64 // 48
                + 2 * pairs(case) * (192 + 2 * case.head_dim)  # the weight's gradient and products take each row once
            )
        return 2 * pairs(case) * (2 * case.head_dim + 32 * query_taps) * 64 // (65 - query_taps)
    if work == "overlapped":
        return _overlapped_flops(case)
    raise ValueError(f"work is {work!r}; expected 'dense', 'tiled', 'staged', 'expanded', 'banded' or 'overlapped'")


def chunk_of(case: Case) -> tuple[int, int]:
    """Sequences and query rows whose scores staged work stores at a time, on a GPU with large memory."""
    size, backward = BYTES_PER_ELEMENT[case.dtype], case.pass_ == "bwd"
    return score_chunks.chunk_rows(
        case.operation, case.batch, case.heads, case.seq, size, backward=backward, large=True
    )  # fmt: skip


def chunks_of(case: Case) -> tuple[range, ...]:
    """The query rows of each chunk of a sequence."""
    _, rows = chunk_of(case)
    return score_chunks.own_rows(case.operation, case.seq, case.seq, rows, **halo_of(case))


def staged_scores(case: Case) -> int:
    """Scores that staged work computes: in whole blocks, and again those beside a chunk; of a decode step one row."""
    if case.pass_ == "decode":
        return pairs(case)
    block = score_chunks.BLOCK
    ends = range(block, case.seq + block, block)
    keys = sum(ends) if case.operation.causal else len(ends) * ends[-1]
    rows = case.seq + len(chunks_of(case)) * sum(halo_of(case).values())
    return case.batch * case.heads * keys * block * rows // case.seq


def stored_share(case: Case, work: str) -> float:
    """Of the scores that chunks of rows have room for, those that causal staged work computes."""
    if work != "staged" or case.pass_ == "decode" or not case.operation.causal:
        return 1.0
    return staged_scores(case) / (case.batch * case.heads * sum(len(own) * own.stop for own in chunks_of(case)))


def halo_of(case: Case) -> dict[str, int]:
    """Rows beside a chunk that convolutions read: `above` it, and in backward `below` it as well."""
    rows = score_chunks.halo_rows(case.operation)
    return {"above": rows, "below": rows if case.pass_ == "bwd" else 0}


def bytes_moved(case: Case) -> int:
    """The fewest bytes through device memory: every input read once and every output written once.

    Decode counts the K and V cache alone; the rest is small beside it. A model counts its weights, and generating the
    caches.
    """
    if case.layers is not None:
        weights = (matrix_parameters(case) + embedding_parameters(case)) * BYTES_PER_ELEMENT[case.dtype]
        cached = sum(ragged_lengths(case.batch, case.seq)) if case.pass_ == "generate" else 0
        return weights + 2 * case.layers * cached * case.kv_heads * case.head_dim * BYTES_PER_ELEMENT[case.dtype]
    keys = case.batch * case.kv_heads * case.seq * case.head_dim
    queries = case.batch * case.heads * case.seq * case.head_dim
    size = BYTES_PER_ELEMENT[case.dtype]
    if case.pass_ == "decode":
        return 2 * keys * size
    if case.pass_ == "fwd":  # q, k, v in; out
        return (2 * queries + 2 * keys) * size
    return (3 * queries + 4 * keys) * size  # q, k, v, dout in; dq, dk, dv out


def only_reads(case: Case) -> bool:
    """Whether nearly all bytes that must move are read: in decode, whose output is one row a sequence."""
    return case.pass_ in CACHED_PASSES


def _model_flops(case: Case) -> int:
    times = 3 if case.pass_ == "train" else 1
    logits = tokens(case) if case.pass_ == "train" else case.batch
    products = 2 * times * (matrix_parameters(case) * tokens(case) + embedding_parameters(case) * logits)
    attention = 0
    for layer, count in layer_cases(case).items():
        attention += count * useful_flops(layer)
        if case.pass_ == "train":
            attention += count * useful_flops(replace(layer, pass_="bwd"))
    if case.pass_ == "generate":
        attention = attention * sum(ragged_lengths(case.batch, case.seq)) // (case.batch * case.seq)
    return products + attention


def _gate_flops(case: Case) -> int:
    """Backward has three times the products: the gate again, and the gradients of its input and of its weight."""
    return 2 * (3 if case.pass_ == "bwd" else 1) * gated(case)


def _dense_flops(case: Case) -> int:
    scores = 2 * pairs(case, dense=True)
    if case.pass_ == "bwd":  # dV, dP, dQ, dK; the scores' gradient through each step, and its mixer's gradient
        return scores * (4 * case.head_dim + 2 * (taps(case) + mixed(case)))
    if case.pass_ == "decode":  # scores of the whole window are computed and convolved, one row is kept
        before, after = (
            min(step.query_taps, case.seq) if step else 1
            for step in (case.operation.pre_conv, case.operation.post_conv)
        )
        steps = before * _taps(case.operation.pre_conv) + after * _taps(case.operation.post_conv) + mixed(case)
        return scores * (before * case.head_dim + steps + case.head_dim)
    return scores * _macs(case, products=2)


def _overlapped_flops(case: Case) -> int:
    above, beside = case.conv.query_taps - 1, case.conv.key_taps - 1
    if case.pass_ == "decode":
        scores = (above + 1) * case.head_dim * 128 // (128 - beside)
        return 2 * pairs(case) * (scores + taps(case) + case.head_dim)
    if case.pass_ == "bwd":
        own = (64 - 2 * above) * (64 - 2 * beside)
        return 2 * pairs(case) * (7 * case.head_dim + 5 * taps(case)) * 64 * 64 // own
    return 2 * pairs(case) * (2 * case.head_dim + taps(case)) * 64 * 64 // ((64 - above) * (64 - beside))


def _macs(case: Case, products: int) -> int:
    """Multiply-adds a score: `products` of length D, and the other steps (three times backward)."""
    return products * case.head_dim + (3 if products == 5 else 1) * (taps(case) + mixed(case))
