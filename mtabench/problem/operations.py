"""Operations as people type them: `--conv 6x11 --mix heads --norm rms --gate one`, and the same in results files."""

import re
from collections.abc import Iterable
from dataclasses import replace

from mta_kernels.operation import Convolution, Gate, HeadMix, Norm, Operation, key_padding
from mtabench.errors import UsageError

OPS = ("conv-attention", "attention", "mta")
PLAIN = "attention"  # of these the one without a step
NONE = "none"
# The columns of a results file that say what a cell computes, beside `causal`, and in pages of which size its cache is.
OPERATION_COLUMNS = ("conv_q", "conv_k", "mix", "post_conv_q", "post_conv_k", "norm", "gate", "conv_every", "page_size")
# The same as axes, by which people name them.
STEPS = ("mix", "conv", "post_conv", "norm", "gate", "conv_every", "page_size")
PLAIN_LACKS = STEPS[:-1]  # a cache it has, whose size of pages is none
NO_PAGES = "plain attention reads no pages: its cache is contiguous"
GATES = {NONE: None, "one": Gate(), "full": Gate(full=True)}
NORMS = "expected rms, none, or depth and a layer's index such as depth2, which rescales it"

Taps = tuple[int, int]


def make_operation(
    conv: Taps | None, mix: str, post_conv: Taps | None, norm: str = "", gate: str = "", *, heads: int, head_dim: int,
    causal: bool = True,
) -> Operation:  # fmt: skip
    """The operation with these steps, `mix`, `norm` and `gate` as typed. Raises UsageError for what none of them is."""
    before, after = mixings(mix, heads)
    operation = Operation.of(conv, head_dim, causal=causal)
    convolution = None if post_conv is None else Convolution(*post_conv, key_padding(post_conv[1], "both"))
    return replace(
        operation, pre_mix=before, post_conv=convolution, post_mix=after, norm=norm_of(norm), gate=gate_of(gate)
    )


def op_of(operation: Operation) -> str:
    """The column `op`: `mta` for any step that conv attention lacks; plain attention has no step."""
    if operation.is_more_than_conv_attention:
        return "mta"
    return PLAIN if operation.pre_conv is None else "conv-attention"


def group_sizes(mix: str) -> tuple[int | None, int | None]:
    """Heads a group of the mixings before and after the softmax, 0 for all heads, None for no mixing.

    `heads` mixes all of them, `4` heads in groups of four, `none` none. Both are alike, or typed as BEFORE+AFTER:
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
    """The text that `group_sizes` reads as the operation's group sizes; empty if it mixes no heads."""
    if operation.pre_mix is None and operation.post_mix is None:
        return ""
    before, after = (_text(mix, heads) for mix in (operation.pre_mix, operation.post_mix))
    return before if before == after else f"{before}+{after}"


def norm_of(text: str) -> Norm | None:
    """The norm of each head's output: `rms`, `depth2` as layer 2 rescales it, `none`; UsageError for another text."""
    text = text.lower() or NONE
    if text in (NONE, "rms"):
        return None if text == NONE else Norm()
    match = re.fullmatch(r"depth(0|[1-9]\d{0,3})", text, re.ASCII)
    if not match:
        raise UsageError(f"--norm cannot read {text!r}; {NORMS}")
    return Norm(int(match[1]))


def norm_text(norm: Norm | None) -> str:
    """The text that `norm_of` reads as this norm; empty for none."""
    if norm is None:
        return ""
    return "rms" if norm.depth is None else f"depth{norm.depth}"


def gate_of(text: str) -> Gate | None:
    """The gate of each head's output: `one` number a row, `full` for one a head dim, `none`; else UsageError."""
    name = text.lower() or NONE
    if name not in GATES:
        raise UsageError(f"--gate cannot read {text!r}; expected one, a number a row, full, one a head dim, or none")
    return GATES[name]


def gate_text(gate: Gate | None) -> str:
    """The text that `gate_of` reads as this gate; empty for none."""
    return next(name for name, known in GATES.items() if known == gate) if gate else ""


def by_value(key: Iterable[object]) -> tuple[object, ...]:
    """What sorts a key whose texts may be whole numbers by their values: no pages, pages of 16, then of 128."""
    key = ("" if value == NONE else value for value in key)
    return tuple(value.rjust(12) if isinstance(value, str) and value.isdigit() else value for value in key)


def taps_text(query_taps: object, key_taps: object) -> str:
    """Taps as typed, `6x11`; empty for no convolution."""
    return f"{query_taps}x{key_taps}" if query_taps and key_taps else ""


def page_size_text(pass_: str, size: object) -> str:
    """Keys of a page as typed, `none` of a decode step whose cache is contiguous; empty for other passes."""
    return str(size or NONE) if pass_ == "decode" else ""


def step_words(*steps: str) -> str:
    """The STEPS in words, `mix heads, conv 6x11, post conv 6x11, norm rms`; those that are not there are left out."""
    return ", ".join(f"{name} {text}" for name, text in named_steps(*steps).items() if text)


def named_steps(
    mix: str, conv: str, post_conv: str, norm: str = "", gate: str = "", conv_every: str = "", page_size: str = ""
) -> dict[str, str]:  # fmt: skip
    """The STEPS by what stands before them in words, empty where one is not there.

    `conv_every` is of a model: `conv in 1 of 4 layers`.
    """
    layers = conv_every and ("all layers" if conv_every == "1" else f"1 of {conv_every} layers")
    return {
        "mix": mix, "conv": conv, "post conv": post_conv, "norm": norm, "gate": gate, "conv in": layers,
        "page size": page_size,
    }  # fmt: skip


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
