"""What a person's code sets for the whole process, such as PyTorch's threads, holds within that code's calls alone.

What it replaces of the clocks and of this suite is put back, and its cell is wrong.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from mtabench.errors import MtabenchError

# Pairs of torch._C that belong to a thread, or to a moment.
PASSING = {"dispatch_mode", "graph_exec_group", "tensor_metadata", "thread_name", "torch_function_state",
           "tracing_state", "value_trace"}  # fmt: skip
SDP_KERNELS = ("cudnn", "fa3", "flash", "math", "mem_efficient", "overrideable")
COMPARED = (bool, int, float, str, type(None))
GRADIENTS = "gradients"  # put back, and never made again: a backward needs them, whatever a forward switched off
UNKNOWN = object()

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads and writes something of the process
Place = tuple[Any, str]  # a module or class, and a name in it

_made: dict[str, tuple[dict[Any, Any], dict[Place, Any]]] = {}  # by owner: settings, and functions it replaced
_active: list[str] = []


class SideEffectError(MtabenchError):
    """A person's code did to the process what would spoil the measurement of everything else."""


@contextmanager
def own_settings(owner: str) -> Iterator[None]:
    """Within, the process has the settings that `owner` left in earlier blocks; after it, the settings from before.

    A block within a block changes nothing. Raises SideEffectError if the block replaced what measures it, or made a
    setting that cannot be set back. To enter and to leave takes milliseconds, which nothing timed may hold.
    """
    if _active:
        yield
        return
    settings, measuring, replaceable = _settings(), _names_of(_measuring()), _names_of(_replaceable())
    before = _values(settings)
    made, replaced = _made.get(owner, ({}, {}))
    _write(settings, made)
    for place, function in replaced.items():
        setattr(*place, function)
    _active.append(owner)
    try:
        yield
    finally:
        _active.clear()
        now = _values(settings)
        changed = {name: value for name, value in now.items() if before[name] not in (UNKNOWN, value)}
        changed.pop(GRADIENTS, None)
        _made[owner] = changed, _put_back(replaceable)
        _write(settings, before)
        spoilt = [f"{part.__name__}.{name}" for part, name in _put_back(measuring)]
        after = _values(settings)
        left = [str(name) for name in settings if before[name] not in (UNKNOWN, after[name])]
        if spoilt:
            raise SideEffectError(f"it replaces {spoilt[0]}, which measures it; leave it as it is")
        if left:
            raise SideEffectError(f"it sets {', '.join(left)} for good, for all that is measured; leave it as it is")


def _values(settings: dict[Any, Setting]) -> dict[Any, Any]:
    """What each setting is, UNKNOWN where it cannot be read now."""
    values = dict.fromkeys(settings, UNKNOWN)
    for name, (read, _) in settings.items():
        with suppress(Exception):
            values[name] = read()
    return values


def _write(settings: dict[Any, Setting], values: dict[Any, Any]) -> None:
    """Set what is another than now, in the order of the settings: one may change those behind it."""
    for name, (read, write) in settings.items():
        if (value := values.get(name, UNKNOWN)) is not UNKNOWN:
            with suppress(Exception):  # the settings are read afterwards
                if _values({name: (read, write)})[name] != value:
                    write(value)


