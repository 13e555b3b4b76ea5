"""Compile the kernels of targets, each in processes of its own, and say what each kernel takes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mtabench.errors import MtabenchError
from mtabench.processes import ProcessEndedError, call_in_process, in_threads
from mtabench.static import machine_code
from mtabench.static.limits import WARP, WARPS_PER_BLOCK, Limits, occupancy
from mtabench.static.machine_code import Spills, ToolError, Usage
from mtabench.static.records import ALL, DOES_NOT_FIT, FAILED, OK, SKIPPED, Inspection, Kernel
from mtabench.static.shapes import Shape

if TYPE_CHECKING:
    from mta_kernels.plan import KernelCall

LONGEST_S = 3600.0

# Called as a shape of a target is compiled: the target, the shape, its kernels.
Progress = Callable[[Limits, Shape, Sequence[Kernel]], None]


@dataclass(frozen=True, slots=True)
class Source:
    """What an implementation launches for a shape on a GPU of some limits, by the name that tables give it.

    It is called in a process of its own: `calls` must be a function that pickle finds.
    """

    name: str
    calls: Callable[[Shape, Limits], Iterable[KernelCall]]


@dataclass(frozen=True, slots=True)
class Job:
    """What one process compiles: the shapes, for one target; of all kernels, or those whose names hold a given text."""

    limits: Limits
    shapes: tuple[Shape, ...]
    sources: tuple[Source, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShapeDone:
    """A compiled shape: its kernels, compilers' versions, and the names of all kernels, wanted or not."""

    shape: Shape
    kernels: tuple[Kernel, ...]
    toolchain: Mapping[str, str]
    launched: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Code:
    """A kernel as its compiler gives it."""

    usage: Usage
    spills: Spills
    warps: int
    dynamic_shared: int
    tensor_memory: int = 0
    stages: int | None = None
    tiles: str = ""


def compile_job(send: Callable[[Any], None], job: Job) -> None:
    """Send a ShapeDone for each shape, or, if a tool is missing, a text that says what to do."""
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it where a kernel is defined: nothing has imported one yet
    try:
        for shape in job.shapes:
            send(_Compilation(job, shape).run())
    except ToolError as error:
        send(str(error))


def short_name(name: str) -> str:
    """A kernel's name without what all of them share: `conv_attention_fwd` of `_conv_attention_fwd_kernel`."""
    return name.removeprefix("_").removesuffix("_kernel")


class SkippedError(Exception):
    """A source that cannot be compiled on this machine; the text says why, and what to install."""


