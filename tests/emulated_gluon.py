"""The code of the Gluon forward, run as Python: its language played by torch, the parts of a program by threads.

It shows wrong indices, wrong phases of barriers and deadlocks; nothing of layouts, registers or memory order. Copies
arrive at once, shared memory begins as NaN, and a product reads its operands when it is waited for.
"""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mta_kernels.conv_attention.triton import forward, forward_gluon

SECONDS = 20  # a wait that takes longer is a deadlock
JITTED = ("_copy", "_multiply", "_load_queries", "_begin_scores", "_begin_values", "_mask", "_softmax")


class Pointer:
    """Into the memory of a tensor."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    @classmethod
    def to(cls, x: torch.Tensor) -> Pointer:
        numbers = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(x.as_strided((numbers,), (1,)))


class Barrier:
    """An mbarrier: its phase ends when `count` have arrived and all expected bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.bytes = self.count = self.missing = 0

    def change(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += expected
            assert self.missing >= 0, "more have arrived than are awaited"
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != int(phase), SECONDS):
                raise RuntimeError("deadlock")


class Shared:
    """Shared memory, or a row of barriers."""

    def __init__(self, x: Any) -> None:
        self.x, self.dtype = x, getattr(x, "dtype", None)

    def index(self, i: Any) -> Any:
        return self.x[int(i)] if isinstance(self.x, list) else Shared(self.x[int(i)])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.x.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.x.permute(order))


class Product:
    """A product that is under way."""

    def __init__(self, a: torch.Tensor, b: Shared, accumulator: Any, **options: Any) -> None:
        self.a, self.b, self.accumulator = a, b, accumulator

    def value(self) -> torch.Tensor:
        before = self.accumulator.value() if isinstance(self.accumulator, Product) else self.accumulator
        return before + self.a.float() @ self.b.x.float()


def wait_for_products(pending: int, deps: list[Product]) -> Any:
    values = [product.value() for product in deps]
    return values if len(values) > 1 else values[0]


def copy_to_shared(descriptor: Any, start: list[Any], barrier: Barrier, out: Shared) -> None:
    """What lies outside of the tensor comes as zeros."""
    box = tuple(slice(int(a), int(a) + n) for a, n in zip(start, descriptor.block, strict=True))
    found = descriptor.x[box]
    out.x.zero_()
    out.x[tuple(slice(n) for n in found.shape)] = found
    barrier.change(0, -descriptor.block_type.nbytes)


def describe(x: torch.Tensor, shape: Any, strides: Any, block: list[int], layout: Any) -> Any:
    size = SimpleNamespace(nbytes=math.prod(block) * x.element_size())
    return SimpleNamespace(x=x, block=block, block_type=size, dtype=x.dtype, layout=None)


def set_up(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    return Shared(
        [Barrier() for _ in range(shape[0])] if dtype == torch.int64 else torch.full(shape, math.nan, dtype=dtype)
    )


def store(pointer: Pointer, x: torch.Tensor, mask: torch.Tensor) -> None:
    offset, x, mask = torch.broadcast_tensors(pointer.offset, x, mask)
    pointer.memory[offset[mask]] = x[mask]


def in_threads(parts: list[tuple[Any, tuple]], warps: list[int], registers: list[int]) -> None:
    errors: list[BaseException] = []

    def work(part: Any, args: tuple) -> None:
        try:
            part(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def nothing(*args: Any) -> None:
    """A layout."""


class Language:
    """What the kernel takes of `triton.experimental.gluon.language`."""

    int64, float32, bfloat16, float16 = torch.int64, torch.float32, torch.bfloat16, torch.float16
    constexpr = object
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = staticmethod(nothing)
    NVMMASharedLayout = SimpleNamespace(get_default_for=nothing)
    program_id = staticmethod(lambda axis: Language.program)
    program = torch.tensor(0)
    arange = staticmethod(lambda start, end, layout: torch.arange(start, end))
    zeros = staticmethod(lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype))
    full = staticmethod(lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype))
    minimum = staticmethod(lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)))
    maximum = staticmethod(lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))
    max, sum = staticmethod(torch.amax), staticmethod(torch.sum)
    exp2, log2, where = staticmethod(torch.exp2), staticmethod(torch.log2), staticmethod(torch.where)
    convert_layout = staticmethod(lambda x, layout: x)
    static_range = range
    load = staticmethod(lambda p, mask, other: torch.where(mask, p.memory[torch.where(mask, p.offset, 0)], other))
    store = staticmethod(store)
    allocate_shared_memory = staticmethod(allocate)
    warp_specialize = staticmethod(in_threads)


def launch(kernel: Any, programs: int, signature: Any, *args: Any, **options: Any) -> None:
    """Every program, one after the other."""
    arguments = [Pointer.to(x) if isinstance(x, torch.Tensor) else x for x in args]
    constants = {name: value for name, value in options.items() if name.isupper()}
    for program in range(programs):
        Language.program = torch.tensor(program)
        kernel.fn(*arguments, **constants)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the Triton forward take the Gluon kernel where it would on a GPU, as Python."""
    barriers = SimpleNamespace(
        MBarrierLayout=nothing, init=set_up, wait=Barrier.wait,
        arrive=lambda barrier, count: barrier.change(count, 0), expect=lambda barrier, size: barrier.change(1, size),
    )  # fmt: skip
    replaced = {
        "gl": Language, "launch": launch, "TensorDescriptor": describe, "mbarrier": barriers,
        "tma": SimpleNamespace(async_copy_global_to_shared=copy_to_shared),
        "warpgroup_mma": Product, "warpgroup_mma_wait": wait_for_products,
    }  # fmt: skip
    replaced |= {name: getattr(forward_gluon, name).fn for name in JITTED}
    for name, value in vars(forward_gluon).items():
        if name.isupper() and hasattr(value, "value"):
            replaced[name] = Constant(value.value) if isinstance(value.value, int) else value.value
    for name, value in replaced.items():
        monkeypatch.setattr(forward_gluon, name, value)
    monkeypatch.setattr(forward, "gluon_launcher", lambda: forward_gluon.launch_gluon)


class Constant(int):
    """A whole number that the host code asks for its value."""

    @property
    def value(self) -> int:
        return int(self)
