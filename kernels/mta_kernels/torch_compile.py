"""torch.compile where it is told for which shapes: whether it can work here, and a function compiled by itself."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def missing(device: str) -> str | None:
    """What torch.compile lacks on this machine for "cuda" or "cpu", in words, or None."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name):
        return "torch.compile needs a C++ compiler (g++, clang++, or the one that CXX names), and there is none"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "torch.compile needs Python.h, which this Python lacks (a package such as python3-dev has it)"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton on a GPU, and it is not installed"
    return None


def compiled_apart(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """`function` compiled for the shapes of its first call; the next call of this gives one for other shapes.

    torch.compile gives up on a code object that it has compiled for eight shapes: each of these has its own.
    """
    assert isinstance(function, types.FunctionType)
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False, fullgraph=fullgraph)


def cached_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which computes once for each arguments, and whose result is a constant to torch.compile."""
    cached = functools.cache(function)

    @constant_when_compiled
    @functools.wraps(function)
    def compute(*arguments: Any) -> Any:
        return cached(*arguments)

    return compute


def constant_when_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.assume_constant_result, which imports all of torch._dynamo: two seconds of every start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def statically_true(condition: Any) -> bool:
    """Whether a condition on sizes holds; False in a compiler that does not know them, found without a guard."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)
