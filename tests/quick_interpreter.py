"""Triton 3.6's interpreter with the same results in less time: NumPy computes what needs no look at types.

Operators of tensors whose types met before are a call of NumPy each. All others are Triton's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import triton
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

NUMBERS = {"int1": np.bool_, "int32": np.int32, "int64": np.int64, "fp16": np.float16, "fp32": np.float32}
SCALARS = {int: tl.int32, float: tl.float32}  # Triton's types of numbers of Python, within bounds
SEMANTIC = TritonSemantic(interpreter.interpreter_builder)

_patch_lang = interpreter._patch_lang
_call_device_function = InterpretedFunction.__call__
_unwrap = tl.core._unwrap_if_constexpr
_to_tensor = TritonSemantic.to_tensor
_scalar_constant = TritonSemantic.scalar_constant
_cast = TritonSemantic.cast
_splat = TritonSemantic.splat
_where = TritonSemantic.where
_load = TritonSemantic._load_legacy
_store = TritonSemantic._store_legacy
_init_block_type = tl.block_type.__init__


def make_quick() -> None:
    """Changes the interpreter of this process, if it is the one that `scripts/constraints-cpu.txt` names."""
    if triton.__version__.startswith("3.6."):
        tl.tensor.__getattr__ = _shape_of_tensor  # of those without a `shape`
        for owner, name, quick in CHANGES:
            setattr(owner, name, quick)


# Tensors and their types.


def _init_handle(self: TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
    """Does not look for numbers of more bits than the type."""
    self.data, self.dtype = data, dtype


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _shape_of_tensor(self: tl.tensor, name: str) -> Any:
    """Computed on demand: the interpreter needs the shapes of few tensors."""
    if name not in ("shape", "numel"):
        raise AttributeError(name)
    sizes = self.type.shape if self.type.is_block() else ()
    self.shape, self.numel = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
    return getattr(self, name)


def _init_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    self.__dict__.update(_members_of_block_type(element_ty.name, sizes), element_ty=element_ty)


@functools.cache
def _members_of_block_type(element: str, sizes: tuple[int, ...]) -> dict:
    first = object.__new__(tl.block_type)
    _init_block_type(first, element, list(sizes))
    return vars(first)


_blocks: dict[tuple, tl.block_type] = {}


def _tensor(data: np.ndarray, element: tl.dtype, in_blocks: bool, of_handle: tl.dtype | None = None) -> tl.tensor:
    made = object.__new__(tl.tensor)
    made.handle = TensorHandle(data, of_handle or element)
    made.dtype = made.type = element
    if in_blocks:
        key = element.name, data.shape
        try:
            made.type = _blocks[key]
        except KeyError:
            made.type = _blocks[key] = tl.block_type(element, data.shape)
    return made


def _unwrap_at_once(o: Any) -> Any:
    kind = type(o)
    if kind is tl.constexpr:
        return o.value
    return _unwrap(o) if kind in (list, tuple, tl.tuple) or issubclass(kind, (tuple, tl.constexpr)) else o


def _is_dtype_of_that_name(self: tl.dtype, other: Any) -> bool:
    other = _unwrap_at_once(other)
    return self is other or (isinstance(other, tl.dtype) and self.name == other.name)


_integers: dict[int, tl.tensor] = {}


def _to_tensor_at_once(self: TritonSemantic, x: Any, check_type: bool = True) -> Any:
    kind = type(x)
    if kind is tl.tensor:
        return x
    if kind is int and -(2**31) <= x < 2**31:
        try:
            return _integers[x]
        except KeyError:
            return _integers.setdefault(x, _tensor(np.array([x], np.int32), tl.int32, False))
    return _to_tensor(self, x, check_type)


def _scalar_at_once(self: TritonSemantic, value: Any, dtype: tl.dtype) -> tl.tensor:
    if dtype.name not in NUMBERS:
        return _scalar_constant(self, value, dtype)
    return _tensor(np.array([value], NUMBERS[dtype.name]), dtype, False)


def _cast_at_once(self: TritonSemantic, x: tl.tensor, dtype: tl.dtype, rounding: str | None = None) -> tl.tensor:
    element = dtype.scalar
    if x.dtype is element:
        return x
    if element.name not in NUMBERS or x.dtype.name not in NUMBERS or element is tl.int1 or rounding is not None:
        return _cast(self, x, dtype, rounding)
    return _tensor(x.handle.data.astype(NUMBERS[element.name]), element, x.type is not x.dtype)


def _splat_at_once(self: TritonSemantic, value: tl.tensor, shape: Any) -> tl.tensor:
    if len(shape) == 0 or value.dtype.name not in NUMBERS:
        return _splat(self, value, shape)
    sizes = tuple(map(_unwrap_at_once, shape))
    return _tensor(np.full(sizes, value.handle.data, NUMBERS[value.dtype.name]), value.dtype, True)


# Operators.


class Rule(NamedTuple):
    """What NumPy computes of operands of two types, which it converts first where they have to be."""

    left: type | None
    right: type | None
    element: tl.dtype
    of_handle: tl.dtype


def _is_single(x: int | float) -> bool:
    """A number of Python is one of 32 bits."""
    if type(x) is int:
        return -(2**31) <= x < 2**31
    return x == 0 or 2**-126 <= abs(x) <= (2 - 2**-23) * 2**127 or abs(x) == math.inf


def _of_tensor(
    name: str, slowly: Callable, compute: Callable, numbers: tuple[str, ...], result: tl.dtype | None = None
) -> Callable:  # fmt: skip
    """An operator of a tensor and another operand: its `result` has the type of what it computes with if None.

    A number of Python gives way to the type of a tensor, but where things are compared.
    """
    rules: dict[tuple, Rule | None] = {}
    swaps, gives_way = name.startswith("__r"), result is None

    def rule_of(left: tl.dtype, right: Any) -> Rule | None:
        other, is_python = SCALARS.get(right, right), right in SCALARS
        if not isinstance(other, tl.dtype) or not {left.name, other.name} <= {*NUMBERS}:
            return None
        common = SEMANTIC.computation_type_impl(left, False, other, is_python and gives_way, False)
        if common.name not in numbers:
            return None
        number = NUMBERS[common.name]
        of_right = number if is_python or common.name != other.name else None
        return Rule(None if common.name == left.name else number, of_right, result or common, common)

    def quickly(lhs: tl.tensor, rhs: Any) -> tl.tensor:
        kind = type(rhs)
        if kind is tl.constexpr:
            rhs = rhs.value
            kind = type(rhs)
        is_tensor = kind is tl.tensor
        key = lhs.dtype.name, (rhs.dtype.name if is_tensor else kind)
        try:
            rule = rules[key]
        except KeyError:
            rule = rules[key] = rule_of(lhs.dtype, rhs.dtype if is_tensor else kind)
        if rule is None or not (is_tensor or _is_single(rhs)):
            return slowly(lhs, rhs)
        left, right, element, of_handle = rule
        a = lhs.handle.data if left is None else lhs.handle.data.astype(left)
        if not is_tensor:
            b = np.array([rhs], right)
        else:
            b = rhs.handle.data if right is None else rhs.handle.data.astype(right)
        data = compute(b, a) if swaps else compute(a, b)
        return _tensor(data, element, lhs.type is not lhs.dtype or (is_tensor and rhs.type is not rhs.dtype), of_handle)

    return quickly


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero, as the interpreter."""
    return (a - np.fmod(a, b)) // b


