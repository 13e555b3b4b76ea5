"""The shapes of arguments that kernels are compiled for: a few that stand for all, and any that options choose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mta_kernels.operation import Operation
from mtabench.errors import UsageError
from mtabench.problem import axes


@dataclass(frozen=True)
class Shape:
    """Arguments of conv attention, batch 1. `seq` decides the tile sizes of a forward alone.

    `packed` has documents in the row of tokens; `page_size` is of the cache that decode reads, 0 if contiguous.
    `by_name`: for the kernels too that a sweep measures by name alone, the ladder's and cuda-conv's.
    """

    dtype: str = "bf16"
    head_dim: int = 64
    conv: tuple[int, int] = (6, 11)
    causal: bool = True
    seq: int = 16384
    heads: int = 16
    kv_heads: int = 16
    packed: bool = False
    page_size: int = 0
    by_name: bool = False

    @property
    def operation(self) -> Operation:
        """What the kernels compute."""
        return Operation.of(self.conv, self.head_dim, causal=self.causal)

    @property
    def name(self) -> str:
        """All that is not as usual, in words: it stands for the shape in tables and files."""
        words = [self.dtype, f"head dim {self.head_dim}", f"conv {self.conv[0]}x{self.conv[1]}"]
        words += [f"{axes.short(self.seq)} tokens"] if self.seq != Shape.seq else []
        words += [] if self.causal else ["not causal"]
        words += [f"{self.kv_heads} of {self.heads} KV heads"] if self.kv_heads != self.heads else []
        words += ["packed"] if self.packed else []
        words += [f"pages of {self.page_size}"] if self.page_size else []
        return ", ".join(words)


# The shapes of the paper's models first; then what takes other paths through the kernels. Three are enough for those
# that are measured by name alone.
ALL_SHAPES = (
    Shape(by_name=True),
    Shape(head_dim=128, by_name=True),
    Shape(head_dim=96),
    Shape(head_dim=256),
    Shape(dtype="fp16", kv_heads=2),
    Shape(dtype="fp32", conv=(11, 3), by_name=True),
    Shape(head_dim=80, conv=(7, 7), causal=False),
    Shape(head_dim=36, conv=(1, 1)),
    Shape(head_dim=128, kv_heads=4, packed=True, page_size=16),
)
DEFAULT_SHAPES = ALL_SHAPES[:2]


def chosen_shapes(typed: Mapping[str, Any], among: Sequence[Shape] | None) -> list[Shape]:
    """The shapes to compile for: those in `among` that fit the options; without `among` all their combinations.

    `typed` has options by their names in READERS as typed, None where one was not given. Raises UsageError for options
    that cannot be read, and where none of `among` fits.
    """
    wanted = {name: READERS[name](given) for name, given in typed.items() if given is not None}
    if among is None:
        if not wanted:
            return list(DEFAULT_SHAPES)
        return [
            Shape(dtype=dtype, head_dim=head_dim, conv=conv, causal=causal, seq=seq, by_name=True)
            for dtype in wanted.get("dtype", [Shape.dtype])
            for head_dim in wanted.get("head_dim", [shape.head_dim for shape in DEFAULT_SHAPES])
            for conv in wanted.get("conv", [Shape.conv])
            for causal in wanted.get("causal", [Shape.causal])
            for seq in wanted.get("seq", [Shape.seq])
        ]
    found = [shape for shape in among if all(getattr(shape, name) in values for name, values in wanted.items())]
    if not found:
        known = "; ".join(shape.name for shape in among)
        raise UsageError(f"none of the shapes to inspect is as asked for; they are: {known}")
    return found


# The values that each option of a shape names.
READERS: dict[str, Callable[[Any], list]] = {
    "head_dim": axes.parse_head_dims,
    "conv": axes.parse_convs,
    "dtype": axes.parse_dtypes,
    "seq": lambda text: axes.parse_ints(text, "--seq"),
    "causal": lambda causal: [causal],
}
