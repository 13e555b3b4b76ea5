"""Launches as Triton makes them beside those made without it, byte for byte; a process for `test_fastpath_triton.py`.

    python replayed_launches.py FOLDER

FOLDER gets the library that stands in for the CUDA driver. Says how many launches of each case it compared.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from fake_cuda import Driver, Launch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mta_kernels.conv_attention import conv_attention, conv_attention_decode, tile_sizes
from mta_kernels.conv_attention.fastpath import replay, triton_forward
from mta_kernels.conv_attention.triton import backend, backward_scores, decode, forward, launch, prepare
from mta_kernels.operation import Operation

ALLOCATING = {"empty", "new_empty", "empty_like", "empty_strided", "as_strided", "detach", "alias", "view"}
allocated: dict[int, int] = {}  # where what was allocated begins, and its bytes
kept: list[Tensor] = []  # all of it, so that no memory is used twice
driver: Driver
compared = 0


class Checked(launch.LaunchReplay):
    """Launches by Triton first, then directly: both must reach the driver alike."""

    def __call__(self, args) -> None:
        before = driver.launched()
        self.by_triton(*args, *self._constants)
        expected = driver.launched()
        super().__call__(args)
        got = driver.launched()
        assert got == expected
        global compared
        compared += 1
        seen.extend([*before, *got])


seen: list[Launch] = []
launch_replay = launch.launch_replay


def checked(compiled, programs: int, constants: tuple) -> Checked:
    found = launch_replay(compiled, programs, constants)
    assert type(found) is launch.LaunchReplay
    found.__class__, found.by_triton = Checked, compiled[(programs, 1, 1)]
    return found


def launched() -> list[Launch]:
    """All launches since the last time, of each pair one."""
    found = [*seen, *driver.launched()]
    seen.clear()
    return found


def keep_memory() -> None:
    """From now on memory is never used twice, and `allocated` tells what is where."""

    def keeping(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(*args, **kwargs) -> Tensor:
            found = allocate(*args, **kwargs)
            kept.append(found)
            allocated[found.data_ptr()] = found.untyped_storage().nbytes()
            return found

        return keep

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        setattr(owner, name, keeping(getattr(owner, name)))


def normal(*shape: int, dtype=torch.bfloat16) -> Tensor:
    found = torch.randn(*shape).to(dtype)
    kept.append(found)
    return found


def inputs(head_dim: int, rows: int = 130, kv_heads: int = 2) -> list[Tensor]:
    q, k, v = (normal(2, heads, rows, head_dim) for heads in (4, kv_heads, kv_heads))
    return [q, k, v, normal(4, 6, 11)]


def packed_inputs(head_dim: int) -> list[Tensor]:
    """q, k and v within one tensor, as a linear layer gives them."""
    q, k, v = normal(2, 130, 3, 4, head_dim).permute(2, 0, 3, 1, 4)
    return [q, k, v, normal(4, 6, 11)]


def transposed(head_dim: int) -> list[Tensor]:
    """q, k and v of which no descriptor can be made."""
    return [x.mT for x in normal(3, 2, 4, head_dim, 130)]


def attention(*tensors: Tensor, **options) -> Tensor:
    return conv_attention(*tensors, backend="triton", **options)


@contextlib.contextmanager
def as_ever() -> Iterator[None]:
    """No call is remembered, and none repeated."""
    found, replay._seen = replay._seen, {}
    can_replay, triton_forward.can_replay = triton_forward.can_replay, lambda: False
    try:
        yield
    finally:
        replay._seen, triton_forward.can_replay = found, can_replay


def same(expected: list[Launch], got: list[Launch]) -> None:
    """Raise unless launches agree in all but where memory lies that was allocated for them, and this is well placed."""
    moved: dict[int, int] = {}
    used: dict[int, list[int]] = {}  # at which launches

    def check(one: bytes, other: bytes, launch: int) -> None:
        if one == other:
            return
        assert len(one) in (8, 128)  # a pointer or a tensor map, which begins with one
        assert one[8:] == other[8:]
        address, moved_to = (int.from_bytes(x[:8], "little") for x in (one, other))
        assert address in allocated, (hex(address), hex(moved_to))
        assert moved.setdefault(address, moved_to) == moved_to
        assert moved_to % 16 == 0
        used.setdefault(address, []).append(launch)

    assert len(expected) == len(got) > 0
    for i, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert one.configuration == other.configuration
        for parameters in zip(one.parameters, other.parameters, strict=True):
            check(*parameters, i)
    areas = {address: (start, start + allocated[address]) for address, start in moved.items()}
    for one, other in itertools.combinations(areas, 2):
        if used[one][0] <= used[other][-1] and used[other][0] <= used[one][-1]:
            assert areas[one][1] <= areas[other][0] or areas[other][1] <= areas[one][0], "in use at once, and overlap"
    for start, end in areas.values():
        assert any(x <= start and end <= x + size for x, size in allocated.items()), "beyond the scratch"
    global compared
    compared += len(got)


def repeats(make: Callable[[], list[Tensor]], **options) -> None:
    """Compare a repeated forward with one that is not, at addresses that change."""
    only_launches(make())
    for _ in range(2):
        attention(*make(), **options)  # the first by the operator, the second watched
    with Counting() as whole_calls:
        for stream in (7, 8, 9):
            tensors = make()
            driver.stream = stream
            with as_ever():
                launched()
                attention(*tensors, **options)
            expected = launched()
            repeated_calls = whole_calls.count
            out = attention(*tensors, **options)
            assert whole_calls.count == repeated_calls, "not repeated"
            assert out.shape == tensors[0].shape
            assert out.is_contiguous()
            same(expected, launched())


class Counting:
    """Counts forwards that Triton's host code makes."""

    def __enter__(self) -> Counting:
        self.count, self._original = 0, triton_forward.conv_attention_forward
        triton_forward.conv_attention_forward = self
        return self

    def __exit__(self, *error: object) -> None:
        triton_forward.conv_attention_forward = self._original

    def __call__(self, *args, **options):
        self.count += 1
        return self._original(*args, **options)


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ in ALLOCATING, function
        return function(*args, **(kwargs or {}))


