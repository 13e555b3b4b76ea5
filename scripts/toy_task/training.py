"""Trains one model on fresh sequences, and counts its wrong answers on held-out ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_task.model import Transformer
from toy_task.sequences import Setting, draw_batches, draw_sequences

HELD_OUT, HELD_OUT_SEED = 16384, 2**40
WATCHED = 2048  # of the held-out sequences, at each evaluation before the last
EVALUATIONS = 25
WARM_UP = 0.05  # of all steps
CONV_RATE = 3  # learning rate of the convolutions' weights over the others' rate
CONV_NAMES = ("conv", "mta_kernel")  # of parameters
MEASURED = ("parameters", "step", "tokens", "train_loss", "error_rate", "seconds")


class Trainer:
    """A model, its optimizer and the step that trains it.

    On a GPU the model is compiled and the step becomes one CUDA graph, as its many small kernels take longer to launch
    than to run. What a step reads and writes thus stays in place: the batch, the learning rates, the summed loss.
    """

    def __init__(self, setting: Setting, device: str) -> None:
        torch.manual_seed(setting.seed)
        self.setting, self.device = setting, device
        self.model = Transformer(setting).to(device)
        self.trained = torch.compile(self.model, fullgraph=True) if device == "cuda" else self.model
        taps, others = [], []
        for name, weight in self.model.named_parameters():
            (taps if any(part in name for part in CONV_NAMES) else others).append(weight)
        groups: list[dict[str, Any]] = [{"params": others, "factor": 1}, {"params": taps, "factor": CONV_RATE}]
        for group in groups:
            group["lr"] = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98), fused=True, capturable=device == "cuda")
        self.batch = torch.zeros(setting.batch, setting.length, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        self.advance = self.train_on_batch

    def step(self, batch: Tensor, learning_rate: float) -> None:
        """Train on `batch [B, length]` and add its loss to `loss`."""
        self.batch.copy_(batch)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(learning_rate * group["factor"])
        self.advance()

    def train_on_batch(self) -> None:
        """A step without its inputs: work of the device alone, which a graph can hold."""
        logits = self.logits(self.trained, self.batch)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, -self.setting.answer :].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss += loss.detach()

    def logits(self, model: Callable[[Tensor], Tensor], sequences: Tensor) -> Tensor:
        """`[B, answer, VOCABULARY]`, in bfloat16 on a GPU."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return model(sequences[:, :-1])

    def capture(self) -> None:
        """Make the step one CUDA graph, after some at learning rate zero that compile and allocate what it needs."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(self.batch, 0.0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.train_on_batch()
        self.advance = graph.replay
        self.forget()

    def forget(self) -> None:
        """Clear what the steps so far left in the optimizer and in the loss."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss.zero_()

    @torch.no_grad()
    def error_rate(self, sequences: Tensor) -> float:
        """The share of `sequences [B, length]` with a wrong letter in the answer.

        Each letter is predicted after the right ones before it, which finds the same answers right as letting the model
        write them.
        """
        answer = self.setting.answer
        parts = sequences.split(256)
        wrong = [(self.logits(self.model, part).argmax(-1) != part[:, -answer:]).any(1) for part in parts]
        return float(torch.cat(wrong).float().mean())


def train(setting: Setting, device: str) -> Iterator[dict[str, Any]]:
    """Train one model and yield step, tokens, loss and error rate at each evaluation."""
    started, done = time.perf_counter(), 0
    trainer = Trainer(setting, device)
    if device == "cuda":
        trainer.capture()
    held_out = draw_sequences(
        HELD_OUT, setting.blocks, setting.variant, torch.Generator(device).manual_seed(HELD_OUT_SEED)
    )
    batches = draw_batches(setting, torch.Generator(device).manual_seed(setting.seed))
    for stop in evaluation_steps(setting.steps):
        trainer.loss.zero_()
        for step in range(done, stop):
            trainer.step(next(batches), setting.learning_rate * learning_rate_factor(step, setting.steps))
        mean_loss, done = float(trainer.loss) / (stop - done), stop
        error_rate = trainer.error_rate(held_out if done == setting.steps else held_out[:WATCHED])
        yield {
            "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
            "step": done, "tokens": done * setting.batch * setting.length, "train_loss": mean_loss,
            "error_rate": error_rate, "seconds": time.perf_counter() - started,
        }  # fmt: skip


def learning_rate_factor(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to zero."""
    return min(1.0, (step + 1) / (WARM_UP * steps)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def evaluation_steps(steps: int, most: int = EVALUATIONS) -> list[int]:
    """At most so many steps, evenly spaced; the last one is `steps`."""
    count = min(most, steps)
    return [steps * (i + 1) // count for i in range(count)]
