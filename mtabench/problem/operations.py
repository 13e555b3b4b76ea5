"""Operations as people type them: `--conv 6x11`, `--mix heads`, `--post-conv 6x11`, and the same in results files."""

from __future__ import annotations

from dataclasses import replace

from mta_kernels.operation import Convolution, HeadMix, Operation, key_padding
from mtabench.errors import UsageError

OPS = ("conv-attention", "attention", "mta")
PLAIN = "attention"  # of these the one without a step
NONE = "none"
# The columns of a results file that say what a cell computes, beside `causal`.
OPERATION_COLUMNS = ("conv_q", "conv_k", "mix", "post_conv_q", "post_conv_k", "conv_every")
# The same as axes, by which people name them.
STEPS = ("mix", "conv", "post_conv", "conv_every")

Taps = tuple[int, int]


def make_operation(
    conv: Taps | None, mix: str, post_conv: Taps | None, *, heads: int, head_dim: int, causal: bool = True
) -> Operation:
    """The operation with these steps; `mix` as `group_sizes` reads it. Raises UsageError where `mixings` does."""
    before, after = mixings(mix, heads)
    operation = Operation.of(conv, head_dim, causal=causal)
    convolution = None if post_conv is None else Convolution(*post_conv, key_padding(post_conv[1], "both"))
    return replace(operation, pre_mix=before, post_conv=convolution, post_mix=after)


def op_of(operation: Operation) -> str:
    """The column `op`: `mta` for any step that conv attention lacks; plain attention has no step."""
    if operation.is_more_than_conv_attention:
        return "mta"
    return PLAIN if operation.pre_conv is None else "conv-attention"


def group_sizes(mix: str) -> tuple[int | None, int | None]:
    """Heads a group of the mixings before and after the softmax, 0 for all heads, None for no mixing.

    `heads` mixes all of them, `4` those of groups of four, `none` none. Both are alike, or typed as BEFORE+AFTER:
    `heads+4`. Raises UsageError for any other text.
    """
    before, _, after = (mix or NONE).lower().partition("+")
    return _size(before, mix), _size(after or before, mix)


def mixings(mix: str, heads: int) -> tuple[HeadMix | None, HeadMix | None]:
    """The mixings of so many heads; raises UsageError as `group_sizes`, and for groups that do not divide them."""
    for size in filter(None, group_sizes(mix)):
        if heads % size:
            divisors = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            raise UsageError(
                f"--mix {mix} cannot be had with {heads} heads, which are no multiple of {size}; expected heads or "
                f"one of {divisors}"
            )
    before, after = (None if size is None else HeadMix(heads // (size or heads)) for size in group_sizes(mix))
    return before, after


def mix_of(operation: Operation, heads: int) -> str:
    """The text that `group_sizes` reads as those of the operation; empty where there are none."""
    if operation.pre_mix is None and operation.post_mix is None:
        return ""
    before, after = (_text(mix, heads) for mix in (operation.pre_mix, operation.post_mix))
    return before if before == after else f"{before}+{after}"


def taps_text(query_taps: object, key_taps: object) -> str:
    """Taps as typed, `6x11`; empty for no convolution."""
    return f"{query_taps}x{key_taps}" if query_taps and key_taps else ""


def step_words(mix: str, conv: str, post_conv: str, conv_every: str = "") -> str:
    """The steps in words, `mix heads, conv 6x11, post conv 6x11`; those that are not there are left out.

    `conv_every` is of a model: `conv in 1 of 4 layers`.
    """
    layers = conv_every and ("all layers" if conv_every == "1" else f"1 of {conv_every} layers")
    texts = {"mix": mix, "conv": conv, "post conv": post_conv, "conv in": layers}
    return ", ".join(f"{name} {text}" for name, text in texts.items() if text)


def _size(part: str, mix: str) -> int | None:
    if part in (NONE, "heads"):
        return None if part == NONE else 0
    if not (part.isascii() and part.isdigit() and len(part) <= 4 and int(part)):
        raise UsageError(
            f"--mix cannot read {mix!r}; expected heads, none, a number of heads a group such as 4, or two of these "
            "for before and after the softmax, such as heads+4"
        )
    return int(part)


def _text(mix: HeadMix | None, heads: int) -> str:
    if mix is None:
        return NONE
    return "heads" if mix.groups == 1 else str(heads // mix.groups)
