"""One benchmark cell: what is measured, and on what shape. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mta_kernels.operation import Convolution, Operation

PASSES = ("fwd", "bwd", "decode")
OPS = ("conv-attention", "attention")
DTYPES = ("fp16", "bf16", "fp32")
BYTES_PER_ELEMENT = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of a sweep.

    `pass_` is the CSV column `pass`. `splits` is "auto" or the number asked for where a decode step can split its
    keys, and None elsewhere. `seq` is the number of keys (and of queries, except in decode, where one query is new).
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

    @classmethod
    def of_row(cls, row: Mapping[str, Any], device: str) -> Case:
        """The cell of `columns`, or of a row as `read_results` gives it: its command line is not read."""
        splits, head_dim = row["splits"], int(row["head_dim"])
        taps = (int(row["conv_q"]), int(row["conv_k"])) if row["op"] == "conv-attention" else None
        return cls(
            pass_=row["pass"],
            impl=row["impl"],
            operation=Operation.of(taps, head_dim, causal=bool(row["causal"])),
            dtype=row["dtype"],
            **{name: int(row[name]) for name in ("batch", "heads", "kv_heads", "seq")},
            head_dim=head_dim,
            splits=(splits if splits == "auto" else int(splits)) if splits else None,
            device=device,
        )

    @property
    def op(self) -> str:
        """The column `op`: plain attention has no convolution."""
        return OPS[self.operation.pre_conv is None]

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a results file that tell cells apart; those of a convolution are None for plain attention."""
        taps = self.operation.pre_conv.taps if self.operation.pre_conv else (None, None)
        return {
            "pass": self.pass_, "impl": self.impl, "op": self.op, "dtype": self.dtype, "batch": self.batch,
            "heads": self.heads, "kv_heads": self.kv_heads, "seq": self.seq, "head_dim": self.head_dim,
            "conv_q": taps[0], "conv_k": taps[1], "causal": self.operation.causal, "splits": self.splits,
        }  # fmt: skip

    @property
    def conv(self) -> Convolution:
        """The convolution before the softmax; one tap for plain attention."""
        return self.operation.conv

    @property
    def shape_key(self) -> tuple:
        """What cells share that take turns in the same rounds: everything but implementation and convolution."""
        sizes = (self.batch, self.heads, self.kv_heads, self.seq, self.head_dim)
        return (self.pass_, self.dtype, *sizes, self.operation.causal, self.device)

    @property
    def problem_key(self) -> tuple:
        """The shape and the operation: cells with the same key compute the same thing."""
        return (*self.shape_key, self.operation)

    @property
    def key(self) -> tuple:
        """What identifies a cell within a results file."""
        return (*self.problem_key, self.impl, self.splits)

    @property
    def label(self) -> str:
        """The implementation, with its splits if it takes them."""
        return self.impl if self.splits is None else f"{self.impl}, splits {self.splits}"

    @property
    def taps(self) -> str:
        """The convolution as typed on the command line, or an empty text for plain attention."""
        return str(self.operation.pre_conv or "")

    def repro(self) -> str:
        """A command line that measures this one cell."""
        words = [
            "mtabench", self.pass_, "--impl", self.impl, "--seq", str(self.seq), "--head-dim", str(self.head_dim),
            "--batch", str(self.batch), "--heads", str(self.heads), "--kv-heads", str(self.kv_heads),
            "--dtype", self.dtype, "--device", self.device,
        ]  # fmt: skip
        if self.taps:
            words += ["--conv", self.taps]
        if self.splits is not None:
            words += ["--splits", str(self.splits)]
        if self.pass_ != "decode":
            words.append("--causal" if self.operation.causal else "--no-causal")
        return " ".join(words)
