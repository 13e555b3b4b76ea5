"""One benchmark cell: what is measured, and on what shape. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass

PASSES = ("fwd", "bwd", "decode")
OPS = ("conv-attention", "attention")
DTYPES = ("fp16", "bf16", "fp32")
BYTES_PER_ELEMENT = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of a sweep.

    `pass_` is the CSV column `pass`. Plain attention (`op == "attention"`) has no convolution: `conv_q` and
    `conv_k` are None there. `splits` is "auto" or the number asked for where a decode step can split its keys,
    and None elsewhere. `seq` is the number of keys (and of queries, except in decode, where one query is new).
    """

    pass_: str
    impl: str
    op: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int
    conv_q: int | None
    conv_k: int | None
    causal: bool
    splits: int | str | None
    device: str

    @property
    def shape_key(self) -> tuple:
        """What cells share that take turns in the same rounds: everything but implementation and convolution."""
        return (
            self.pass_,
            self.dtype,
            self.batch,
            self.heads,
            self.kv_heads,
            self.seq,
            self.head_dim,
            self.causal,
            self.device,
        )

    @property
    def problem_key(self) -> tuple:
        """The shape and the convolution: cells with the same key compute the same thing."""
        return (*self.shape_key, self.op, self.conv_q, self.conv_k)

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
        return f"{self.conv_q}x{self.conv_k}" if self.conv_q else ""

    def repro(self) -> str:
        """A command line that measures this one cell."""
        words = [
            "mtabench", self.pass_, "--impl", self.impl, "--seq", str(self.seq), "--head-dim", str(self.head_dim),
            "--batch", str(self.batch), "--heads", str(self.heads), "--kv-heads", str(self.kv_heads),
            "--dtype", self.dtype, "--device", self.device,
        ]  # fmt: skip
        if self.op == "conv-attention":
            words += ["--conv", self.taps]
        if self.splits is not None:
            words += ["--splits", str(self.splits)]
        if self.pass_ != "decode":
            words.append("--causal" if self.causal else "--no-causal")
        return " ".join(words)
