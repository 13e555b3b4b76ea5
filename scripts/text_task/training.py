"""The text, and the steps of one model on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from text_task.model import LanguageModel, Setting
from torch import Tensor, nn
from toy_task.training import learning_rate_factor

TEXTS = ("*.md", "docs/**/*.md", "kernels/**/*.py", "mtabench/**/*.py", "tests/**/*.py")
MIXER_RATE = 3  # learning rate of convolutions and mixings over the others' rate: they move far from the identity
FLOAT32 = "float32"  # a run of the reference without bfloat16
MEASURED = ("dtype", "step", "loss", "gradient_norm", "mixers_moved", "seconds")


def read_text(root: Path) -> Tensor:
    """The bytes of the documents and sources of a checkout, one file after the other, in an order of their own."""
    files = sorted({path for pattern in TEXTS for path in root.glob(pattern)}, key=lambda path: path.relative_to(root))
    return torch.from_numpy(np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8).copy())


def draw_batches(text: Tensor, setting: Setting) -> Iterator[Tensor]:
    """Batches `[batch, seq + 1]` of pieces of the text, without end; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(setting.seed)
    while True:
        starts = torch.randint(len(text) - setting.seq, (setting.batch, 1), generator=generator)
        yield text[starts + torch.arange(setting.seq + 1)].long()


def make_model(setting: Setting, run: str, device: str) -> tuple[LanguageModel, torch.dtype]:
    """The model of a run, a backend's name or FLOAT32, and the dtype that it computes attention in.

    Raises ValueError if the backend cannot run a layer of it here.
    """
    dtype = torch.bfloat16 if device == "cuda" and run != FLOAT32 else torch.float32
    model = LanguageModel(setting, "reference" if run == FLOAT32 else run).to(device)
    q = torch.empty(1, setting.heads, 1, setting.head_dim, dtype=dtype, device=device, requires_grad=True)
    for layer in model.layers:
        layer.attention.mta.explain(q, q, q)
    return model, dtype


def train(setting: Setting, run: str, text: Tensor, device: str) -> Iterator[dict[str, Any]]:
    """Train the model of a run and yield each step's loss, before the step changes the weights."""
    model, dtype = make_model(setting, run, device)
    mixers = model.mixers()
    first = [weight.detach().clone() for weight in mixers]
    others = [weight for weight in model.parameters() if not any(weight is mixer for mixer in mixers)]
    groups: list[dict[str, Any]] = [{"params": others, "factor": 1}, {"params": mixers, "factor": MIXER_RATE}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    started, batches = time.perf_counter(), draw_batches(text, setting)
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * setting.learning_rate * learning_rate_factor(step, setting.steps)
        batch = next(batches).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        moved = max(float((now.detach() - then).abs().max()) for now, then in zip(mixers, first, strict=True))
        yield {
            "dtype": str(dtype).removeprefix("torch."), "step": step, "loss": float(loss.detach()),
            "gradient_norm": float(norm), "mixers_moved": moved, "seconds": time.perf_counter() - started,
        }  # fmt: skip