class _Compilation:
    """One shape for one target: gathers the kernels that calls launch."""

    def __init__(self, job: Job, shape: Shape) -> None:
        self.job, self.shape = job, shape
        self.kernels: list[Kernel] = []
        self.seen: set[object] = set()
        self.launched: set[str] = set()
        self.counts: dict[str, int] = {}
        self.source = ""
        self.toolchain: dict[str, str] = {}

    def run(self) -> ShapeDone:
        with compiles_for(self.job.limits):
            for source in self.job.sources:
                self.source = source.name
                try:
                    for call in source.calls(self.shape, self.job.limits):
                        if call.language == "triton":
                            self._triton_kernel(call)
                        elif call.language == "cuda":
                            self._cuda_kernel(call)
                except SkippedError as error:
                    self._add(self.source, language="cuda", status=SKIPPED, reason=str(error))
                except ToolError:
                    raise
                except Exception as error:  # host code that finds no tile that fits, for instance
                    self._add(self.source, status=FAILED, reason=_sentence(error))
        return ShapeDone(self.shape, tuple(self.kernels), self.toolchain, frozenset(self.launched))

    def _wanted(self, name: str) -> bool:
        self.launched.add(short_name(name))
        return not self.job.names or any(part in short_name(name) for part in self.job.names)

    def _triton_kernel(self, call: KernelCall) -> None:
        if not self._wanted(call.name):
            return
        name, found = short_name(call.name), compiled(call)
        if isinstance(found, Exception):
            self._add(name, language="triton", status=FAILED, reason=_sentence(found))
        elif found.hash not in self.seen:
            self.seen.add(found.hash)
            self._add_code(name, "triton", self._triton_code(call.source, found))

    def _triton_code(self, function: Any, compiled: Any) -> _Code:
        import triton

        number = self.job.limits.number
        assembler = machine_code.assembler_name(number)
        self.toolchain |= {
            "triton": triton.__version__,
            assembler: machine_code.version_of(machine_code.tool(assembler)),
        }
        metadata, cubin, ptx = compiled.metadata, compiled.asm["cubin"], compiled.asm["ptx"]
        usage = machine_code.usage_of(cubin, number)[metadata.name]
        spills = Spills(0, 0)
        if usage.stack:  # the assembler runs again only where there may be spills
            options = [] if metadata.enable_fp_fusion else ["--fmad=false"]
            options += (metadata.ptx_options or "").split()
            spills = machine_code.spills_of(ptx, ("-lineinfo", *options))[metadata.name]
        threads = re.search(r"^\.reqntid\s+(\d+)", ptx, re.MULTILINE)
        return _Code(
            usage,
            spills,
            warps=int(threads[1]) // WARP if threads else metadata.num_warps,
            dynamic_shared=metadata.shared,
            tensor_memory=getattr(metadata, "tmem_size", None) or 0,
            stages=metadata.num_stages,
            tiles=_tiles(function, compiled.src.constants),
        )

    def _cuda_kernel(self, call: KernelCall) -> None:
        from mta_kernels.nvrtc import compiler

        file, key = call.source.path, (self.source, call.source.file_name, call.name)
        is_rung = file.parent.name == "mta_ladder" and file.stem != call.name  # several of them have an `attention`
        label = f"{file.stem}_{call.name}" if is_rung else call.name
        if key in self.seen or not self._wanted(label):
            return
        self.seen.add(key)
        if reason := compiler.missing_package():
            raise SkippedError(reason)
        cubin, log = compiler.compile_source(call.source)
        self.toolchain["nvrtc"] = compiler.version()
        usages = machine_code.usage_of(cubin, self.job.limits.number)
        symbol = machine_code.symbol_of(call.name, usages)
        code = _Code(
            usages[symbol],
            machine_code.parse_spills(log)[symbol],
            warps=call.threads // WARP,
            dynamic_shared=call.shared_memory or 0,
        )
        self._add_code(short_name(label), "cuda", code)

    def _add_code(self, name: str, language: str, code: _Code) -> None:
        limits, shared = self.job.limits, code.usage.static_shared + code.dynamic_shared
        held = occupancy(
            limits,
            warps=code.warps,
            registers=code.usage.registers,
            shared_bytes=shared,
            tensor_memory=code.tensor_memory,
        )
        self._add(
            name,
            language=language,
            status=OK if held.blocks else DOES_NOT_FIT,
            reason="" if held.blocks else _over(limits, code, shared, held.limited_by),
            tiles=code.tiles,
            warps=code.warps,
            stages=code.stages,
            registers=code.usage.registers,
            spill_store_bytes=code.spills.stores,
            spill_load_bytes=code.spills.loads,
            stack_bytes=code.usage.stack,
            static_shared_bytes=code.usage.static_shared,
            dynamic_shared_bytes=code.dynamic_shared,
            shared_limit_bytes=limits.shared_per_block,
            tensor_memory_columns=code.tensor_memory if limits.tensor_memory else None,
            blocks_per_sm=held.blocks,
            warps_per_sm=held.warps,
            occupancy=round(held.share, 4),
            limited_by=", ".join(held.limited_by),
        )

    def _add(self, name: str, **known: Any) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        numbered = name if self.counts[name] == 1 else f"{name}.{self.counts[name]}"
        self.kernels.append(Kernel(self.job.limits.target, self.shape.name, numbered, source=self.source, **known))


def _over(limits: Limits, code: _Code, shared: int, resources: Sequence[str]) -> str:
    """The resources that a kernel needs and a block cannot have."""
    reasons = {
        "registers": f"{code.usage.registers} registers a thread in {code.warps} warps exceed a block's",
        "shared memory": f"{shared} bytes of shared memory, of {limits.shared_per_block} that a block can have",
        "tensor memory": f"{code.tensor_memory} columns of tensor memory, of {limits.tensor_memory}",
        "warps": f"{code.warps} warps, of {WARPS_PER_BLOCK} that a block can have",
    }
    return "; ".join(reasons[resource] for resource in resources)


