"""What a call would run on a GPU that need not be present: its kernels, their arguments, its scratch.

    q = torch.empty(1, 16, 4096, 64, dtype=torch.bfloat16, device="meta")
    found = plan(H200, conv_attention, q, q, q, weight)

The call itself runs on tensors without memory, and its host code decides as always which kernels to launch. A recorder
notes each launch instead of starting it. So the plan comes from the code that launches, and cannot disagree with it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mta_kernels import operator_gradients, planned
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.nvrtc.driver import LaunchConfig
from mta_kernels.planned import A100, H200, PlannedGpu

__all__ = ["A100", "H200", "KernelCall", "Plan", "PlannedGpu", "gpu_like", "on_planned", "plan"]

# The address of a tensor in a planned call has three fields: a mark that no number among a kernel's arguments has, the
# index of its storage, and its offset in bytes.
MARK, STORAGES, OFFSETS = 0x5A, 18, 38


@dataclass(frozen=True)
class KernelCall:
    """One launch.

    `source` is what a compiler reads: a `nvrtc.compiler.Source`, or a Triton function; None for a kernel of PyTorch.
    `grid` counts blocks, `threads` the threads of a block, `shared_memory` its dynamic bytes (None for Triton, which
    alone knows them). `arguments` are as the kernel takes them; `constants` are compiled in, with launch options.
    `bytes` counts each tensor that it reads or writes once and wholly. Where successive launches share one structure of
    arguments, the first launch has the bytes of all its tensors.
    """

    name: str
    language: str
    source: Any
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    threads: int
    shared_memory: int | None
    arguments: Sequence[Any]
    bytes: int


@dataclass
class Plan:
    """The launches of a call in their order, and the most bytes of memory that it held at once beyond its inputs."""

    calls: list[KernelCall] = field(default_factory=list)
    peak_bytes: int = 0
    splits: int | None = None  # programs that share a head's keys in a step of conv attention on full caches

    def names(self, *languages: str) -> tuple[str, ...]:
        """Kernels of these languages ("cuda", "triton", "torch"), each once, in the order of their first launch."""
        return tuple(dict.fromkeys(call.name for call in self.calls if call.language in languages))


def plan(gpu: PlannedGpu, call: Callable[..., Any], *args: Any, backward: bool = False, **options: Any) -> Plan:
    """The launches of `call(*args, **options)` on a GPU; with `backward`, the launches of its backward alone.

    Tensors of the meta device stand for tensors of the GPU that begin at multiples of 16 bytes. A call that reads
    numbers out of a tensor to decide what it launches cannot be planned. Raises what the call raises.
    """
    if planned.recorder() is not None:
        raise RuntimeError("a call is planned already in this thread")
    recorder = Recorder(gpu)
    inputs = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
    for x in inputs:
        recorder.storage_of(x)
    recorder.held = recorder.found.peak_bytes = 0
    planned.record_with(recorder)
    try:
        with recorder, _AsIfOn(recorder):
            result = call(*args, **options)
            if backward:
                outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
                wanted = [x for x in inputs if x.requires_grad]
                gradients = [torch.empty_like(x) for x in outputs]
                recorder.held -= sum(x.untyped_storage().nbytes() for x in gradients)  # they are inputs, too
                recorder.found = Plan(peak_bytes=recorder.held)
                _backward_as_if_on(recorder, outputs)
                torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
    finally:
        planned.record_with(None)
    return recorder.found


def gpu_like(device: torch.device) -> PlannedGpu:
    """A GPU of this machine as one to plan for, or the planned one that a device is."""
    if gpu := planned.gpu_at(device.index):
        return gpu
    found = torch.cuda.get_device_properties(device)
    return PlannedGpu(
        found.name, (found.major, found.minor), found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        found.shared_memory_per_multiprocessor, found.multi_processor_count, found.total_memory,
        next((known.clusters for known in (H200, A100) if known.name == found.name), ()),
        has_nvrtc=missing_package() is None,
    )  # fmt: skip


def on_planned(gpu: PlannedGpu) -> TorchFunctionMode:
    """A context in which tensors of the meta device report this GPU as their device."""
    return _AsIfOn(Recorder(gpu))


def _backward_as_if_on(recorder: Recorder, outputs: Sequence[Tensor]) -> None:
    """Run each node of the backward in the forward's modes, which autograd would leave out."""
    nodes = [x.grad_fn for x in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            mode = _AsIfOn(recorder)
            node.register_prehook(lambda gradients, mode=mode: mode.__enter__() and None)
            node.register_hook(lambda before, after, mode=mode: mode.__exit__(None, None, None))
            nodes += [following for following, _ in node.next_functions]


class Recorder(TorchDispatchMode):
    """Notes the kernels that a call launches, and the memory that it holds meanwhile."""

    def __init__(self, gpu: PlannedGpu) -> None:
        super().__init__()
        self.device = torch.device("cuda", planned.index_of(gpu))
        self.found = Plan()
        self.held = 0  # bytes
        self._storages: dict[int, int] = {}  # their numbers, by PyTorch's
        self._bytes: list[int] = [0]  # of storages, by number
        self._arguments: Any = None  # the structure of the last launch

    def storage_of(self, x: Tensor) -> int:
        """The number of a tensor's storage, which counts as memory until it is gone."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            size = storage.nbytes()
            self._storages[key] = len(self._bytes)
            self._bytes.append(size)
            self.held += size
            self.found.peak_bytes = max(self.found.peak_bytes, self.held)
            weakref.finalize(storage, self._free, key, size)
        return self._storages[key]

    def _free(self, key: int, size: int) -> None:
        del self._storages[key]
        self.held -= size

    def address(self, x: Tensor) -> int:
        """Where a tensor begins."""
        with torch._C.DisableTorchFunction():
            return (MARK << STORAGES | self.storage_of(x)) << OFFSETS | int(x.storage_offset()) * x.element_size()

    def cuda(self, kernel: planned.PlannedKernel, config: LaunchConfig, arguments: Sequence[Any]) -> None:
        """Note a launch of CUDA C++, whose arguments are structures."""
        source, structures = kernel.source, [x for x in arguments if x is not self._arguments]
        self._arguments = arguments[-1]
        self.found.calls.append(
            KernelCall(
                kernel.name, "cuda", source, source.constants, (*config.blocks,), config.threads[0],
                config.shared_memory, (),
                self._bytes_at(word for x in structures for word in _words(x)),
            )
        )  # fmt: skip

    def triton(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Note a launch of Triton."""
        tensors = (getattr(x, "base", x) for x in args)  # of a descriptor, its tensor
        addresses = [self.address(x) for x in tensors if isinstance(x, Tensor)]
        self.found.calls.append(
            KernelCall(
                kernel.fn.__name__, "triton", kernel, options, grid, 32 * options.get("num_warps", 4), None,
                tuple(map(_without_memory, args)), self._bytes_at(addresses),
            )
        )  # fmt: skip

    def _bytes_at(self, words: Iterator[int] | Sequence[int]) -> int:
        """Bytes of the storages that these words point into, each counted from the first address on."""
        first: dict[int, int] = {}
        for word in words:
            if word >> (STORAGES + OFFSETS) == MARK:
                storage, offset = word >> OFFSETS & (1 << STORAGES) - 1, word & (1 << OFFSETS) - 1
                first[storage] = min(offset, first.get(storage, offset))
        return sum(self._bytes[storage] - offset for storage, offset in first.items())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "mta":
            with self, _AsIfOn(self):
                return operator_gradients.kernel_of(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for x in made:
            self.storage_of(x)
        if not func.is_view and func not in NO_KERNELS:
            touched = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
            name, sizes = func.overloadpacket.__name__, self._bytes_at([self.address(x) for x in touched])
            self.found.calls.append(KernelCall(name, "torch", None, {}, (), 0, 0, (), sizes))
        return result


aten = torch.ops.aten
NO_KERNELS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.detach.default, aten._unsafe_view.default,
}  # fmt: skip


class _AsIfOn(TorchFunctionMode):
    """Tensors of the meta device report a planned GPU as their device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, device = dict(kwargs or {}), self._recorder.device
        if func in ANSWERS and _is_meta(args[0]):
            return ANSWERS[func](self._recorder, args[0])
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == device:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


ANSWERS: dict[Any, Callable[[Recorder, Tensor], Any]] = {
    Tensor.device.__get__: lambda recorder, x: recorder.device,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda recorder, x: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda recorder, x: False,  # type: ignore[attr-defined]
    Tensor.data_ptr: Recorder.address,
}


def _is_meta(x: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # another such mode may be on
        return x.is_meta


@dataclass(frozen=True)
class TensorType:
    """What a compiler of kernels reads of a tensor; its address is a multiple of 16 bytes."""

    dtype: torch.dtype
    shape: Sequence[int]

    def data_ptr(self) -> int:
        """An address that no tensor has."""
        return 0


def _without_memory(x: Any) -> Any:
    """An argument for compilers alone: a tensor, or a descriptor of one, would keep memory that the call frees."""
    if hasattr(x, "block_shape"):
        return replace(x, base=_without_memory(x.base))
    return TensorType(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x


def _words(argument: Any) -> list[int]:
    """A kernel's argument as words of eight bytes."""
    size = ctypes.sizeof(argument) // 8
    return [*(ctypes.c_uint64 * size).from_buffer_copy(argument)]
