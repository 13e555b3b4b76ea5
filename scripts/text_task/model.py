"""The language model: the suite's transformer on bytes, with multi-token attention in layers as the paper has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtabench.problem.operations import make_operation
from mtabench.transformer.model import Config, Transformer

BYTES = 256
TAPS = (6, 11)  # of both convolutions, as in the paper's models


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained; `seq` in bytes, `dim` the width of the model."""

    seed: int
    seq: int
    batch: int
    layers: int
    dim: int
    heads: int
    steps: int
    learning_rate: float

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.dim // self.heads


class LanguageModel(Transformer):
    """Bytes `[B, N]` to logits `[B, N, 256]` of the bytes after them; the same weights for every backend of a seed."""

    def __init__(self, setting: Setting, backend: str) -> None:
        torch.manual_seed(setting.seed)
        operation = make_operation(TAPS, "heads", TAPS, heads=setting.heads, head_dim=setting.head_dim)
        config = Config(
            setting.layers, setting.heads, setting.head_dim, operation, conv_every=4, backend=backend, vocabulary=BYTES
        )  # fmt: skip
        super().__init__(config, setting.seq)
