"""One benchmark cell: what is measured, and on what shape. Knows nothing of torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mta_kernels.operation import Convolution, HeadMix, Operation
from mtabench.problem.operations import NONE, PLAIN, gate_text, make_operation, mix_of, norm_text, op_of, step_words

KERNEL_PASSES = ("fwd", "bwd", "decode")
MODES = ("train", "prefill", "generate")  # of a whole model
MODEL = "model"  # what is typed in the place of a pass
PASSES = KERNEL_PASSES + MODES
CACHED_PASSES = ("decode", "generate")  # one new token of each sequence, the others are in a cache
DTYPES = ("fp16", "bf16", "fp32")
BYTES_PER_ELEMENT = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of a sweep.

    `pass_` is the CSV column `pass`. `splits` is "auto" or the number wanted where a decode step can split its keys,
    and None elsewhere. `page_size` is the keys of a page where decode reads pages. `seq` is the number of keys (and of
    queries, except in decode, where one query is new).

    A cell of a whole model has its `layers`, which are None elsewhere, and one of MODES as its pass. `operation` is
    then the operation of every `conv_every`-th layer; the others lack its convolutions. None: no layer has any.
    """

    pass_: str
    impl: str
    operation: Operation
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int
    splits: int | str | None
    device: str
    layers: int | None = None
    conv_every: int | None = None
    page_size: int | None = None

    @classmethod
    def of_row(cls, row: Mapping[str, Any], device: str) -> Case:
        """The cell of `columns`, or of a row as `read_results` gives it: its command line is not read."""
        splits, head_dim = row["splits"], int(row["head_dim"])
        conv, post_conv = (
            None if row["op"] == "attention" else _taps(row.get(f"{name}_q"), row.get(f"{name}_k"))
            for name in ("conv", "post_conv")
        )
        return cls(
            pass_=row["pass"],
            impl=row["impl"],
            operation=make_operation(
                conv,
                row.get("mix") or "",
                post_conv,
                row.get("norm") or "",
                row.get("gate") or "",
                heads=int(row["heads"]),
                head_dim=head_dim,
                causal=bool(row["causal"]),
            ),
            dtype=row["dtype"],
            **{name: int(row[name]) for name in ("batch", "heads", "kv_heads", "seq")},
            head_dim=head_dim,
            splits=(splits if splits == "auto" else int(splits)) if splits else None,
            device=device,
            layers=_count(row.get("layers")),
            conv_every=_count(row.get("conv_every")),
            page_size=_count(row.get("page_size")),
        )

    @property
    def op(self) -> str:
        """The column `op`: plain attention has no convolution, and only `mta` has more steps than that."""
        return op_of(self.operation)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a results file that distinguish cells; columns of a step that is not there are None."""
        taps, post_taps = (
            step.taps if step else (None, None) for step in (self.operation.pre_conv, self.operation.post_conv)
        )
        return {
            "pass": self.pass_, "impl": self.impl, "op": self.op, "dtype": self.dtype, "batch": self.batch,
            "heads": self.heads, "kv_heads": self.kv_heads, "seq": self.seq, "head_dim": self.head_dim,
            "conv_q": taps[0], "conv_k": taps[1], "causal": self.operation.causal, "splits": self.splits,
            "mix": self.mix or None, "post_conv_q": post_taps[0], "post_conv_k": post_taps[1],
            "norm": self.norm or None, "gate": self.gate or None,
            "layers": self.layers, "conv_every": self.conv_every, "page_size": self.page_size,
        }  # fmt: skip

    @property
    def conv(self) -> Convolution:
        """The convolution before the softmax; one tap for plain attention."""
        return self.operation.conv

    @property
    def shape_key(self) -> tuple:
        """What cells share that alternate in the same rounds: everything but implementation and operation."""
        sizes = (self.batch, self.heads, self.kv_heads, self.seq, self.head_dim)
        of_model = () if self.layers is None else (self.layers,)  # kernels' keys seed their inputs, and must stay
        return (self.pass_, self.dtype, *sizes, *of_model, self.operation.causal, self.device)

    @property
    def problem_key(self) -> tuple:
        """The shape and the operation: cells with the same key compute the same thing."""
        of_model = () if self.conv_every is None else (self.conv_every,)
        return (*self.shape_key, self.operation, *of_model)

    def is_compared_with(self, base: Case) -> bool:
        """Whether its speedup may be over `base`: of the same problem and pages, or the plain model of its shape."""
        if self.layers is not None and base.op == PLAIN:
            return base.shape_key == self.shape_key
        return (base.problem_key, base.page_size) == (self.problem_key, self.page_size)

    @property
    def key(self) -> tuple:
        """What identifies a cell within a results file."""
        return (*self.problem_key, self.impl, self.splits, self.page_size)

    @property
    def label(self) -> str:
        """The implementation, with its splits if it takes them, and the size of its pages if it has any."""
        splits = "" if self.splits is None else f", splits {self.splits}"
        return self.impl + splits + (f", page size {self.page_size}" if self.page_size else "")

    @property
    def taps(self) -> str:
        """The convolution before the softmax as typed, or an empty text where there is none."""
        return str(self.operation.pre_conv or "")

    @property
    def post_taps(self) -> str:
        """The convolution after the softmax as typed, or an empty text where there is none."""
        return str(self.operation.post_conv or "")

    @property
    def mix(self) -> str:
        """The mixings of heads as typed, or an empty text where there are none."""
        return mix_of(self.operation, self.heads)

    @property
    def norm(self) -> str:
        """The norm of each head's output as typed, or an empty text where there is none."""
        return norm_text(self.operation.norm)

    @property
    def gate(self) -> str:
        """The gate of each head's output as typed, or an empty text where there is none."""
        return gate_text(self.operation.gate)

    @property
    def steps(self) -> str:
        """What is more than plain attention, in words: `mix heads, conv 6x11`; empty for plain attention."""
        return step_words(self.mix, self.taps, self.post_taps, self.norm, self.gate, str(self.conv_every or ""))

    @property
    def window(self) -> int:
        """Queries that one row of the output depends on, if the sequence has as many: both convolutions look back."""
        steps = filter(None, (self.operation.pre_conv, self.operation.post_conv))
        return min(self.seq, 1 + sum(step.query_taps - 1 for step in steps))

    @property
    def capacity(self) -> int:
        """Keys of a sequence that its cache has room for: whole pages."""
        size = self.page_size or 1
        return -(-self.seq // size) * size

    @property
    def mixings(self) -> tuple[HeadMix, ...]:
        """The mixings of heads, none, one or two."""
        return tuple(filter(None, (self.operation.pre_mix, self.operation.post_mix)))

    def repro(self, impl: str = "") -> str:
        """A command line that measures this one cell; `impl` is what to type for an implementation, if not its name."""
        if self.layers is not None:
            return " ".join(self._repro_of_model(self.layers))
        words = [
            "mtabench", self.pass_, "--impl", shlex.quote(impl or self.impl), "--seq", str(self.seq),
            "--head-dim", str(self.head_dim),
            "--batch", str(self.batch), "--heads", str(self.heads), "--kv-heads", str(self.kv_heads),
            "--dtype", self.dtype, "--device", self.device,
        ]  # fmt: skip
        if self.op == "mta":
            words += ["--op", self.op, "--mix", self.mix or NONE, "--conv", self.taps or NONE]
            words += ["--post-conv", self.post_taps or NONE]
            words += ["--norm", self.norm] if self.norm else []
            words += ["--gate", self.gate] if self.gate else []
        elif self.taps:
            words += ["--conv", self.taps]
        if self.splits is not None:
            words += ["--splits", str(self.splits)]
        if self.page_size is not None:
            words += ["--page-size", str(self.page_size)]
        if self.pass_ != "decode":
            words.append("--causal" if self.operation.causal else "--no-causal")
        return " ".join(words)

    def _repro_of_model(self, layers: int) -> list[str]:
        words = [
            "mtabench", "model", "--mode", self.pass_, "--impl", self.impl, "--layers", str(layers),
            "--heads", str(self.heads), "--dim", str(self.heads * self.head_dim), "--seq", str(self.seq),
            "--batch", str(self.batch), "--dtype", self.dtype, "--device", self.device,
        ]  # fmt: skip
        words += ["--attention", f"{'mta' if self.mix else 'conv'}/{self.conv_every}"] if self.conv_every else []
        words += ["--attention", "mix"] if self.mix and not self.conv_every else []
        return words + (["--conv", self.taps] if self.taps else [])


def _count(value: Any) -> int | None:
    """A number of a row, in which nothing is empty, None or NaN."""
    return int(value) if value and value == value else None


def _taps(query_taps: Any, key_taps: Any) -> tuple[int, int] | None:
    """Taps of a row, in which nothing is empty, None or NaN."""
    known = query_taps and key_taps and query_taps == query_taps
    return (int(query_taps), int(key_taps)) if known else None
