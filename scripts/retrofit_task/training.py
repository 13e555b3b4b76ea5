"""Pieces of a text, and the steps of a model on them: its loss on pieces that no step sees."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_task.training import learning_rate_factor

from mtabench.errors import UsageError

HELD_OUT = 64  # pieces of the text, spread over it
EVALUATIONS = 20
MIXER_RATE = 3  # learning rate of convolutions and mixings over the others' rate: they move far from the identity
MEASURED = ("dtype", "step", "train_loss", "held_out_loss", "mixers_moved", "seconds")


def split(text: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """The tokens to train on `[N]`, and the pieces held out `[pieces, seq + 1]`.

    Raises UsageError for a text of fewer than four pieces.
    """
    pieces = text[: len(text) // (seq + 1) * (seq + 1)].view(-1, seq + 1)
    if len(pieces) < 4:
        raise UsageError(f"the text has {len(text)} tokens; expected at least {4 * (seq + 1)} for --seq {seq}")
    stride = max(4, -(-len(pieces) // HELD_OUT))
    held = torch.zeros(len(pieces), dtype=torch.bool)
    held[stride // 2 :: stride] = True
    return pieces[~held].flatten(), pieces[held].long()


def train(
    model: Any, batches: Iterator[Tensor], held_out: Tensor, *, steps: int, learning_rate: float, device: str
) -> Iterator[dict[str, Any]]:
    """Train a model, and yield its losses before the first step, now and then, and after the last.

    `batches` are `[batch, seq + 1]`. The loss of training is the mean since the evaluation before, None at first.
    """
    mixers = [weight for name, weight in model.named_parameters() if ".mta." in name]
    others = [weight for name, weight in model.named_parameters() if ".mta." not in name]
    first = [weight.detach().clone() for weight in mixers]
    groups: list[dict[str, Any]] = [{"params": others, "factor": 1}, {"params": mixers, "factor": MIXER_RATE}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    started, every = time.perf_counter(), max(1, steps // EVALUATIONS)
    total, seen = torch.zeros((), device=device), 0
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            moved = [float((now.detach() - then).abs().max()) for now, then in zip(mixers, first, strict=True)]
            yield {
                "dtype": str(dtype).removeprefix("torch."), "step": step,
                "train_loss": float(total) / seen if seen else None,
                "held_out_loss": held_out_loss(model, held_out, device), "mixers_moved": max(moved, default=0.0),
                "seconds": time.perf_counter() - started,
            }  # fmt: skip
            total, seen = torch.zeros_like(total), 0
        if step == steps:
            return
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * learning_rate * learning_rate_factor(step, steps)
        loss = loss_of(model, next(batches).to(device), device)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total, seen = total + loss.detach(), seen + 1


def loss_of(model: Any, batch: Tensor, device: str) -> Tensor:
    """The mean loss of the tokens after the first of each piece, `batch [B, seq + 1]`, in nats a token."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Any, pieces: Tensor, device: str) -> float:
    """The mean loss of pieces `[pieces, seq + 1]`, eight at a time."""
    model.eval()
    losses = [loss_of(model, part.to(device), device) * len(part) for part in pieces.split(8)]
    model.train()
    return float(torch.stack(losses).sum()) / len(pieces)
