"""From a person's function or object to an implementation that is verified, timed and drawn like any other.

docs/your-kernel.md says what it may be. What is not as it says raises UsageError before anything is measured.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mtabench.errors import UnsupportedError, UsageError
from mtabench.implementations import Closure, Implementation
from mtabench.implementations._calls import lengths_of, weight_of
from mtabench.implementations._user_code import Loaded, line_in, was_raised_in
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from torch import Tensor

    from mtabench.problem.inputs import Inputs

FORWARD, DECODE = ("causal", "scale"), ("scale",)
OF_CACHE = ("lengths", "block_table")  # what a decode step may take besides
USUAL_WORK = "tiled"
REFUSALS = (NotImplementedError, ValueError, AssertionError)
WORKS = ("dense", "tiled", "staged", "expanded", "banded", "overlapped")


def implementation_from(loaded: Loaded) -> Implementation:
    """The implementation that a function or object stands for; raises UsageError for what is neither."""
    if isinstance(loaded.value, type):
        raise UsageError(
            f"{loaded.words} is a class; expected a function or an object: add a line such as "
            f"`my_kernel = {loaded.value.__name__}()` behind the class, and name my_kernel"
        )
    value, decode = loaded.value, _method(loaded, "decode")
    if not callable(value) and decode is None:
        raise UsageError(
            f"{loaded.words} is {_kind(value)}; expected a function (q, k, v, weight, *, causal, scale) -> out"
        )
    convolves = []
    if callable(value):
        convolves.append(_takes_weight(loaded, value, "", ("q", "k", "v"), FORWARD))
    if decode is not None:
        convolves.append(_takes_weight(loaded, decode, ".decode", ("q", "k", "v"), DECODE, optional=OF_CACHE))
    if len(set(convolves)) > 1:
        raise UsageError(f"{loaded.words} takes a weight in one of forward and decode; expected both, or neither")
    backward, conv = _method(loaded, "backward"), convolves[0]
    if backward is not None:
        _check_backward(loaded, backward, conv)
    passes = (*(("fwd", "bwd") if callable(value) else ()), *(("decode",) if decode is not None else ()))
    # Plain attention is measured once, whatever the pages of what is compared with it.
    pages = conv and decode is not None and "block_table" in inspect.signature(decode).parameters
    why_not = functools.partial(_why_not, loaded, _method(loaded, "unsupported"))
    # Triton's interpreter would be busy with long shapes for hours.
    interpreted = any(type(value).__name__ == "InterpretedFunction" for value in vars(loaded.module).values())
    return Implementation(
        name=loaded.name, op="conv-attention" if conv else "attention", passes=passes, devices=("cuda", "cpu"),
        work=_work(loaded), summary=f"{loaded.typed}, of your own", by_name=True, compiles=True,
        pages=pages,
        build=functools.partial(_build, loaded, backward, decode), why_not=why_not,
        interpreted=why_not if interpreted else None, within=loaded.settings,
    )  # fmt: skip


def _method(loaded: Loaded, name: str) -> Callable[..., Any] | None:
    """An optional attribute that can be called; raises UsageError for one that cannot."""
    found = getattr(loaded.value, name, None)
    if found is not None and not callable(found):
        raise UsageError(f"{loaded.words}: its {name} is {_kind(found)}; expected a function")
    return found


def _work(loaded: Loaded) -> str:
    work = getattr(loaded.value, "work", USUAL_WORK)
    if work not in WORKS:
        raise UsageError(f"{loaded.words}: its work is {work!r}; expected one of {', '.join(WORKS)}")
    return work


def _parameters(loaded: Loaded, function: Callable[..., Any], part: str) -> inspect.Signature:
    try:
        # A module is called through a function of any arguments: what it takes is what its forward takes.
        return inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):
        raise UsageError(
            f"{loaded.words}{part} does not say what it takes; expected a Python function that calls it"
        ) from None


def _takes_weight(
    loaded: Loaded, function: Callable[..., Any], part: str, tensors: tuple[str, ...], keywords: tuple[str, ...],
    optional: tuple[str, ...] = (),
) -> bool:  # fmt: skip
    """Whether a function takes a weight of the convolution; raises UsageError if it cannot be called as described."""
    signature = _parameters(loaded, function, part)
    conv = "weight" in signature.parameters
    positional = (*tensors, "weight") if conv else tensors
    named = (*keywords, *(name for name in optional if name in signature.parameters))
    try:
        _check_places(signature.bind(*positional, **dict.fromkeys(named)), positional)
    except TypeError as error:
        call = ", ".join((*tensors, "weight", "*", *optional, *keywords))
        raise UsageError(
            f"{loaded.words}{part} takes {signature}, {error}; expected ({call}), or without weight for plain attention"
        ) from None
    return conv


def _check_places(bound: inspect.BoundArguments, names: tuple[str, ...]) -> None:
    """Raise TypeError if a parameter has the name of one of these and would get another of them."""
    for name in names:
        if (given := bound.arguments.get(name, name)) != name:
            raise TypeError(f"{given} comes where it has {name}")


def _check_backward(loaded: Loaded, backward: Callable[..., Any], conv: bool) -> None:
    signature = _parameters(loaded, backward, ".backward")
    tensors = ("dout", "q", "k", "v", *(["weight"] if conv else []), "out")
    try:
        _check_places(signature.bind_partial(*tensors, **dict.fromkeys(FORWARD)), tensors)
    except TypeError as error:
        raise UsageError(
            f"{loaded.words}.backward takes {signature}, {error}; expected ({', '.join(tensors)}, *saved, causal, "
            "scale), saved being what the function returns behind out"
        ) from None


def _why_not(loaded: Loaded, unsupported: Callable[..., Any] | None, case: Case) -> str | None:
    """What the person's `unsupported` says of a case; it takes any of these by keyword."""
    if unsupported is None:
        return None
    from mtabench.problem.inputs import DTYPES

    facts = {
        "pass_": case.pass_, "device": case.device, "dtype": DTYPES[case.dtype], "batch": case.batch,
        "heads": case.heads, "kv_heads": case.kv_heads, "seq": case.seq, "head_dim": case.head_dim,
        "taps": case.conv.taps, "causal": case.operation.causal,
    }  # fmt: skip
    wanted = inspect.signature(unsupported).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values()):
        if unknown := [name for name in wanted if name not in facts]:
            raise UsageError(f"{loaded.words}.unsupported asks for {unknown[0]}; it may ask for {', '.join(facts)}")
        facts = {name: facts[name] for name in wanted}
    try:
        with loaded.settings():
            reason = unsupported(**facts)
    except (Exception, SystemExit) as error:
        where = line_in(error, loaded.file)
        raise UsageError(
            f"{loaded.words}.unsupported raised {type(error).__name__}: {error}{f' ({where})' * bool(where)}"
        ) from error
    return str(reason) if reason else None