def _names_of(parts: list[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """What the names of modules and classes mean now."""
    return [(part, dict(vars(part))) for part in parts]


def _put_back(parts: list[tuple[Any, dict[str, Any]]]) -> dict[Place, Any]:
    """Put functions and classes back where they were; gives what was there instead."""
    found: dict[Place, Any] = {}
    for part, names in parts:
        now = vars(part)
        for name, value in names.items():
            changed = now.get(name) is not value
            if changed and (callable(value) or isinstance(value, (classmethod, property, staticmethod))):
                found[part, name] = now.get(name)
                setattr(part, name, value)
    return found


def _modules(*packages: str) -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]


@cache  # all of it is imported before the first person's code
def _measuring() -> list[Any]:
    """What measures and judges: clocks, streams, and this package."""
    import torch

    modules = _modules("mtabench")
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [time, torch.cuda, torch.cuda.Event, torch.cuda.CUDAGraph, *modules, *classes]


def _replaceable() -> list[Any]:
    """Of PyTorch and of this project's kernels, what others call."""
    import torch

    ours = _modules("mta_kernels", "mta_ladder")
    return [torch, torch.Tensor, torch.nn.functional, torch.autograd, torch.linalg, *ours]


@cache
def _settings() -> dict[Any, Setting]:
    """What PyTorch, Python and the system let a process set, and can be read."""
    import torch

    native: Any = torch._C
    pairs = {name: f"_set_{name}" for name in sorted(x.removeprefix("_get_") for x in dir(native) if "_get_" in x[:5])}
    pairs |= {f"{kernel}_sdp_enabled": f"_set_sdp_use_{kernel}" for kernel in SDP_KERNELS}
    settings: dict[Any, Setting] = {
        name: (getattr(native, f"_get_{name}"), _spread(getattr(native, write)))
        for name, write in pairs.items()
        if name not in PASSING and hasattr(native, f"_get_{name}") and hasattr(native, write)
    }
    for backend in ("generic", "cuda", "mkldnn"):
        for part in ("all", "matmul", "conv", "rnn"):
            settings[f"float32 precision of {backend} {part}"] = (
                partial(native._get_fp32_precision_getter, backend, part),
                partial(native._set_fp32_precision_setter, backend, part),
            )
    for device in ("cpu", "cuda"):
        settings[f"autocast of {device}"] = (
            partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        )  # fmt: skip
        settings[f"autocast's dtype of {device}"] = (
            partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
        )  # fmt: skip
    for name in ("torch._dynamo.config", "torch._inductor.config"):  # as far as they are loaded before
        settings[name] = partial(_options, name), partial(_set_options, name)
    settings["deterministic_algorithms"] = (
        lambda: (native._get_deterministic_algorithms(), native._get_deterministic_algorithms_warn_only()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    on_gpu = torch.cuda.is_initialized
    return settings | {
        "the number of threads": (torch.get_num_threads, torch.set_num_threads),
        "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "the default device": (_default_device, torch.set_default_device),
        GRADIENTS: (torch.is_grad_enabled, native._set_grad_enabled),
        "anomaly detection": (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
        # There is no function that reads it.
        "denormal numbers": (lambda: sys.float_info.min * 0.5 == 0, torch.set_flush_denormal),
        "garbage collection": (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
        "the cores": (lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value)),
        "the current folder": (os.getcwd, os.chdir),
        "the environment": (lambda: dict(os.environ), _set_environment),
        "the current GPU": (lambda: torch.cuda.current_device() if on_gpu() else 0, torch.cuda.set_device),
        "the current stream": (_other_stream, _set_stream),
    }


def _spread(write: Callable[..., Any]) -> Callable[[Any], Any]:
    """Some settings are read as a tuple of what is written."""
    return lambda value: write(*value) if isinstance(value, tuple) else write(value)


def _options(name: str) -> dict[str, Any]:
    """The options of a compiler, as far as they can be compared."""
    options = sys.modules[name].get_config_copy()
    return {option: value for option, value in options.items() if isinstance(value, COMPARED)}


def _set_options(name: str, values: dict[str, Any]) -> None:
    now = _options(name)
    sys.modules[name].load_config({option: x for option, x in values.items() if now.get(option, UNKNOWN) != x})


def _default_device() -> Any:
    """None unless somebody set it: to set it, to a CPU too, makes every call slower."""
    import torch

    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _other_stream() -> Any:
    """None for the default one, which is there once somebody uses the GPU."""
    import torch

    if not torch.cuda.is_initialized() or torch.cuda.current_stream() == torch.cuda.default_stream():
        return None
    return torch.cuda.current_stream()


def _set_stream(stream: Any) -> None:
    """What the stream before was given comes first."""
    import torch

    stream = stream or torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)


def _set_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)
