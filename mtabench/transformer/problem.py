"""A model's cell as a sweep needs it: whether its results are right, by a smaller model first, and what to time.

Timed are a training step, prompts, or a token of each sequence; and attention alone.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtabench.checking.oracle import Check
from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.poison import poisoned_memory
from mtabench.measuring.timing import Timed, Watch
from mtabench.problem.case import Case
from mtabench.problem.layers import ragged_lengths
from mtabench.registry import implementation_of
from mtabench.transformer.cache import CHUNK, Cache, prefill, step
from mtabench.transformer.model import Parts, Transformer, plain_attention
from mtabench.transformer.shared import Shared, adam, shared_of

STEPS = 8  # that the loss of a cell is taken after, all on one batch
# Of plain attention, the fastest first: a model that is compared with must not be slow.
PLAIN = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
]  # fmt: skip
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the last result with the first, which is of the same call
CHECKED_TOKENS, CHECKED_BATCH = 512, 2
CHECKED_CHUNK = 200  # of a prompt, so that the checked ones have several
NEW_TOKENS = 3
# Errors against float64: so many times what the eager model has in the same dtype, and a floor for float32.
TIMES_EAGER, FLOOR = 3.0, 1e-5
FEW = 600  # numbers of a gradient
LOSS_TOLERANCE = 0.01


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
        """Make all weights what they were at the beginning."""
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


class Results(Watch):
    """Judges results of timed calls by a function that says what is wrong with one."""

    def __init__(self, fault: Callable[[Tensor], str]) -> None:
        self._fault = fault
        self._results: Sequence[Tensor] = []

    def look(self, results: Sequence[Tensor]) -> None:
        """See `Watch`."""
        self._results = results[-1:]

    @torch.no_grad()
    def end(self, judged: bool = False) -> None:
        """See `Watch`."""
        results, self._results = self._results, []
        for result in results if judged else ():
            if reason := self._fault(result):
                raise WrongResultError(reason)
            result.fill_(math.nan)  # a call that writes nothing does not find a right one in its memory


def timed_training(training: Training, loss: float) -> Timed:
    """A step with all that belongs to it. Losses must be finite, and the first ones the same again at the end."""
    model, case, dtype = training.model, training.shared.case, training.shared.dtype

    def not_finite(result: Tensor) -> str:
        return "" if torch.isfinite(result) else "the loss of a timed step is not finite"

    def confirm() -> str:
        again = training.loss_after(STEPS)
        if not math.isclose(again, loss, rel_tol=1e-2):
            return f"the loss after {STEPS} steps was {loss:.4g} at first and is {again:.4g} after timing"
        return ""

    shape = case.batch, case.heads, case.seq, case.head_dim
    inputs = [torch.randn(shape, dtype=dtype, device=case.device, requires_grad=True) for _ in range(3)]
    dout = torch.randn(shape, dtype=dtype, device=case.device)

    def attention() -> None:
        for mta in model.attentions():
            with autocast(case.device, dtype):
                out = plain_attention(*inputs) if mta is None else model.parts.attention(mta, *inputs)
            torch.autograd.grad(out, [*inputs, *([] if mta is None else mta.parameters())], dout)

    return Timed(
        run=_with_fast_plain(case.device, training.step), watch=Results(not_finite), confirm=confirm, loss=loss,
        attention=Timed(run=_with_fast_plain(case.device, attention)),
    )  # fmt: skip


def timed_prefill(model: Transformer, shared: Shared) -> Timed:
    """All prompts of a batch into an empty cache, in chunks, to the logits after the last token of each."""
    case = shared.case
    cache = Cache(model, case.batch, case.seq, shared.dtype, shared.pages())
    prompts = shared.tokens[:, : case.seq]
    lengths = torch.full((case.batch,), case.seq, dtype=torch.int32, device=case.device)
    size = case.batch, case.heads, min(CHUNK, case.seq), case.head_dim
    inputs = torch.randn(3, *size, dtype=shared.dtype, device=case.device)

    @torch.no_grad()
    def attention() -> None:
        cache.begin(lengths)
        for start in range(0, case.seq, CHUNK):
            count = min(CHUNK, case.seq - start)
            for layer, mta in enumerate(model.attentions()):
                cache.attend(layer, mta, *inputs[:, :, :, :count])
            cache.start += count

    return _as_at_first(shared, lambda: prefill(model, cache, prompts, lengths), attention)


def timed_generation(model: Transformer, shared: Shared) -> Timed:
    """A token of each sequence, of lengths from `seq` down to half of it, the cache being full of random numbers."""
    case = shared.case
    cache = Cache(model, case.batch, case.seq, shared.dtype, shared.pages())
    lengths = torch.tensor(ragged_lengths(case.batch, case.seq), dtype=torch.int32, device=case.device) - 1
    queries = cache.queries.normal_().clone()
    for state in cache.states.values():
        state.logits.normal_()
        state.logsumexp.fill_(math.log(case.seq) + 0.5)
        state.lengths.copy_(lengths)
    cache.decoding = True
    tokens = shared.tokens[:, 0]
    inputs = torch.randn(3, case.batch, case.heads, 1, case.head_dim, dtype=shared.dtype, device=case.device)

    def back() -> None:
        """Go back to before the step, which may then be repeated."""
        cache.lengths.copy_(lengths)
        if queries.numel():
            cache.queries.copy_(queries)

    def generate() -> Tensor:
        back()
        return step(model, cache, tokens)

    @torch.no_grad()
    def attention() -> None:
        back()
        cache.advance()
        for layer, mta in enumerate(model.attentions()):
            cache.attend(layer, mta, *inputs)

    return _as_at_first(shared, generate, attention, graph=case.device == "cuda")


def _as_at_first(
    shared: Shared, call: Callable[[], Tensor], attention: Callable[[], None], graph: bool = False
) -> Timed:
    """A call whose results must be the first one's; with `graph` it is replayed as a CUDA graph."""
    first = call()

    def other(result: Tensor) -> str:
        error = float((result.double() - first.double()).norm() / first.double().norm())
        if error <= AGREEMENT[shared.dtype]:
            return ""
        return f"the logits of a timed call differ from those of the first by {error:.2g} of their norm"

    def made(one: Callable[[], Any], **more: Any) -> Timed:
        run = _with_fast_plain(shared.case.device, one)
        return Timed(run=run, rotations=(lambda: [lambda: run(None)]) if graph else None, **more)

    return made(call, watch=Results(other), attention=made(attention))


def _with_fast_plain(device: str, call: Callable[[], Any]) -> Callable[[Any], Any]:
    """The call, given nothing of use, with the fastest of PyTorch's plain attention on a GPU."""

    def run(_: Any) -> Any:
        context: AbstractContextManager[Any] = nullcontext()
        if device == "cuda":
            context = sdpa_kernel(PLAIN, set_priority=True)
        with context:
            return call()

    return run


class ModelProblem:
    """The models of one shape and attention; `check` and then `timed` for each implementation, as a sweep calls them.

    The truth is the eager model in float64, of the first layers and of few tokens. It gives one step's loss and
    gradients, or the logits of ragged prompts and the tokens after them.
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
            # The error of a few numbers is chance: a gate's is held to the worst there is.
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
    """Of each result the norm of its error over the truth's norm."""
    pairs = zip(results, truth, strict=True)
    return [float((x.double() - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs]


def _whole(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The same of all as one."""
    pairs = list(zip(results, truth, strict=True))
    wrong = sum(float((x.double() - y).square().sum()) for x, y in pairs)
    return math.sqrt(wrong / sum(float(y.square().sum()) for _, y in pairs))
