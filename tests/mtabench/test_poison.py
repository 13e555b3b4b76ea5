"""Memory that was freed is NaN when it is handed out again."""

import pytest
import torch

from mtabench.measuring import poison
from mtabench.measuring.poison import poison_free_blocks, poisoned_memory

SIZES = [9, 40, 300, 5000, 200_000, 3_000_000]
LARGE = SIZES[3:]  # more than 2 KiB in every dtype: of less, malloc keeps blocks that it does not fill
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def handed_out(size, dtype, device="cpu"):
    """Memory of that size, after some of it held ones and was freed."""
    ones = [torch.ones(size, dtype=dtype, device=device) for _ in range(3)]
    del ones
    with poisoned_memory(device, [size * dtype.itemsize]):
        return torch.empty(size, dtype=dtype, device=device)


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_a_cpu_is_nan(size, dtype):
    assert handed_out(size, dtype).isnan().all()


def test_after_it_nothing_is_filled():
    with pytest.raises(RuntimeError), poisoned_memory("cpu"):
        raise RuntimeError
    ones = [torch.ones(5000) for _ in range(64)]  # one block alone may be NaN of a test before
    del ones
    assert not all(x.isnan().all() for x in [torch.empty(5000) for _ in range(64)])


def test_what_is_computed_within_is_right():
    x = torch.randn(64, 64)
    with poisoned_memory("cpu"):
        found = (x @ x).softmax(-1) @ x
    assert torch.equal(found, (x @ x).softmax(-1) @ x)


def test_every_free_block_of_a_gpu_is_asked_for(monkeypatch):
    """Not those in use, of other streams, devices or graphs; small ones in pieces that the small pool gives."""

    def segment(kind, sizes, stream=0, device=0, pool=(0, 0)):
        blocks = [{"size": size, "state": state} for size, state in sizes]
        return {"device": device, "stream": stream, "segment_pool_id": pool, "segment_type": kind, "blocks": blocks}

    free = "inactive"
    segments = [
        segment("small", [(512, free), (1024, "active_allocated"), (3 << 19, free)]),
        segment("large", [(20 << 20, free), (2 << 20, "active_pending_free"), (1 << 20, free)]),
        segment("large", [(4 << 20, free)], stream=7),
        segment("large", [(4 << 20, free)], device=1),
        segment("large", [(4 << 20, free)], pool=(0, 1)),
    ]
    asked, filled = [], []

    class Block:
        def fill_(self, byte):
            filled.append(byte)

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(poison, "_block", lambda size: asked.append(size) or Block())
    poison_free_blocks([4096])
    assert asked == [4096, 20 << 20, 1 << 20, 1 << 19, 512]
    assert filled == [0xFF] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_a_gpu_is_nan(size, dtype):
    assert handed_out(size, dtype, "cuda").isnan().all()


@pytest.mark.gpu
def test_poisoning_reserves_no_more_memory():
    kept = [torch.ones(size, device="cuda") for size in SIZES]
    del kept[::2]
    before = torch.cuda.memory_reserved()
    poison_free_blocks()
    assert torch.cuda.memory_reserved() == before
