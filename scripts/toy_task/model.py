"""The transformer that learns the toy task, with conv attention, all of multi-token attention or plain attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_task.sequences import BLOCK, QUERY, VOCABULARY, Setting

from mta_kernels.conv_attention import ConvAttention
from mta_kernels.multi_token_attention import MultiTokenAttention
from mtabench.transformer.model import rotate, turns_of_pairs

TAPS = (QUERY, 2 * BLOCK - 1)
MTA_BACKENDS = {"mta": "auto", "mta-eager": "reference"}  # of an attention with all parts


class Attention(nn.Module):
    """Causal attention: plain, with a convolution of the scores, or with all parts of multi-token attention."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.heads = setting.heads
        self.project_in = nn.Linear(setting.width, 3 * setting.width, bias=False)
        self.project_out = nn.Linear(setting.width, setting.width, bias=False)
        self.conv = ConvAttention(setting.heads, *TAPS) if setting.attention == "conv" else None
        self.mta = None
        if setting.attention in MTA_BACKENDS:
            with torch.random.fork_rng(devices=[]):  # what its gate draws changes no other weight
                self.mta = MultiTokenAttention(
                    setting.heads, setting.width // setting.heads, pre_conv=TAPS, post_conv=TAPS,
                    backend=MTA_BACKENDS[setting.attention],
                )  # fmt: skip

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        qkv = self.project_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(qkv[:2], turns)
        v = qkv[2]
        return self.project_out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, heads, N, D]` of three of them."""
        if self.mta:
            return self.mta(q, k, v)
        return self.conv(q, k, v) if self.conv else F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Network(nn.Module):
    """A gated network (SwiGLU)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(width, 6 * width, bias=False)
        self.project_out = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        gate, values = self.project_in(x).chunk(2, -1)
        return self.project_out(F.silu(gate) * values)


class Layer(nn.Module):
    """Attention and a network, each added to what it reads."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.norm_attention, self.norm_network = nn.RMSNorm(setting.width), nn.RMSNorm(setting.width)
        self.attention, self.network = Attention(setting), Network(setting.width)

    def forward(self, x: Tensor, turns: Tensor, wanted: int) -> Tensor:
        """`[B, N, width]` to `[B, wanted, width]`, of the last positions."""
        x = (x + self.attention(self.norm_attention(x), turns))[:, -wanted:]
        return x + self.network(self.norm_network(x))


class Transformer(nn.Module):
    """Tokens `[B, N]` to logits `[B, answer, VOCABULARY]` of the tokens after the last positions.

    The same seed gives the rivals the same weights, except in a convolution and in multi-token attention.
    """

    turns: Tensor

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.answer = setting.answer
        self.tokens = nn.Embedding(VOCABULARY, setting.width)
        turns = turns_of_pairs(setting.length, setting.width // setting.heads)
        self.register_buffer("turns", turns, persistent=False)
        self.layers = nn.ModuleList([Layer(setting) for _ in range(setting.layers)])
        self.norm = nn.RMSNorm(setting.width)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and ".mta." not in name:
                deviation = module.weight.shape[1] ** -0.5
                nn.init.trunc_normal_(module.weight, std=deviation, a=-3 * deviation, b=3 * deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        x, count = self.tokens(tokens), tokens.shape[1]
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, self.turns[:, :count], self.answer if index == len(self.layers) else count)
        return F.linear(self.norm(x), self.tokens.weight)
