"""Faults in the text of kernels, which tests/conformance finds: see scripts/plant_faults.py."""

from __future__ import annotations

from typing import NamedTuple

TRITON, TRITON_STEPS = "triton: or triton]", "triton and decode"
CUDA, CUDA_STEPS = "cuda: or cuda]", "cuda and decode and not hopper and not conv"
HOPPER = "hopper: or hopper]"


class Fault(NamedTuple):
    """`line` of a file of the package becomes `instead`; `tests` is pytest's -k of those that may find it."""

    name: str
    tests: str
    file: str
    line: str
    instead: str


OF = "conv_attention/"
FORWARD, SCORES, BACKWARD, SHARES = (
    f"{OF}triton/{x}.py" for x in ("forward_kernel", "backward_scores", "backward", "decode_shares")
)
SM80, BANDED = f"{OF}cuda_sm80/", f"{OF}banded/"
CONSUMER, FOLD = f"{OF}hopper/forward_consumer.cuh", f"{OF}cuda_decode/fold.cuh"

BY_FILE = {
    (CUDA, f"{SM80}forward.cu"): {
        "no wait for the keys": ("copies_wait<0>();\n        __syncthreads();  // the k", "__syncthreads();  // the k"),
        "scores that other warps store": ("__syncthreads();  // the values have come", "//"),
        "scores not masked": ("                rows.mask_scores(scores, first_key + chunk);\n", ""),
        "scratch for scores never zero": ("store_shared(shared + SCORES + i * 16, uint4{0, 0, 0, 0})", ""),
    },
    (CUDA, f"{SM80}backward_rows.cuh"): {
        "dc that other warps store": ("__syncthreads();  // the dc of all warps", "//"),
        "a block's rows counted before they are stored": ("    __syncthreads();\n    if (t", "    if (t"),
    },
    (HOPPER, f"{BANDED}positions.cuh"): {
        "a row sees the next key": (".key_rows - at.query_rows) + 1", ".key_rows - at.query_rows) + 2"),
    },
    (HOPPER, f"{BANDED}forward_softmax.cuh"): {
        "sums not rescaled": ("running_sum[h] *= rescale[h];", ""),
    },
    (HOPPER, CONSUMER): {
        "a halo not stored": ("if (own.stores_halo) {", "if (false) {"),
        "a tile's scores not masked": ("        mask.mask_scores(scores, first_key, own.local_row, own.column);\n", ""),
        "no wait for the next stage": ("if (!next_is_full) block.pipeline.wait(next);\n", ""),
        "columns not carried on": ("even[i] = odd[24 + i], even[8 ", "even[i] = 0, even[8 "),
    },
    (CUDA_STEPS, FOLD): {
        "queries before the first token": (" && tap >= QUERY_TAPS - segment.length", ""),
        "a weight's stride": ("% KEY_TAPS * weight.stride_key", "% KEY_TAPS"),
    },
    (TRITON, FORWARD): {
        "a row sees the next key": ("<= last_column[:, None], score", "<= last_column[:, None] + 1, score"),
        "a tile without its mask": ("imum(first_position - BAND + 1", "imum(first_position + BLOCK_N"),
        "the key behind the last": ("tl.where((key < key_rows)[None", "tl.where((key <= key_rows)[None"),
        "sums not rescaled": ("g_sum = running_sum * rescale ", "g_sum = running_sum "),
        "a document sees the one before": (
            'tl.where(key[None, :] >= first_seen[:, None], scores, float("-inf"))\n    r',
            "scores\n    r",
        ),
        "the last number of a row not written": (
            "ide[:, None] & (dim < HEAD_DIM",
            "ide[:, None] & (dim < HEAD_DIM - 1",
        ),
        "strides of heads and sequences exchanged": (
            "b + (batch_head % heads).to(tl.int64) * stride_oh",
            "h + (batch_head % heads).to(tl.int64) * stride_ob",
        ),
        "a diagonal of the band left out": ("for diagonal in tl.range(BAND,", "for diagonal in tl.range(BAND - 1,"),
    },
    (TRITON, BACKWARD): {
        "dweight never zero": ("dweight = torch.zeros(weight.s", "dweight = torch.empty(weight.s"),
        "dq without a factor": ("ey_units, chunk, factor=LN_2.value", "ey_units, chunk, factor=1.0"),
        "dv of one query head alone": ("else dv.sum(2), dweight", "else dv[:, :, 0], dweight"),
        "one loss scale for all sequences": (
            "return scale.flatten() if span",
            "return scale.amin().expand_as(scale).contiguous().flatten() if span",
        ),
    },
    (TRITON, SCORES): {
        "a sum that no chunk began": ("(key < written)[:, None]", "(key <= written)[:, None]"),
        "dv times the loss scale": ("total /= loss_scale_of(loss_scale_ptr, batch_head, key, key_rows, SPANS)", ""),
        "dc without delta": ("(dp - delta[:, None])", "(dp - 0 * delta[:, None])"),
    },
    (TRITON_STEPS, SHARES): {
        "a page's offset": ("(key % PAGE_SIZE).to(tl.int64)", "key.to(tl.int64)"),
        "an older query sees a key too many": ("th - QUERY_TAPS + tap[:, None]", "th - QUERY_TAPS + tap[:, None] + 1"),
        "queries before the window": ("& (tap < QUERY_TAPS) & (held >= 0", "& (tap < QUERY_TAPS"),
        "a share too long": ("top = tl.minimum(start + share", "top = tl.minimum(start + share + 1"),
    },
}
FAULTS = [Fault(name, tests, file, *change) for (tests, file), of in BY_FILE.items() for name, change in of.items()]
