"""The language model: bytes to logits of the next byte, with multi-token attention in layers as the paper has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_task.model import Network, rotate, turns_of_pairs

from mta_kernels.multi_token_attention import MultiTokenAttention

BYTES = 256
TAPS = (6, 11)  # of both convolutions, as in the paper's models
MIXER_NAMES = ("mta_kernel", "wpsm", "head_kernel")  # of parameters


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


class Attention(nn.Module):
    """Causal multi-token attention: mixings, norm and gate; convolutions in every fourth layer from the third on."""

    def __init__(self, setting: Setting, layer: int, backend: str) -> None:
        super().__init__()
        self.heads = setting.heads
        self.project_in = nn.Linear(setting.dim, 3 * setting.dim, bias=False)
        self.project_out = nn.Linear(setting.dim, setting.dim, bias=False)
        taps = TAPS if layer % 4 == 2 else None
        self.mta = MultiTokenAttention(
            setting.heads, setting.head_dim, pre_conv=taps, post_conv=taps, backend=backend
        )  # fmt: skip

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """`[B, N, dim]` to the same."""
        q, k, v = self.project_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.mta(rotate(q, turns), rotate(k, turns), v)
        return self.project_out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated network, each added to what it reads."""

    def __init__(self, setting: Setting, layer: int, backend: str) -> None:
        super().__init__()
        self.norm_attention, self.norm_network = nn.RMSNorm(setting.dim), nn.RMSNorm(setting.dim)
        self.attention, self.network = Attention(setting, layer, backend), Network(setting.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """`[B, N, dim]` to the same."""
        x = x + self.attention(self.norm_attention(x), turns)
        return x + self.network(self.norm_network(x))


class LanguageModel(nn.Module):
    """Bytes `[B, N]` to logits `[B, N, 256]` of the bytes after them; the same weights for every backend of a seed."""

    turns: Tensor

    def __init__(self, setting: Setting, backend: str) -> None:
        super().__init__()
        torch.manual_seed(setting.seed)
        self.bytes = nn.Embedding(BYTES, setting.dim)
        nn.init.normal_(self.bytes.weight, std=setting.dim**-0.5)
        self.register_buffer("turns", turns_of_pairs(setting.seq, setting.head_dim), persistent=False)
        self.layers = nn.ModuleList([Layer(setting, layer, backend) for layer in range(setting.layers)])
        self.norm = nn.RMSNorm(setting.dim)

    def forward(self, text: Tensor) -> Tensor:
        """See the class."""
        x = self.bytes(text)
        for layer in self.layers:
            x = layer(x, self.turns[:, : text.shape[1]])
        return F.linear(self.norm(x), self.bytes.weight)

    def mixers(self) -> list[nn.Parameter]:
        """The convolutions and mixings of all layers."""
        return [weight for name, weight in self.named_parameters() if any(part in name for part in MIXER_NAMES)]
