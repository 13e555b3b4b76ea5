"""What is timed of a model: a training step, prompts, or a token of each sequence; and attention alone."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.timing import Timed, Watch
from mtabench.problem.layers import ragged_lengths
from mtabench.transformer.cache import Cache
from mtabench.transformer.generation import CHUNK, prefill, step
from mtabench.transformer.model import Transformer, plain_attention
from mtabench.transformer.shared import Shared
from mtabench.transformer.training import STEPS, Training, autocast

# Of plain attention, the fastest first: a model that is compared with must not be slow.
PLAIN = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
]  # fmt: skip
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the last result with the first, which is of the same call


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
    """A step with all that belongs to it. Losses must be finite, those of the first steps the same again at the end."""
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
