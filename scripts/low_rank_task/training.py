"""Trains models side by side, each on the sequences of its seed and query, and measures them on held-out ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from low_rank_task.models import FACTORS, FULL, Member, Models, Task, truncated
from retrofit_task.training import split
from text_task.training import draw_batches, read_text
from torch import Tensor
from toy_task.sequences import BLOCK, DRAWN, MARK, draw_sequences
from toy_task.training import HELD_OUT_SEED, Trainer, evaluation_steps, learning_rate_factor

import mtabench
from mta_kernels import torch_compile

EVALUATIONS = 16
TRAINED = 0.8  # share of the time that goes to training steps
MEASURED = (
    "steps", "step", "seconds", "train_loss", "held_out_loss", "error_rate", "singular_values", "truncated"
)  # fmt: skip
TIMED = 3  # steps, which say how many there is time for


class SideBySide(Trainer):
    """A Trainer of many models, whose step is that of each alone: own loss, own gradient norm."""

    def __init__(self, task: Task, members: list[Member], device: str) -> None:
        self.task, self.device = task, device
        self.model = Models(task, members).to(device)
        can_compile = device == "cuda" and not torch_compile.missing(device)
        self.trained = torch.compile(self.model, fullgraph=True, dynamic=False) if can_compile else self.model
        self.parameters = list(self.model.parameters())
        groups = [{"params": self.parameters, "factor": 1, "lr": torch.zeros((), device=device)}]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98), fused=True, capturable=device == "cuda")
        self.streams = streams_of(members)
        own = [self.streams.index((member.query, member.seed)) for member in members]
        self.own_stream = torch.tensor(own, device=device)
        self.batch = torch.zeros(len(self.streams), task.batch, task.seq, dtype=torch.long, device=device)
        self.loss = torch.zeros(len(members), device=device)
        self.advance = self.train_on_batch

    def train_on_batch(self) -> None:
        """A step without its inputs, as `Trainer`'s."""
        losses, _ = self.measured(self.trained, self.batch)
        self.optimizer.zero_grad()
        losses.sum().backward()
        gradients = [weight.grad for weight in self.parameters]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        for gradient in gradients:
            gradient *= (1 / (norms + 1e-6)).clamp(max=1).view(-1, *[1] * (gradient.dim() - 1))
        self.optimizer.step()
        self.loss += losses.detach()

    def measured(self, model: Any, sequences: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """Each model's loss and its share of sequences with a wrong token, `[models]`, on `[streams, B, seq]`."""
        sequences = sequences[self.own_stream]
        targets = sequences[..., -self.task.answer :]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = model(sequences[..., :-1], *weights).float()
        losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
        return losses.view(len(logits), -1).mean(1), (logits.argmax(-1) != targets).any(-1).float().mean(1)

    @torch.no_grad()
    def evaluate(self, sequences: Tensor, rank: int | None = None) -> list[list[float]]:
        """Loss and share of wrong sequences, a pair a model, perhaps with all convolutions truncated to a rank."""
        weights = () if rank is None else (truncated(self.model.weights(), rank),)
        parts = [torch.stack(self.measured(self.model, part, *weights)) for part in sequences.split(self.task.batch, 1)]
        return torch.stack(parts).mean(0).T.tolist()

    def seconds_a_step(self) -> float:
        """What a step takes; at learning rate zero, so that nothing is left of it."""
        started = time.perf_counter()
        for _ in range(TIMED):
            self.step(self.batch, 0.0)
        self.loss.tolist()  # waits for the device
        self.forget()
        return (time.perf_counter() - started) / TIMED


def streams_of(members: list[Member]) -> list[tuple[int, int]]:
    """Query and seed of each stream of sequences."""
    return sorted({(member.query, member.seed) for member in members})


def toy_sequences(task: Task, count: int, query: int, generator: torch.Generator) -> Tensor:
    """`[count, seq]` of the toy task; short queries have more marks before the first block."""
    blocks = (task.seq - 2 * BLOCK) // (BLOCK + 1)
    return F.pad(draw_sequences(count, blocks, "all", generator, query), (BLOCK - query, 0), value=MARK)


def toy_batches(task: Task, query: int, seed: int, device: str) -> Iterator[Tensor]:
    """Batches `[B, seq]` of fresh sequences, without end."""
    generator = torch.Generator(device).manual_seed(seed)
    while True:
        yield from toy_sequences(task, DRAWN * task.batch, query, generator).split(task.batch)


def data(task: Task, streams: list[tuple[int, int]], device: str) -> tuple[list[Iterator[Tensor]], Tensor]:
    """The batches of each stream, and held-out sequences `[streams, count, seq]`, a multiple of the batch."""
    if task.task == "toy":
        batches = [toy_batches(task, query, seed, device) for query, seed in streams]
        held = {
            query: toy_sequences(task, task.held_out, query, torch.Generator(device).manual_seed(HELD_OUT_SEED))
            for query, _ in streams
        }
        return batches, torch.stack([held[query] for query, _ in streams])
    to_train, pieces = split(read_text(Path(mtabench.__file__).parents[1]), task.seq - 1)
    drawn = {"seq": task.seq - 1, "batch": task.batch}
    batches = [draw_batches(to_train, SimpleNamespace(seed=seed, **drawn)) for _, seed in streams]
    pieces = pieces[: task.held_out]
    return batches, pieces.to(device).expand(len(streams), -1, -1)


def train(task: Task, members: list[Member], device: str, until: float) -> Iterator[dict[str, Any]]:
    """Train all members until about `time.perf_counter() == until`, and yield a row a member at each evaluation.

    After the last step full weights have singular values, those of a head after those of another, and then a row for
    each rank that they are truncated to.
    """
    started, done = time.perf_counter(), 0
    trainer = SideBySide(task, members, device)
    if device == "cuda":
        trainer.capture()
    batches, held_out = data(task, trainer.streams, device)
    a_step = trainer.seconds_a_step()
    steps = max(1, min(task.steps, int(TRAINED * (until - time.perf_counter()) / a_step)))
    full = [index for index, member in enumerate(members) if member.rank == FULL]
    for stop in evaluation_steps(steps, EVALUATIONS):
        trainer.loss.zero_()
        for step in range(done, stop):
            batch = torch.stack([next(stream) for stream in batches])
            trainer.step(batch, task.learning_rate * learning_rate_factor(step, steps))
        train_losses, done = (trainer.loss / (stop - done)).tolist(), stop
        measured = trainer.evaluate(held_out if done == steps else held_out[:, : task.held_out // 8])
        where = {"steps": steps, "step": done, "seconds": time.perf_counter() - started}
        rows = [
            asdict(member) | where | {"train_loss": train_loss, "held_out_loss": loss, "error_rate": error}
            for member, train_loss, (loss, error) in zip(members, train_losses, measured, strict=True)
        ]
        if done == steps:
            singular_values = torch.linalg.svdvals(trainer.model.weights().detach().cpu())
            for index in full:
                heads = singular_values[index].flatten(0, 1).tolist()
                rows[index]["singular_values"] = "; ".join(" ".join(f"{x:.3g}" for x in head) for head in heads)
        yield from rows
    for rank in range(1, FACTORS + 1):
        measured = trainer.evaluate(held_out, rank)
        for index in full:
            loss, error = measured[index]
            yield asdict(members[index]) | where | {"held_out_loss": loss, "error_rate": error, "truncated": rank}