def case_forward(head_dim: int) -> None:
    repeats(lambda: inputs(head_dim))
    repeats(lambda: packed_inputs(head_dim))
    repeats(lambda: [x.requires_grad_() if x.dim() == 3 else x for x in inputs(head_dim)])


def case_forward_64() -> None:
    case_forward(64)
    repeats(lambda: inputs(64, rows=64), causal=False)
    repeats(lambda: [*inputs(64)[:3], nn.Parameter(normal(4, 6, 11, dtype=torch.float32))], scale=0.3)
    repeats(lambda: [*transposed(64), normal(4, 6, 11)])
    whole_calls_where_needed()
    on_the_gpu_of_the_tensors()


def case_forward_128() -> None:
    case_forward(128)


def only_launches(tensors: list[Tensor]) -> None:
    """Between its launches a forward only allocates: nothing is lost where only they are repeated."""
    with torch.no_grad(), Operations():
        forward.conv_attention_forward(Operation.of((6, 11), tensors[0].shape[3]), *tensors)
    launched()


def whole_calls_where_needed() -> None:
    """Where a repeated call is not like the one that was watched, Triton's host code makes it; later ones are quick."""
    replay._seen.clear()
    q, _, _, weight = inputs(64)
    k = normal(*q.shape)
    shifted = normal(q.numel() + 1)[1:].view(q.shape)
    same_k = k.detach()  # another tensor at the same address
    attention(q, k, same_k, weight)
    with Counting() as whole_calls:

        def counts(*tensors: Tensor) -> int:
            with as_ever():
                launched()
                attention(*tensors)
            expected, before = launched(), whole_calls.count
            attention(*tensors)
            same(expected, launched())
            return whole_calls.count - before

        assert [counts(q, k, same_k, weight) for _ in range(2)] == [1, 1]  # which of them is at that address?
        other = [normal(*q.shape) for _ in range(3)]
        assert [counts(*other, weight) for _ in range(3)] == [1, 0, 0]
        assert counts(q, k, same_k, weight) == 0  # that is known by now
        assert counts(q, shifted, other[0], weight) == 1
        assert counts(*other, weight) == 0
        tile_sizes.reload()
        assert [counts(q, shifted, other[0], weight) for _ in range(2)] == [0, 1]  # the operator asks again what runs
        assert [counts(*other, weight) for _ in range(2)] == [1, 0]
        hook: list = []
        triton.knobs.runtime.launch_enter_hook.add(hook.append)
        before = whole_calls.count
        attention(*other, weight)
        assert whole_calls.count == before + 1
        assert len(hook) == 4
        triton.knobs.runtime.launch_enter_hook.remove(hook.append)
        assert counts(*other, weight) == 0


def on_the_gpu_of_the_tensors() -> None:
    """Also where another GPU is the current one, whose stream is another."""
    tensors = inputs(64)
    attention(*tensors)
    attention(*tensors)
    with as_ever():
        launched()
        attention(*tensors)
    expected = launched()
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, driver.device = driver.device, index
        entered.append(index)
        yield
        driver.device = before

    torch.cuda.device, driver.device = device, 1
    with Counting() as whole_calls:
        attention(*tensors)
    assert whole_calls.count == 0
    same(expected, launched())
    assert (entered, driver.device) == ([0], 1)


def case_others() -> None:
    """Packed documents, heads in chunks, a chunk of a prompt, decode: direct launches of what is not repeated whole."""
    for _ in range(3):
        tensors = inputs(64)
        attention(*tensors, head_chunk=2)
        q, k, v, weight = tensors
        attention(q[:, :, -30:], k, v, weight, q_history=q[:, :, :-30])
        attention(*(x[:1] for x in (q, k, v)), weight, cu_seqlens=torch.tensor([0, 50, 130], dtype=torch.int32))
        lengths = torch.tensor([130, 77], dtype=torch.int32)
        conv_attention_decode(q[:, :, -6:], k, v, weight, lengths=lengths, backend="triton")
    launched()


def case_backward() -> None:
    for _ in range(3):
        q, k, v, weight = (x.requires_grad_() for x in inputs(64))
        attention(q, k, v, weight).sum().backward()
    launched()


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
    for case in (case_backward, case_others, case_forward_128, case_forward_64):  # the last leaves another GPU
        compared = 0
        case()
        print(f"{case.__name__.removeprefix('case_')} {compared}")


if __name__ == "__main__":
    main()
