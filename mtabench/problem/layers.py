"""A whole model: which of its layers have which attention, how large it is, and how long its cached sequences are."""

import re
from dataclasses import replace

from mta_kernels.operation import Operation
from mtabench.errors import UsageError
from mtabench.problem.case import Case

VOCABULARY = 32768
PAGE = 128  # keys of a page of the cache
ATTENTIONS = "conv/1,conv/4,mta/4"  # of a sweep that names none
_ATTENTION = re.compile(r"(?P<name>conv|mta|mix)(?:/(?P<every>[1-9]\d?))?", re.ASCII)


def parse_attention(text: str) -> tuple[str, int | None]:
    """`conv/4` as the steps, `conv` (one convolution), `mta` (all) or `mix` (heads alone), and every how many layers.

    Those without a number convolve in all. `mix` has no convolutions, so None. Raises UsageError for anything else.
    """
    match = _ATTENTION.fullmatch(text.strip().lower())
    if not match or (match["name"] == "mix" and match["every"]):
        raise UsageError(
            f"--attention cannot read {text!r}; expected conv, conv/4 (in every fourth layer), mta/4 (heads mixed in "
            "all layers, convolutions in every fourth, as in the paper's models) or mix (heads alone)"
        )
    return match["name"], None if match["name"] == "mix" else int(match["every"] or 1)


def convolves(layer: int, conv_every: int) -> bool:
    """Whether a layer, from 0, is the convolving one of its `conv_every` layers: of four the third, as in the paper."""
    return layer % conv_every == conv_every // 2


def layer_operation(operation: Operation, layer: int, conv_every: int | None) -> Operation:
    """The operation of a layer, from 0: without convolutions unless it `convolves`."""
    if conv_every is not None and convolves(layer, conv_every):
        return operation
    return replace(operation, pre_conv=None, post_conv=None)


def layer_cases(case: Case) -> dict[Case, int]:
    """The attention of a model's layers as cells of kernels, forward or decode, and how many layers have each."""
    assert case.layers is not None
    pass_ = "decode" if case.pass_ == "generate" else "fwd"
    found: dict[Case, int] = {}
    for layer in range(case.layers):
        operation = layer_operation(case.operation, layer, case.conv_every)
        one = replace(case, pass_=pass_, operation=operation, layers=None, conv_every=None)
        found[one] = found.get(one, 0) + 1
    return found


def hidden(dim: int) -> int:
    """Width of the gated network: 8/3 of the model's, up to the next multiple of 64."""
    return -(-8 * dim // (3 * 64)) * 64


def matrix_parameters(case: Case) -> int:
    """Numbers of the matrices that every token is multiplied by, all but the embedding, which the logits share."""
    assert case.layers is not None
    dim = case.heads * case.head_dim
    return case.layers * (2 * dim * dim + 2 * dim * case.kv_heads * case.head_dim + 3 * dim * hidden(dim))


def embedding_parameters(case: Case) -> int:
    """Numbers of the embedding."""
    return VOCABULARY * case.heads * case.head_dim


def ragged_lengths(batch: int, seq: int) -> list[int]:
    """Tokens of each cached sequence: the first has `seq`, the others down to about half of it, evenly."""
    return [seq - sequence * (seq // 2) // batch for sequence in range(batch)]
