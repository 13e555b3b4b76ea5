"""A model's cell as a sweep needs it: whether its results are right, by a smaller model first, and what to time."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mtabench.checking.oracle import Check
from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.poison import poisoned_memory
from mtabench.measuring.timing import Timed
from mtabench.problem.case import Case
from mtabench.registry import implementation_of
from mtabench.transformer.cache import Cache
from mtabench.transformer.generation import prefill, step
from mtabench.transformer.model import Parts, Transformer
from mtabench.transformer.shared import Shared, shared_of
from mtabench.transformer.timed import timed_generation, timed_prefill, timed_training
from mtabench.transformer.training import STEPS, Training, gradients_of

CHECKED_TOKENS, CHECKED_BATCH = 512, 2
CHECKED_CHUNK = 200  # of a prompt, so that the checked ones have several
NEW_TOKENS = 3
# Errors against float64: so many times what the eager model has in the same dtype, and a floor for float32.
TIMES_EAGER, FLOOR = 3.0, 1e-5
FEW = 600  # numbers of a gradient
LOSS_TOLERANCE = 0.01


class ModelProblem:
    """The models of one shape and attention; `check` and then `timed` for each implementation, as a sweep calls them.

    The truth is the eager model in float64, of the first layers and of few tokens: one step's loss and gradients, or
    the logits of ragged prompts and of the tokens after them.
    """

    def __init__(self, case: Case, seed: int) -> None:
        assert case.layers is not None
        self._seed = seed
        self._losses: dict[str, float] = {}
        self._small = replace(
            case,
            layers=min(case.layers, max(2, case.conv_every or 1)),
            batch=min(case.batch, CHECKED_BATCH),
            seq=min(case.seq, CHECKED_TOKENS),
        )
        self._shared = Shared(self._small, seed)
        seq = self._small.seq
        after = min(NEW_TOKENS, seq - 1)
        lengths = [max(1, seq - after - sequence * seq // 3) for sequence in range(self._small.batch)]
        self._lengths, self._after = torch.tensor(lengths, device=case.device), after
        eager = self._shared.model(self._small, "reference")
        double = copy.deepcopy(eager).double()
        double.parts = Parts()  # nothing of it is compiled
        self._truth = self._of_definition(double, torch.float64)
        del double
        results = self._of_definition(eager, self._shared.dtype)
        self._eager, self._eager_whole = _errors(results, self._truth), self._whole(results)

    def check(self, case: Case) -> Check:
        """Whether an implementation's smaller model is right."""
        model = implementation_of(case).build(replace(self._small, impl=case.impl), self._shared)
        with poisoned_memory(case.device):
            results = self._of_definition(model, self._shared.dtype) if self._trains else self._with_cache(model)
        errors = _errors(results, self._truth)
        whole = self._whole(results)
        for name, result, error, eager in zip(self._names(model), results, errors, self._eager, strict=True):
            # The error of a few numbers is chance: those of a gate are held to the worst there is.
            least = max(self._eager) if 1 < result.numel() < FEW or name.endswith("bias") else self._eager_whole
            allowed = TIMES_EAGER * max(eager, least) + FLOOR
            if not error <= allowed:
                reason = (
                    f"{name} differs from the eager model in float64 by {error:.2g} of its norm, {allowed:.2g} allowed"
                )
                return Check(False, whole, allowed, reason)
        return Check(True, whole, TIMES_EAGER * self._eager_whole + FLOOR)

    def timed(self, case: Case) -> Timed:
        """What to time; raises WrongResultError if training comes to another loss than with another implementation."""
        shared = shared_of(case, self._seed)
        model = implementation_of(case).build(case, shared)
        if case.pass_ == "prefill":
            return timed_prefill(model, shared)
        if case.pass_ == "generate":
            return timed_generation(model, shared)
        training = Training(model, shared)
        loss = training.loss_after(STEPS)
        for other, its in self._losses.items():
            if not math.isclose(loss, its, rel_tol=LOSS_TOLERANCE):
                raise WrongResultError(f"the loss after {STEPS} steps is {loss:.4g}, and {its:.4g} with {other}")
        self._losses[case.impl] = loss
        return timed_training(training, loss)

    def rest(self) -> None:
        """Hold no memory of a GPU until the cells are timed."""
        del self._shared, self._truth

    def _whole(self, results: Sequence[Tensor]) -> float:
        """The relative error of all gradients, or of all logits, as one."""
        first = 1 if self._trains else 0
        return _whole(results[first:], self._truth[first:])

    @property
    def _trains(self) -> bool:
        return self._small.pass_ == "train"

    def _names(self, model: Transformer) -> list[str]:
        if self._trains:
            return ["the loss", *(f"the gradient of {name}" for name, _ in model.named_parameters())]
        return ["the logits after the prompts", *(f"the logits of token {n + 1}" for n in range(self._after))]

    def _of_definition(self, model: Transformer, dtype: torch.dtype) -> list[Tensor]:
        """Loss and gradients of a step; or all logits without a cache, those that are compared."""
        tokens = self._shared.tokens
        if self._trains:
            return gradients_of(model, tokens, dtype)
        with torch.no_grad():
            logits = model(tokens[:, :-1])
        sequence = torch.arange(len(tokens), device=tokens.device)
        return [logits[sequence, self._lengths - 1 + after] for after in range(self._after + 1)]

    def _with_cache(self, model: Transformer) -> list[Tensor]:
        """The same logits: the prompts in chunks, then the tokens one after the other."""
        tokens = self._shared.tokens
        cache = Cache(model, len(tokens), self._small.seq, self._shared.dtype)
        logits = [prefill(model, cache, tokens[:, :-1], self._lengths, CHECKED_CHUNK)]
        sequence = torch.arange(len(tokens), device=tokens.device)
        for after in range(self._after):
            logits.append(step(model, cache, tokens[sequence, self._lengths + after]))
        return logits


def _errors(results: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Of each result the norm of its error over that of the truth."""
    pairs = zip(results, truth, strict=True)
    return [float((x.double() - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs]


def _whole(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The same of all as one."""
    pairs = list(zip(results, truth, strict=True))
    wrong = sum(float((x.double() - y).square().sum()) for x, y in pairs)
    return math.sqrt(wrong / sum(float(y.square().sum()) for _, y in pairs))
