"""Triton 3.6's interpreter with the same results in less time: what it works out again for each operation is kept."""

from __future__ import annotations

import functools
import math
from types import FunctionType

import numpy as np
import triton
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_init_block_type = tl.block_type.__init__
_alike = TritonSemantic.binary_op_type_checking_impl
_broadcast = TritonSemantic.broadcast_impl_value
_unwrap = tl.core._unwrap_if_constexpr


def make_quick() -> None:
    """Changes the interpreter of this process, if it is the one that `scripts/constraints-cpu.txt` names."""
    if triton.__version__.startswith("3.6."):
        for owner, name, quick in CHANGES:
            setattr(owner, name, quick)


def _patch_what_is_not(fn: FunctionType) -> interpreter._LangPatchScope:
    """A function that a kernel calls finds the language as the kernel's launch left it: for the interpreter."""
    if any(map(tl.core.is_builtin, [tl.tensor.__add__, *(lang.load for lang in _languages_of(fn))])):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()


@functools.cache
def _languages_of(fn: FunctionType) -> list:
    return [lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())]


def _call_with_semantic(obj, name: str, member: FunctionType, builder, scope: interpreter._LangPatchScope) -> None:
    """What `builtin` made of a function looks whether it is given a `_semantic`, and here each call is."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _unwrap_at_once(o):
    kind = type(o)
    if kind is tl.constexpr:
        return o.value
    return _unwrap(o) if kind in (list, tuple, tl.tuple) or issubclass(kind, (tuple, tl.constexpr)) else o


def _is_dtype_of_that_name(self: tl.dtype, other) -> bool:
    other = _unwrap_at_once(other)
    return self is other or (isinstance(other, tl.dtype) and self.name == other.name)


def _numpy_dtype(dtype: tl.dtype) -> np.dtype:
    return _get_np_dtype(dtype) if dtype.scalar.is_ptr() else _numpy_dtype_of_number(dtype.scalar)


@functools.cache
def _numpy_dtype_of_number(dtype: tl.dtype) -> np.dtype:
    return _get_np_dtype(dtype)


def _as_the_first_of_its_shape(self: tl.block_type, element_ty: tl.dtype, shape) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    self.__dict__.update(_members_of_block_type(element_ty.name, sizes), element_ty=element_ty)


def _init_tensor(self: tl.tensor, handle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of_tensor(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _members_of_block_type(element: str, sizes: tuple[int, ...]) -> dict:
    first = object.__new__(tl.block_type)
    _init_block_type(first, element, list(sizes))
    return vars(first)


@functools.cache
def _shape_of_tensor(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _alike_at_once(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
    """Operands of one type but for their shapes are not converted, unless halves are divided."""
    tensors = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor)
    if tensors and lhs.dtype is rhs.dtype and not div_or_mod and not lhs.dtype.is_ptr():
        return self.broadcast_impl_value(lhs, rhs)
    return _alike(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _broadcast_at_once(self, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Tensors of one shape have the same `shape`: that of `_shape_of_tensor`."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


CHANGES = [
    # It looks for overflows of integers in a dozen operations a sum, but says nothing of them without `debug`.
    (interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)),
    (interpreter, "_patch_lang", _patch_what_is_not),
    (interpreter, "_patch_attr", _call_with_semantic),
    (interpreter, "_get_np_dtype", _numpy_dtype),
    (tl.block_type, "__init__", _as_the_first_of_its_shape),
    (interpreter.TensorHandle, "__post_init__", lambda self: None),  # looks for numbers of more bits than the type
    (tl.core, "_unwrap_if_constexpr", _unwrap_at_once),
    (tl.dtype, "__eq__", _is_dtype_of_that_name),
    (tl.tensor, "__init__", _init_tensor),
    (TritonSemantic, "binary_op_type_checking_impl", _alike_at_once),
    (TritonSemantic, "broadcast_impl_value", _broadcast_at_once),
]
AS_IT_WAS = [(owner, name, getattr(owner, name)) for owner, name, _ in CHANGES]
