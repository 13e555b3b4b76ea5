"""A plain transformer: rotary positions, RMSNorm, gated networks, and in its layers the configured attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mta_kernels.multi_token_attention import MultiTokenAttention
from mta_kernels.operation import Operation
from mtabench.problem.layers import VOCABULARY, hidden, layer_operation

if TYPE_CHECKING:
    from mtabench.transformer.cache import Cache

EPS = 1e-5
THETA = 1e5  # rotary positions: the slowest pair turns by about 1 / THETA a token


@dataclass(frozen=True)
class Config:
    """A model. Every `conv_every`-th layer has `operation`, the others lack its convolutions (None: all lack them).

    A layer without any step has plain attention. `backend` computes the others; models that mix heads also have the
    norm and the gate of the paper's.
    """

    layers: int
    heads: int
    head_dim: int
    operation: Operation
    conv_every: int | None = None
    backend: str = "auto"
    vocabulary: int = VOCABULARY

    @property
    def dim(self) -> int:
        """Width of the model."""
        return self.heads * self.head_dim

    def attention(self, layer: int) -> MultiTokenAttention | None:
        """The attention of a layer, from 0; None for plain attention."""
        own = layer_operation(self.operation, layer, self.conv_every)
        more = self.operation.is_more_than_conv_attention
        if not more and own.pre_conv is None:
            return None
        pre, post = (None if step is None else step.taps for step in (own.pre_conv, own.post_conv))
        return MultiTokenAttention(
            self.heads, self.head_dim, pre_conv=pre, pre_mix=own.pre_mix is not None, post_conv=post,
            post_mix=own.post_mix is not None, norm=more, gate=more, backend=self.backend,
        )  # fmt: skip


def turns_of_pairs(length: int, dim: int) -> Tensor:
    """`[2, length, dim / 2]`: cosine and sine of the angle by which each pair of a head turns at each position."""
    half = dim // 2
    angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(half) / half)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: the pairs `(i, i + D / 2)` of `x [..., N, D]`, each turned by the angle of its position."""
    a, b = x.chunk(2, -1)
    cos, sin = turns
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last `M` positions `q [B, H, M, D]` to `k, v [B, H, N, D]`."""
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    from torch.nn.attention.bias import causal_lower_right

    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def before_attention(x: Tensor, norm: Tensor, project: Tensor, turns: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    """`x [B, N, dim]` to q, k and v `[B, H, N, D]`, of which q and k have their rotary positions."""
    normed = F.rms_norm(x, norm.shape, norm, EPS)
    q, k, v = F.linear(normed, project).unflatten(-1, (3, -1, head_dim)).permute(2, 0, 3, 1, 4)
    return rotate(q, turns), rotate(k, turns), v


def after_attention(
    x: Tensor, y: Tensor, project: Tensor, norm: Tensor, network_in: Tensor, network_out: Tensor
) -> Tensor:
    """`x [B, N, dim]` with attention's output `y [B, H, N, D]` and then the gated network (SwiGLU) added to it."""
    x = x + F.linear(y.transpose(1, 2).flatten(2), project)
    gate, values = F.linear(F.rms_norm(x, norm.shape, norm, EPS), network_in).chunk(2, -1)
    return x + F.linear(F.silu(gate) * values, network_out)


def loss_of(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of what the last layer gives, `[B, N, dim]`, against the next tokens `[B, N]`."""
    logits = F.linear(F.rms_norm(x, norm.shape, norm, EPS), embedding)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Parts:
    """A model's parts beside attention, as they are or compiled; and the caller of an attention."""

    before: Callable[..., tuple[Tensor, ...]] = before_attention
    after: Callable[..., Tensor] = after_attention
    loss: Callable[..., Tensor] = loss_of
    attention: Callable[..., Tensor] = field(default=lambda module, q, k, v: module(q, k, v))


class Attention(nn.Module):
    """The matrices around an attention, and `mta`, the attention; None where it is plain."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.project_out = nn.Linear(config.dim, config.dim, bias=False)
        self.mta = config.attention(layer)


class Network(nn.Module):
    """The matrices of a gated network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(dim, 2 * hidden(dim), bias=False)
        self.project_out = nn.Linear(hidden(dim), dim, bias=False)


class Layer(nn.Module):
    """Attention and a gated network, each added to what it reads."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.norm_attention, self.norm_network = (nn.RMSNorm(config.dim, eps=EPS) for _ in range(2))
        self.attention, self.network = Attention(config, layer), Network(config.dim)

    def forward(self, x: Tensor, turns: Tensor, parts: Parts, past: Cache | None) -> Tensor:
        """`[B, N, dim]` to the same."""
        own = self.attention
        q, k, v = parts.before(x, self.norm_attention.weight, own.project_in.weight, turns, self.head_dim)
        if past is not None:
            y = past.attend(self.layer, own.mta, q, k, v)
        else:
            y = plain_attention(q, k, v) if own.mta is None else parts.attention(own.mta, q, k, v)
        network = self.network.project_in.weight, self.network.project_out.weight
        return parts.after(x, y, own.project_out.weight, self.norm_network.weight, *network)


class Transformer(nn.Module):
    """Tokens `[B, N]` to logits `[B, N, vocabulary]` of the tokens after them, N at most `length`."""

    table: Tensor

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        self.config, self.parts = config, Parts()
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.register_buffer("table", turns_of_pairs(length, config.head_dim), persistent=False)
        self.layers = nn.ModuleList([Layer(config, layer) for layer in range(config.layers)])
        self.norm = nn.RMSNorm(config.dim, eps=EPS)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, but for what attention itself has."""
        for layer in self.layers:
            for part in layer.children():
                for module in (part, *part.children()):
                    if isinstance(module, nn.Linear | nn.RMSNorm):
                        module.reset_parameters()
        self.norm.reset_parameters()
        nn.init.normal_(self.tokens.weight, std=self.config.dim**-0.5)

    def hidden(self, tokens: Tensor, past: Cache | None = None) -> Tensor:
        """What the last layer gives, `[B, N, dim]`; `past` holds the tokens before, and then these as well."""
        count = tokens.shape[1]
        turns = self.table[:, :count] if past is None else past.turns(self.table, count)
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, turns, self.parts, past)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """`[..., vocabulary]` of what the last layer gave."""
        return F.linear(self.norm(x), self.tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.logits(self.hidden(tokens))

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy of `tokens [B, N + 1]`, each but the first guessed from those before."""
        return self.parts.loss(self.hidden(tokens[:, :-1]), self.norm.weight, self.tokens.weight, tokens[:, 1:])

    def attentions(self) -> list[MultiTokenAttention | None]:
        """The attention of each layer, None where it is plain."""
        return [layer.attention.mta for layer in self.layers if isinstance(layer, Layer)]

    def mixers(self) -> list[nn.Parameter]:
        """The convolutions and mixings of all layers."""
        return [
            weight
            for mta in self.attentions()
            if mta is not None
            for name, weight in mta.named_parameters()
            if not name.startswith(("subln", "gate"))
        ]
