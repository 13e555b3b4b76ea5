"""Triton 3.6's interpreter with the same results in less time: what it works out again for each operation is kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Container
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
_dot = TritonSemantic.dot
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


_dots: dict[tuple, tl.block_type] = {}


def _dot_at_once(self, lhs, rhs, acc, input_precision, max_num_imprecise_acc, out_dtype):
    """Operands and a sum of types that met before are not checked again; the interpreter knows one precision."""
    if acc is None or lhs.dtype.name not in NUMBERS:
        return _dot(self, lhs, rhs, acc, input_precision, max_num_imprecise_acc, out_dtype)
    handles = [x.handle for x in (lhs, rhs, acc)]
    met = (out_dtype.name, *(x.dtype.name for x in (lhs, rhs, acc)), *(x.data.shape for x in handles))
    if met in _dots:
        return tl.tensor(self.builder.create_dot(*handles, input_precision, max_num_imprecise_acc), _dots[met])
    found = _dot(self, lhs, rhs, acc, input_precision, max_num_imprecise_acc, out_dtype)
    _dots[met] = found.type
    return found


ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply"}
COMPARISONS = {
    "less_than": "less", "less_equal": "less_equal", "greater_than": "greater", "greater_equal": "greater_equal",
    "equal": "equal", "not_equal": "not_equal",
}  # fmt: skip
NUMBERS = {"int32": np.int32, "int64": np.int64, "fp16": np.float16, "fp32": np.float32}


@functools.cache
def _block_of(element: tl.dtype, sizes: tuple[int, ...]) -> tl.block_type:
    return tl.block_type(element, sizes)


def _of_one_type(name: str, compute: np.ufunc, numbers: Container[str], result: tl.dtype | None = None) -> tuple:
    """Arithmetic of two tensors of one type of `numbers`, or of one and a number that its type holds: NumPy does it.

    The result has the type of both or `result`.
    """
    slowly = getattr(TritonSemantic, name)

    def quickly(self, lhs, rhs, *others):
        if type(lhs) is not tl.tensor or lhs.dtype.name not in numbers:
            return slowly(self, lhs, rhs, *others)
        if type(rhs) is tl.tensor and rhs.dtype.name == lhs.dtype.name:
            right, in_blocks = rhs.handle.data, lhs.type.is_block() or rhs.type.is_block()
        elif type(rhs) is (float if lhs.dtype.is_floating() else int) and abs(rhs) < 2**31:
            right, in_blocks = np.array([rhs], dtype=NUMBERS[lhs.dtype.name]), lhs.type.is_block()
        else:
            return slowly(self, lhs, rhs, *others)
        data = compute(lhs.handle.data, right)
        element = result or lhs.dtype
        handle = interpreter.TensorHandle(data, lhs.dtype)
        return tl.tensor(handle, _block_of(element, data.shape) if in_blocks else element)

    return TritonSemantic, name, quickly


CHANGES = [
    *(_of_one_type(name, getattr(np, compute), NUMBERS) for name, compute in ARITHMETIC.items()),
    *(_of_one_type(name, getattr(np, compute), NUMBERS, tl.int1) for name, compute in COMPARISONS.items()),
    _of_one_type("and_", np.bitwise_and, ("int1",)),
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
    (TritonSemantic, "dot", _dot_at_once),
]
AS_IT_WAS = [(owner, name, getattr(owner, name)) for owner, name, _ in CHANGES]
