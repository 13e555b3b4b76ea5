"""Launches as Triton makes them beside those made without it, for `test_triton_direct_launch.py`.

Triton's driver stands for a Hopper GPU that is not there. What reaches its launchers in C is compared, number by
number. Says how many launches of each case it compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.backends.nvidia import driver as nvidia

from mta_kernels.conv_attention import conv_attention, conv_attention_decode
from mta_kernels.conv_attention.triton import backend, backward_scores, decode, forward, launch, prepare

kept: list[Tensor] = []  # all that was allocated, so that no memory is used twice
compared = 0
HOOKS = slice(10, 13)  # the launcher's arguments for hooks


class Driver(nvidia.CudaDriver):
    """Triton's, with a device and stream of our choice; a tensor map holds its arguments."""

    def __init__(self) -> None:
        self.device, self.stream = 0, 7
        self._launched: list[list[Any]] = []
        functions = itertools.count(1)
        nvidia.library_dirs = list
        nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=self._launch)
        self.launcher_cls = nvidia.CudaLauncher
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, next(functions), 32, 0, 1024), fill_tma_descriptor=lambda *given: given,
            get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        )  # fmt: skip
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_stream = lambda device: self.stream + 100 * device
        self.get_current_device = lambda: self.device

    def _launch(self, *arguments: Any) -> None:
        found = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        del found[HOOKS]
        self._launched.append(found)

    def launched(self) -> list[list[Any]]:
        """All launches since the last call."""
        found, self._launched = self._launched, []
        return found


driver = Driver()


class Checked(launch.LaunchReplay):
    """Launches by Triton first, then directly: both must reach the driver alike."""

    def __call__(self, args) -> None:
        driver.launched()
        self.by_triton(*args, *self._constants)
        expected = driver.launched()
        super().__call__(args)
        assert driver.launched() == expected
        global compared
        compared += 1


launch_replay = launch.launch_replay


def checked(compiled, programs: int, constants: tuple) -> Checked:
    found = launch_replay(compiled, programs, constants)
    assert type(found) is launch.LaunchReplay
    found.__class__, found.by_triton = Checked, compiled[(programs, 1, 1)]
    return found


def keep_memory() -> None:
    """From now on no memory is used twice."""

    def keeping(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(*args, **kwargs) -> Tensor:
            kept.append(found := allocate(*args, **kwargs))
            return found

        return keep

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        setattr(owner, name, keeping(getattr(owner, name)))


def normal(*shape: int, dtype=torch.bfloat16) -> Tensor:
    found = torch.randn(*shape).to(dtype)
    kept.append(found)
    return found


def inputs(head_dim: int, rows: int = 130) -> list[Tensor]:
    q, k, v = (normal(2, heads, rows, head_dim) for heads in (4, 2, 2))
    return [q, k, v, normal(4, 6, 11)]


def attention(*tensors: Tensor, **options) -> Tensor:
    return conv_attention(*tensors, backend="triton", **options)


def case_forward() -> None:
    """q, k and v by themselves, within one tensor as a linear layer gives them, and such as have no descriptor."""
    for stream in (7, 8, 9):
        driver.stream = stream
        for head_dim in (64, 128):
            attention(*inputs(head_dim))
            attention(*normal(2, 130, 3, 4, head_dim).permute(2, 0, 3, 1, 4), normal(4, 6, 11))
        attention(*inputs(64, rows=64), causal=False)
        attention(*inputs(64)[:3], nn.Parameter(normal(4, 6, 11, dtype=torch.float32)), scale=0.3)
        attention(*(x.mT for x in normal(3, 2, 4, 64, 130)), normal(4, 6, 11))


def case_others() -> None:
    """Packed documents, heads in chunks, a chunk of a prompt, decode."""
    for _ in range(3):
        tensors = inputs(64)
        attention(*tensors, head_chunk=2)
        q, k, v, weight = tensors
        attention(q[:, :, -30:], k, v, weight, q_history=q[:, :, :-30])
        attention(*(x[:1] for x in (q, k, v)), weight, cu_seqlens=torch.tensor([0, 50, 130], dtype=torch.int32))
        lengths = torch.tensor([130, 77], dtype=torch.int32)
        conv_attention_decode(q[:, :, -6:], k, v, weight, lengths=lengths, backend="triton")


def case_backward() -> None:
    for _ in range(3):
        q, k, v, weight = (x.requires_grad_() for x in inputs(64))
        attention(q, k, v, weight).sum().backward()


def main() -> None:
    global compared
    triton.runtime.driver.set_active(driver)
    launch.launch_replay = checked
    for module in (prepare, forward, backward_scores, decode):
        if hasattr(module, "dependent_launches"):
            module.dependent_launches = lambda x: True
    backend.platform_unsupported = lambda device, dtype: None
    keep_memory()
    for case in (case_backward, case_others, case_forward):
        compared = 0
        case()
        print(f"{case.__name__.removeprefix('case_')} {compared}")


if __name__ == "__main__":
    main()
