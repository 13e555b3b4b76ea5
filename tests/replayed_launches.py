"""Launches as Triton makes them beside those made without it, byte for byte, for `test_triton_direct_launch.py`.

    python replayed_launches.py FOLDER

FOLDER gets the library that stands in for the CUDA driver. Says how many launches of each case it compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from fake_cuda import Driver
from torch import Tensor, nn

from mta_kernels.conv_attention import conv_attention, conv_attention_decode
from mta_kernels.conv_attention.triton import backend, backward_scores, decode, forward, launch, prepare

kept: list[Tensor] = []  # all that was allocated, so that no memory is used twice
driver: Driver
compared = 0


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
    global driver, compared
    driver = Driver(Path(sys.argv[1]))
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
