"""Training steps of a model that shares its weights with others of its shape."""

import torch
from torch import Tensor

from mtabench.transformer.model import Transformer
from mtabench.transformer.shared import Shared, adam

STEPS = 8  # that the loss of a cell is taken after, all on one batch


def gradients_of(model: Transformer, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Loss and gradients of all parameters, in their order; in 16 bits by autocast."""
    with autocast(tokens.device.type, dtype):
        loss = model.loss(tokens)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def autocast(device: str, dtype: torch.dtype) -> torch.autocast:
    """The context in which a model of float32 weights computes in `dtype`."""
    return torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16)


class Training:
    """Steps of one model on one batch: forward, backward, AdamW."""

    def __init__(self, model: Transformer, shared: Shared) -> None:
        self.model, self.shared = model, shared
        common = {id(x) for x in shared.base.parameters()}
        self._own = [x for x in model.parameters() if id(x) not in common]
        self._first = [x.detach().clone() for x in self._own]
        assert shared.optimizer is not None
        self._optimizers = [shared.optimizer, *([adam(self._own)] if self._own else [])]

    def step(self) -> Tensor:
        """One step; the loss before it, a 0-d tensor."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        with autocast(self.shared.case.device, self.shared.dtype):
            loss = self.model.loss(self.shared.tokens)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def reset(self) -> None:
        """Make all weights those of the beginning."""
        self.shared.reset()
        for now, first in zip(self._own, self._first, strict=True):
            now.copy_(first)
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def loss_after(self, steps: int) -> float:
        """The loss after so many steps from the beginning."""
        self.reset()
        for _ in range(steps):
            self.step()
        return float(self.step())
