"""What the models of one shape share, so that memory holds one of them: weights, optimizer, pages, compiled parts."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mta_kernels import torch_compile
from mta_kernels.multi_token_attention import MultiTokenAttention, multi_token_attention_reference
from mtabench.problem.case import Case
from mtabench.problem.inputs import DTYPES, use_full_float32
from mtabench.problem.layers import VOCABULARY
from mtabench.problem.operations import make_operation
from mtabench.transformer.cache import new_pages
from mtabench.transformer.model import Config, Parts, Transformer, after_attention, before_attention, loss_of

LEARNING_RATE = 3e-4
MIXER_NOISE = 0.1  # what a convolution or mixing is from the identity at first, so that no kernel gets by with that


class Shared:
    """The plain model of a shape: `base`, in float32 to be trained and else in the case's dtype, and its optimizer.

    `tokens [B, seq + 1]` are drawn. On a GPU everything but attention is compiled.
    """

    def __init__(self, case: Case, seed: int) -> None:
        use_full_float32()
        assert case.layers is not None
        self.case, self.seed, self.dtype = case, seed, DTYPES[case.dtype]
        operation = make_operation(None, "", None, heads=case.heads, head_dim=case.head_dim)
        with torch.device(case.device):
            config = Config(case.layers, case.heads, case.head_dim, operation, vocabulary=VOCABULARY)
            self.base = Transformer(config, case.seq)
        self.optimizer = adam(list(self.base.parameters())) if case.pass_ == "train" else None
        self.reset()
        if self.optimizer is None:
            self.base.to(self.dtype)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(VOCABULARY, (case.batch, case.seq + 1), generator=generator)
        self.tokens = drawn.to(case.device)
        self._parts = compiled_parts() if case.device == "cuda" and torch_compile.missing("cuda") is None else Parts()
        self._pages: Tensor | None = None

    def model(self, case: Case, backend: str, *, compiled: bool = False) -> Transformer:
        """The model of a case: these weights, and attention of its own by a backend, the same for a seed.

        With `compiled` its attention is the definition, compiled for these shapes.
        """
        config = replace(
            self.base.config, operation=case.operation, conv_every=case.conv_every, backend=backend
        )  # fmt: skip
        kept = {id(x): x for x in (*self.base.parameters(), *self.base.buffers())}
        model = copy.deepcopy(self.base, kept)
        model.config = config
        model.parts = replace(self._parts, attention=_compiled_definition()) if compiled else self._parts
        with torch.random.fork_rng(), torch.device(case.device), torch.no_grad():
            torch.manual_seed(self.seed)
            for number, layer in enumerate(model.layers):
                layer.attention.mta = config.attention(number)  # type: ignore[union-attr]
            for mixer in model.mixers():
                mixer.add_(MIXER_NOISE * torch.randn_like(mixer))
        return model

    def reset(self) -> None:
        """Set weights and optimizer to their first values, at the same addresses."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.seed)
            self.base.reset_parameters()
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def pages(self) -> Tensor:
        """Keys and values for the tokens of all sequences, random at first; models take them in turns."""
        if self._pages is None:
            size = self.case.batch, self.case.seq, self.dtype, self.base.table.device
            self._pages = new_pages(self.base.config, *size).normal_()
        return self._pages


_SHARED: WeakValueDictionary[tuple[Any, ...], Shared] = WeakValueDictionary()


def shared_of(case: Case, seed: int) -> Shared:
    """The one of a shape and seed, as long as anyone holds it."""
    key = (case.shape_key, seed)
    found = _SHARED.get(key)
    if found is None:
        found = _SHARED[key] = Shared(case, seed)
    return found


@cache
def compiled_parts() -> Parts:
    """The compiled parts of all models of this process: a shape is compiled once."""
    functions: tuple[Callable[..., Any], ...] = before_attention, after_attention, loss_of
    return Parts(*map(compiled_by_shape, functions))


def compiled_by_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose first argument is a tensor, `compiled_apart` for each shape and dtype of that."""
    made: dict[Any, Callable[..., Any]] = {}

    def call(first: Tensor, *others: Any) -> Any:
        key = first.shape, first.dtype
        if key not in made:
            made[key] = torch_compile.compiled_apart(function)
        return made[key](first, *others)

    return call


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of these parameters."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def _compiled_definition() -> Any:
    function = torch_compile.compiled_apart(multi_token_attention_reference)

    def attention(module: MultiTokenAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, **module.mixers(), depth=module.depth, scale=module.scale, pad_key=module.pad_key)

    return attention
