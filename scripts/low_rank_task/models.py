"""Many small transformers side by side that differ in the rank of their convolutions: one batched product for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mta_kernels.conv_attention import conv_attention
from mta_kernels.conv_attention.api import identity_weight
from mtabench.transformer.model import rotate, turns_of_pairs

TAPS = (6, 11)
PLAIN, FULL = 0, min(TAPS)  # ranks: the identity that is not trained, a weight without factors
RANKS = (PLAIN, 1, 2, 3, FULL)
FACTORS = 3  # kept for every model, those beyond its rank masked
SPREAD = 0.5  # how far the factors lie apart at first


@dataclass(frozen=True)
class Task:
    """What models learn, and their sizes; `seq` in tokens, the last `answer` of which are predicted.

    `held_out` sequences are asked after the last step, and an eighth of them before it.
    """

    task: str
    vocabulary: int
    seq: int
    answer: int
    width: int
    heads: int
    layers: int
    batch: int
    steps: int
    learning_rate: float
    held_out: int


@dataclass(frozen=True)
class Member:
    """One of the models: letters of its queries (0 for text), rank, and the rate of its convolutions over the others'.

    A plain model has rate 0.
    """

    query: int
    seed: int
    rank: int
    rate: float


class Models(nn.Module):
    """Tokens `[models, B, seq - 1]` to logits `[models, B, answer, vocabulary]`.

    Parameters have the models in front, then the layers. Models of a seed start with the same matrices, and all of them
    as plain attention.
    """

    def __init__(self, task: Task, members: list[Member]) -> None:
        super().__init__()
        self.task, self.members = task, members
        generators = {member.seed: torch.Generator().manual_seed(member.seed) for member in members}

        def draw(*shape: int, deviation: float) -> Tensor:
            each = {seed: torch.randn(shape, generator=generator) for seed, generator in generators.items()}
            return torch.stack([each[member.seed] for member in members]) * deviation

        layers, heads, width = task.layers, task.heads, task.width
        self.tokens = nn.Parameter(draw(task.vocabulary, width, deviation=width**-0.5))
        self.project_in = nn.Parameter(draw(layers, width, 3 * width, deviation=width**-0.5))
        self.project_out = nn.Parameter(draw(layers, width, width, deviation=width**-0.5))
        self.network_in = nn.Parameter(draw(layers, width, 6 * width, deviation=width**-0.5))
        self.network_out = nn.Parameter(draw(layers, 3 * width, width, deviation=(3 * width) ** -0.5))
        self.norms = nn.Parameter(torch.ones(len(members), layers, 2, width))
        self.last_norm = nn.Parameter(torch.ones(len(members), width))
        self.register_buffer("turns", turns_of_pairs(task.seq, width // heads))

        ranks, rates = (torch.tensor([getattr(member, name) for member in members]) for name in ("rank", "rate"))
        self.register_buffer("rates", rates.float().view(-1, 1, 1, 1, 1))
        self.register_buffer("is_full", (ranks == FULL).float().view(-1, 1, 1, 1, 1))
        used = (torch.arange(FACTORS) < ranks[:, None]) & (ranks < FULL)[:, None]
        used = used.float().view(-1, 1, 1, FACTORS, 1)
        self.register_buffer("used", used)
        shares = ranks.clamp(min=1).view(-1, 1, 1, 1, 1)
        # sum_r u_r x v_r is the identity: all v_r are its key tap, and the u_r its query tap and what adds up to zero.
        # As all factors are nonzero and differ, all have gradients, and these differ as well.
        apart = used * draw(layers, heads, FACTORS, TAPS[0], deviation=SPREAD)
        identity = identity_weight(1, *TAPS)[0]
        self.register_buffer("identity", (1 - used[..., :1, :]) * identity)
        query_tap, key_tap = identity.sum(1) * shares**-0.5, identity.sum(0) * shares**-0.5
        self.register_buffer("u_start", used * (query_tap + apart - apart.sum(3, keepdim=True) / shares))
        self.register_buffer("v_start", (used * key_tap).expand(-1, layers, heads, -1, -1))
        self.u, self.v = (nn.Parameter(torch.zeros_like(start)) for start in (self.u_start, self.v_start))
        self.full = nn.Parameter(torch.zeros(len(members), layers, heads, *TAPS))

    def moved(self, parameter: Tensor) -> Tensor:
        """How far a part of the convolutions is from its start: the optimizer has one rate, and these models several.

        So a step moves it `rate` times as far as others. Its gradient, which is clipped, is that without the factor.
        """
        return parameter + (self.rates - 1) * parameter.detach()

    def weights(self) -> Tensor:
        """The convolutions, `[models, layers, heads, 6, 11]`, float32 under autocast too: so no product."""
        u = self.used * (self.u_start + self.moved(self.u))
        v = self.v_start + self.moved(self.v)
        return self.identity + self.is_full * self.moved(self.full) + (u[..., None] * v[..., None, :]).sum(3)

    def forward(self, tokens: Tensor, weights: Tensor | None = None) -> Tensor:
        """See the class; by other convolutions than the models' own if `weights` are given."""
        task, (models, batch, count) = self.task, tokens.shape
        first = task.vocabulary * torch.arange(models, device=tokens.device)
        x = F.embedding(tokens + first[:, None, None], self.tokens.flatten(0, 1)).flatten(1, 2)  # [models, B N, width]
        parts = self.weights() if weights is None else weights, self.norms, self.project_in, self.project_out
        for weight, norms, project_in, project_out, network_in, network_out in zip(
            *(part.unbind(1) for part in (*parts, self.network_in, self.network_out)), strict=True
        ):
            qkv = norm(x, norms[:, 0]).bmm(project_in).view(models, batch, count, 3, task.heads, -1)
            qkv = qkv.permute(3, 1, 0, 4, 2, 5).flatten(2, 3)  # [3, B, models heads, N, D]
            q, k = rotate(qkv[:2], self.turns[:, :count])
            y = conv_attention(q, k, qkv[2], weight.flatten(0, 1)).unflatten(1, (models, task.heads))
            x = x + y.permute(1, 0, 3, 2, 4).reshape(models, batch * count, task.width).bmm(project_out)
            gate, values = norm(x, norms[:, 1]).bmm(network_in).chunk(2, -1)
            x = x + (F.silu(gate) * values).bmm(network_out)
        x = x.view(models, batch, count, -1)[:, :, -task.answer :].flatten(1, 2)
        return norm(x, self.last_norm).bmm(self.tokens.mT).unflatten(1, (batch, -1))


def norm(x: Tensor, scale: Tensor) -> Tensor:
    """RMSNorm of `x [models, rows, width]` by each model's `scale [models, width]`."""
    return F.rms_norm(x, x.shape[-1:]) * scale[:, None]


def truncated(weights: Tensor, rank: int) -> Tensor:
    """The nearest weights `[..., 6, 11]` of a rank."""
    u, s, vh = torch.linalg.svd(weights.cpu(), full_matrices=False)
    return ((u * s.unsqueeze(-2))[..., :rank] @ vh[..., :rank, :]).to(weights.device)