def _build(
    loaded: Loaded, backward: Callable[..., Any] | None, decode: Callable[..., Any] | None, case: Case, inputs: Inputs
) -> Closure:
    """The function over the inputs of a case."""
    conv, scale = case.op != "attention", case.operation.scale
    causal = case.operation.causal
    weight = (weight_of(inputs),) if conv else ()
    if case.pass_ == "decode":
        assert decode is not None
        inputs = inputs.given_to(case)
        q = inputs.q if conv else inputs.q[:, :, -1:]
        of_cache = {"lengths": lengths_of(inputs), "block_table": inputs.block_table}
        wanted = inspect.signature(decode).parameters
        options: dict[str, Any] = {"scale": scale} | {name: of_cache[name] for name in OF_CACHE if name in wanted}
        return lambda: _only(loaded, _call(loaded, decode, q, inputs.k, inputs.v, *weight, **options))
    tensors = (inputs.q, inputs.k, inputs.v, *weight)
    options = {"causal": causal, "scale": scale}
    if case.pass_ == "fwd":
        return lambda: _only(loaded, _call(loaded, loaded.value, *tensors, **options), saves=backward is not None)
    if backward is not None:
        gradients = functools.partial(_call, loaded, backward)
        forward = functools.partial(_call, loaded, loaded.value)
        return lambda: _with_backward().apply(loaded, forward, gradients, options, *tensors)

    def differentiable() -> Tensor:
        out = _only(loaded, _call(loaded, loaded.value, *tensors, **options))
        if not out.requires_grad:
            raise UnsupportedError(
                f"{loaded.name} has no backward: autograd finds no way from its output to its inputs; "
                "give it an attribute `backward`, or compute by differentiable operations"
            )
        return out

    return differentiable


def _call(loaded: Loaded, function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """Call a person's function under its own settings; an error says in a note at which of the person's lines.

    Raises UnsupportedError for what the function refuses: an error of REFUSALS that one of its own lines raises.
    """
    try:
        with loaded.settings():  # of what is timed, they are made before
            return function(*tensors, **options)
    except SystemExit as error:
        ended = RuntimeError(f"it calls sys.exit({error.code})")
        _note_place(ended, line_in(error, loaded.file))
        raise ended from None
    except Exception as error:
        place = line_in(error, loaded.file)
        if isinstance(error, REFUSALS) and was_raised_in(error, loaded.file):
            raise UnsupportedError(f"{loaded.name} refuses it: {' '.join(str(error).split()) or place}") from error
        _note_place(error, place)
        raise


def _note_place(error: Exception, place: str) -> None:
    if place:
        error.add_note(place)


@functools.cache
def _tensor() -> type[Tensor]:
    """Torch's, imported once: the check of a result runs within every call that is timed."""
    from torch import Tensor

    return Tensor


def _only(loaded: Loaded, result: Any, saves: bool = False) -> Tensor:
    """The output, without what is saved for a backward of its own; raises TypeError for anything else."""
    if isinstance(result, _tensor()):
        return result
    if saves and isinstance(result, Sequence) and result and isinstance(result[0], _tensor()):
        return result[0]
    several = isinstance(result, Sequence) and not saves
    more = "; only a function with a `backward` may return more than it" if several else ""
    raise TypeError(f"{loaded.name} returns {_kind(result)}; expected the output, a tensor{more}")


@functools.cache
def _with_backward() -> Any:
    """A function of autograd's, made of a forward and a backward that a person wrote."""
    import torch

    class WithBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loaded: Loaded, forward: Any, backward: Any, options: Any, *tensors: Tensor) -> Tensor:
            result = forward(*tensors, **options)
            out = _only(loaded, result, saves=True)
            ctx.save_for_backward(*tensors, out)
            ctx.rest = loaded, backward, options, () if result is out else tuple(result[1:])
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            loaded, backward, options, saved = ctx.rest
            *tensors, out = ctx.saved_tensors
            gradients = backward(dout, *tensors, out, *saved, **options)
            names = ("dq", "dk", "dv", "dweight")[: len(tensors)]
            if not isinstance(gradients, Sequence) or len(gradients) != len(names):
                raise TypeError(
                    f"the backward of {loaded.name} returns {_kind(gradients)}; expected {', '.join(names)}"
                )
            for name, gradient in zip(names, gradients, strict=True):
                if not isinstance(gradient, _tensor()):
                    raise TypeError(f"the backward of {loaded.name} returns {_kind(gradient)} as {name}, not a tensor")
            return None, None, None, None, *gradients

    return WithBackward


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}"