def _tiles(function: Any, constants: Mapping[Any, Any]) -> str:
    """`BLOCK_M=64 BLOCK_N=64` of the constants of a compiled kernel, which are by their places among the arguments."""
    named = {function.arg_names[place[0]]: value for place, value in constants.items() if len(place) == 1}
    return " ".join(f"{name}={value}" for name, value in named.items() if name.startswith("BLOCK_"))


def _sentence(error: Exception) -> str:
    """What a compiler or the host code says was wrong, in one line."""
    text = getattr(error, "error_message", None) or str(error)  # Triton quotes the source first
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\berror\s*:", line)] or lines or [""]
    return f"{type(error).__name__}: {telling[0]}"


def inspect(
    targets: Sequence[Limits], shapes: Sequence[Shape], sources: Sequence[Source], *,
    names: Sequence[str] = (), progress: Progress = lambda *args: None,
) -> Inspection:  # fmt: skip
    """Compile the kernels that the sources launch; `names` keeps those that hold one.

    At most one process a CPU. A process that dies (a compiler may crash) costs the shapes that it had left: they have
    one failed row each. Raises MtabenchError if a tool is missing.
    """
    jobs = list(_jobs(targets, shapes, sources, tuple(names)))
    done: dict[tuple[str, Shape], ShapeDone] = {}
    for job, message in _results(jobs):
        if isinstance(message, str):
            raise MtabenchError(message)
        if isinstance(message, ShapeDone):
            done[job.limits.target, message.shape] = message
            progress(job.limits, message.shape, message.kernels)
        else:
            for shape in job.shapes:
                if (job.limits.target, shape) not in done:
                    lost = Kernel(job.limits.target, shape.name, ALL, FAILED, reason=str(message))
                    done[job.limits.target, shape] = ShapeDone(shape, (lost,), {})
                    progress(job.limits, shape, (lost,))
    ordered = [done[limits.target, shape] for limits in targets for shape in shapes]
    kernels = [kernel for found in ordered for kernel in found.kernels]
    toolchain = dict(sorted(item for found in ordered for item in found.toolchain.items()))
    return Inspection(kernels, shapes, toolchain, sorted(set().union(*(found.launched for found in ordered))))


def _jobs(
    targets: Sequence[Limits], shapes: Sequence[Shape], sources: Sequence[Source], names: tuple[str, ...]
) -> Iterator[Job]:
    """A target in few pieces, since each process imports torch anew, and in so many that all CPUs have work."""
    count = cpus()
    pieces = -(-count // len(targets)) if len(targets) < count else 1 + (len(targets) % count > 0)
    pieces = min(len(shapes), pieces)
    for limits in targets:
        for piece in range(pieces):
            yield Job(limits, tuple(shapes[piece::pieces]), tuple(sources), names)


def _results(jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    """What the processes send, and the exception of one that died, as it comes."""
    free = threading.Semaphore(cpus())

    def compile_one(job: Job, give: Callable[[tuple[Job, Any]], None]) -> None:
        try:
            with free:
                call_in_process(compile_job, (job,), LONGEST_S, lambda message: give((job, message)))
        except (ProcessEndedError, TimeoutError) as error:
            give((job, error))

    return in_threads([partial(compile_one, job) for job in jobs])


def cpus() -> int:
    """CPUs that this process may use: the most processes at a time."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def compiles_for(limits: Limits) -> Iterator[None]:
    """Within it Triton compiles for this target, and launches nothing: one capability a process.

    A JIT function keeps the target of its first call. Triton's interpreter (TRITON_INTERPRET) compiles nothing.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", limits.number, WARP)
    answers = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    driver.set_active(SimpleNamespace(**answers, get_current_stream=lambda device=0: 0))
    try:
        yield
    finally:
        driver._active = None  # reset_active() would look for a real GPU


def compiled(call: KernelCall) -> Any:
    """Triton's CompiledKernel of a launch, or the exception of its compiler, which is a finding."""
    try:
        return call.source.warmup(*call.arguments, grid=call.grid, **call.constants)
    except Exception as error:  # whatever the compiler raises: other kernels are to come
        return error