def _add(name: str, slowly: Callable) -> Callable:
    """Of pointers and numbers of 32 or 64 bits, or of numbers."""
    of_numbers = _of_tensor(name, slowly, np.add, ("int32", "int64", "fp16", "fp32"))

    def quickly(lhs: tl.tensor, rhs: Any) -> tl.tensor:
        pointer = lhs.dtype
        if type(pointer) is not tl.pointer_type:
            return of_numbers(lhs, rhs)
        if type(rhs) is not tl.tensor or rhs.dtype.name not in ("int32", "int64"):
            return slowly(lhs, rhs)
        size = max(1, pointer.element_ty.primitive_bitwidth // 8)
        data = lhs.handle.data + size * rhs.handle.data.astype(np.uint64)
        return _tensor(data, pointer, lhs.type is not pointer or rhs.type is not rhs.dtype)

    return quickly


def _get_item(name: str, slowly: Callable) -> Callable:
    def quickly(self: tl.tensor, slices: Any) -> tl.tensor:
        is_plain = type(slices) is tuple and all(x is None or x == slice(None) for x in slices)
        if not is_plain or self.type is self.dtype:
            return slowly(self, slices)
        return _tensor(self.handle.data[slices], self.dtype, True, self.handle.dtype)

    return quickly


def _dot(name: str, slowly: Callable) -> Callable:
    """Of two halves or floats of two or three dimensions, added to floats; the interpreter knows one precision."""

    def quickly(lhs: tl.tensor, rhs: tl.tensor, acc: tl.tensor | None = None, *others: Any, **options: Any):
        a, b = lhs.handle.data, rhs.handle.data
        names = lhs.dtype.name, rhs.dtype.name, "fp32" if acc is None else acc.dtype.name
        shape = *a.shape[:-1], b.shape[-1]
        is_plain = names in (("fp16", "fp16", "fp32"), ("fp32", "fp32", "fp32")) and "out_dtype" not in options
        fits = a.ndim in (2, 3) and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
        if others or not is_plain or not fits or (acc is not None and acc.handle.data.shape != shape):
            return slowly(lhs, rhs, acc, *others, **options)
        total = np.float32(0) if acc is None else acc.handle.data
        return _tensor(np.matmul(a, b, dtype=np.float32) + total, tl.float32, True)

    return quickly


FLOATS, INTEGERS = ("fp16", "fp32"), ("int32", "int64")
ANY = (*INTEGERS, *FLOATS)
ARITHMETIC = {
    "sub": (np.subtract, ANY), "mul": (np.multiply, ANY), "truediv": (np.divide, ("fp32",)),
    "floordiv": (_divide, INTEGERS), "mod": (np.fmod, INTEGERS), "and": (np.bitwise_and, ("int1",)),
    "or": (np.bitwise_or, ("int1",)),
}  # fmt: skip
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
OPERATORS: dict[str, Callable[[str, Callable], Callable]] = {
    "__add__": _add, "__radd__": _add, "__getitem__": _get_item, "dot": _dot,
    **{
        f"__{reverse}{name}__": functools.partial(_of_tensor, compute=compute, numbers=numbers)
        for name, (compute, numbers) in ARITHMETIC.items()
        for reverse in ("", "r")
    },
    **{
        f"__{name}__": functools.partial(_of_tensor, compute=compute, numbers=ANY, result=tl.int1)
        for name, compute in COMPARISONS.items()
    },
}  # fmt: skip


def _where_at_once(self: TritonSemantic, condition: tl.tensor, x: Any, y: Any) -> tl.tensor:
    of = x if type(x) is tl.tensor else y
    if type(of) is not tl.tensor or condition.dtype is not tl.int1 or of.dtype.name not in NUMBERS:
        return _where(self, condition, x, y)
    number, chosen = NUMBERS[of.dtype.name], []
    for each in (x, y):
        if type(each) is tl.tensor and each.dtype is of.dtype:
            chosen.append(each.handle.data)
        elif of.dtype.is_floating() and type(each) in (int, float) and _is_single(each):
            chosen.append(np.array([each], number))
        else:
            return _where(self, condition, x, y)
    in_blocks = any(type(each) is tl.tensor and each.type is not each.dtype for each in (condition, x, y))
    return _tensor(np.where(condition.handle.data, *chosen), of.dtype, in_blocks)


def _largest_at_once(name: str, compute: np.ufunc) -> tuple:
    slowly = getattr(TritonSemantic, name)

    def quickly(self: TritonSemantic, x: tl.tensor, y: tl.tensor, propagate_nan: Any) -> tl.tensor:
        if x.dtype is not y.dtype or x.dtype.name not in ANY:
            return slowly(self, x, y, propagate_nan)
        in_blocks = x.type is not x.dtype or y.type is not y.dtype
        return _tensor(compute(x.handle.data, y.handle.data), x.dtype, in_blocks)

    return TritonSemantic, name, quickly


# Memory.


def _in_blocks(pointer: tl.tensor, mask: tl.tensor | None, *others: Any) -> bool:
    """Pointers of a block to numbers, with a mask of at most its shape, and no options."""
    element = getattr(pointer.dtype, "element_ty", None)
    if mask is None or element is None or element.name not in ANY or pointer.type is pointer.dtype or any(others):
        return False
    a, b = pointer.handle.data, mask.handle.data
    return mask.dtype is tl.int1 and (a.shape == b.shape or np.broadcast(a, b).shape == a.shape)


def _spread(x: tl.tensor, pointer: tl.tensor) -> TensorHandle:
    shape = pointer.handle.data.shape
    return x.handle if x.handle.data.shape == shape else TensorHandle(np.broadcast_to(x.handle.data, shape), x.dtype)


def _load_at_once(self: TritonSemantic, ptr: tl.tensor, mask: Any, other: Any, *options: Any) -> tl.tensor:
    if not _in_blocks(ptr, mask, *options[:2]) or (other is not None and other.type is not other.dtype):
        return _load(self, ptr, mask, other, *options)
    element, blank = ptr.dtype.element_ty, None
    if other is not None:
        blank = _splat_at_once(self, _cast_at_once(self, other, element), ptr.type.shape).handle
    handle = self.builder.create_masked_load(ptr.handle, _spread(mask, ptr), blank, *options[2:])
    return _tensor(handle.data, element, True)


def _store_at_once(self: TritonSemantic, ptr: tl.tensor, val: tl.tensor, mask: Any, *options: Any) -> tl.tensor:
    if not _in_blocks(ptr, mask, options[0]):
        return _store(self, ptr, val, mask, *options)
    val = _cast_at_once(self, val, ptr.dtype.element_ty)
    return self.tensor(
        self.builder.create_masked_store(ptr.handle, _spread(val, ptr), _spread(mask, ptr), *options[1:]), tl.void
    )


# Launches.


@functools.cache
def _builtins_of(owner: Any) -> list[tuple[str, Callable]]:
    """Each builtin of Triton's language, called with the interpreter's semantics."""

    def called(name: str, member: FunctionType) -> Callable:
        function = getattr(member, "__wrapped__", member)

        def slowly(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = SEMANTIC
            return function(*args, **kwargs)

        is_quick = name in OPERATORS and (owner is tl.tensor) == name.startswith("__")
        return OPERATORS[name](name, slowly) if is_quick else slowly

    names = [name for name in dir(owner) if tl.core.is_builtin(getattr(owner, name))]
    return [(name, called(name, getattr(owner, name))) for name in names]


def _patch_builtin(owner: Any, builder: Any, scope: interpreter._LangPatchScope) -> None:
    for name, quick in _builtins_of(owner):
        scope.set_attr(owner, name, quick)


@functools.cache
def _languages_of(fn: FunctionType) -> list:
    return [lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())]


def _call_at_once(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls finds the language as the kernel's launch left it: for the interpreter."""
    if any(tl.core.is_builtin(lang.load) for lang in _languages_of(self.fn)):
        return _call_device_function(self, *args, **kwargs)
    try:
        return (self.rewritten_fn.get(self.fn) or self.rewrite())(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


CHANGES: list[tuple] = [
    # It looks for overflows of integers in a dozen operations a sum, but says nothing of them without `debug`.
    (interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)),
    (interpreter, "_patch_builtin", _patch_builtin),
    (InterpretedFunction, "__call__", _call_at_once),
    (TensorHandle, "__init__", _init_handle),
    (TensorHandle, "set_attr", lambda self, key, value: None),  # which nothing reads
    (tl.block_type, "__init__", _init_block),
    (tl.tensor, "__init__", _init_tensor),
    (tl.core, "_unwrap_if_constexpr", _unwrap_at_once),
    (tl.dtype, "__eq__", _is_dtype_of_that_name),
    (TritonSemantic, "to_tensor", _to_tensor_at_once),
    (TritonSemantic, "scalar_constant", _scalar_at_once),
    (TritonSemantic, "cast", _cast_at_once),
    (TritonSemantic, "splat", _splat_at_once),
    (TritonSemantic, "where", _where_at_once),
    (TritonSemantic, "_load_legacy", _load_at_once),
    (TritonSemantic, "_store_legacy", _store_at_once),
    _largest_at_once("minimum", np.minimum),
    _largest_at_once("maximum", np.maximum),
]
AS_IT_WAS = [(owner, name, getattr(owner, name)) for owner, name, _ in CHANGES]
