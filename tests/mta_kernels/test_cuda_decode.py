"""The CUDA decode against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from decode_steps import assert_decodes, exact, make_decode, paged
from emulated_decode import H200, emulated_decode  # noqa: F401
from kernel_inputs import DEVICE, RANGES, make, poison_memory, relative_error, with_range
from planted_faults import plant
from torch import Tensor

from mta_kernels.conv_attention import (
    conv_attention_decode,
    explain,
    unsupported,
)
from mta_kernels.conv_attention.cuda_decode import arrivals
from mta_kernels.conv_attention.cuda_decode import plan as planning
from mta_kernels.conv_attention.cuda_decode.plan import choose_plan
from mta_kernels.conv_attention.triton import backend as triton_backend
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution, Operation

ON_GPU = DEVICE == "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
RTX_4090 = 101376  # bytes of shared memory a program


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """`backend="cuda"` runs, in the emulator where there is no GPU; with NaN in whatever nobody writes.

    Without a GPU its fields may be changed: the seed of threads and copies, multiprocessors, shared memory.
    """
    poison_memory(monkeypatch)
    return SimpleNamespace() if ON_GPU else request.getfixturevalue("emulated_decode")


def run(inputs: tuple[Tensor, ...], **options) -> Tensor:
    q, k, v, weight, lengths = inputs
    return conv_attention_decode(q, k, v, weight, lengths=lengths, backend="cuda", **options)


RAGGED = [40, 0, 300, 1, 5, 17, 6, 70]  # some shorter than the taps


@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_any_number_of_programs(gpu, multiprocessors: int) -> None:
    """More sequences than a warp has threads; programs with many heads, and heads with many programs."""
    gpu.multiprocessors = multiprocessors
    for lengths in ([1, 30, 2, 90] * 9, [700]):
        inputs = make_decode(lengths, 2, 2, 64, (6, 11), BF16)
        assert_decodes(run(inputs), *inputs, rounding=4)


def test_heads_of_one_length_are_shared_evenly(gpu) -> None:
    """By as many programs each as the plan says; longer and shorter ones by runs of equal length."""
    gpu.multiprocessors = 8
    q, k, v, weight, lengths = make_decode([300, 300], 2, 2, 64, (6, 11), BF16)
    plan = choose_plan(BF16, 64, Operation.of((6, 11), 64).conv, 1, False, True, q.device)
    splits = plan.splits_for(4, 300)
    assert splits in (2, 4)  # of 8 programs, or where a GPU has more, of 64 keys or more each
    assert torch.equal(run((q, k, v, weight, lengths)), run((q, k, v, weight, lengths), splits=splits))
    lengths[1] = 200
    assert not torch.equal(run((q, k, v, weight, lengths)), run((q, k, v, weight, lengths), splits=splits))


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("kind", RANGES)
def test_range_of_fp16(gpu, kind: str, heads: int) -> None:
    """The last keys of a sequence, of which some queries see fewer, and others; eight heads fold no taps."""
    q, k, v, weight, lengths = make_decode([5, 130], heads, 1, 64, (6, 11))
    q, k, weight, scale = with_range(kind, q, k, weight)
    inputs = q, k, v.half(), weight, lengths
    assert relative_error(run(inputs, scale=scale), exact(*inputs, scale=scale)) < 2e-3


def test_heads_that_do_not_fit_into_one_program(gpu) -> None:
    gpu.shared_memory = RTX_4090
    inputs = make_decode([100, 20], 18, 1, 64, (6, 11), BF16)
    plan = choose_plan.__wrapped__(BF16, 64, Convolution(6, 11, 5), 18, False, True, inputs[0].device)
    assert plan.constants.head_blocks == 2
    assert_decodes(run(inputs), *inputs, rounding=4)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [False, True])
def test_cuda_graph_follows_the_lengths(pages: bool) -> None:
    """A captured step is replayed with other lengths: nothing was read on the host."""
    q, k, v, weight, lengths = make_decode([4, 3000], 8, 2, 64, (6, 11), BF16)
    caches, table = [k, v], None
    if pages:
        (k_pages, table), (v_pages, _) = paged(k, 16), paged(v, 16)
        caches = [k_pages, v_pages]
    step = (q, *caches, weight, lengths)
    run(step, block_table=table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(step, block_table=table)
    for new in ([4, 3000], [2, 17], [1, 1500]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert_decodes(out, q, k, v, weight, lengths, rounding=4)


@pytest.mark.gpu
def test_graphs_and_streams_run_side_by_side() -> None:
    """Programs of two calls at once do not count each other."""
    inputs = make_decode([20000], 4, 4, 64, (6, 11), BF16)
    want = run(inputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(run(inputs))
    for _ in range(20):
        for stream, graph in zip(streams, [*graphs, None, None], strict=True):
            with torch.cuda.stream(stream):
                if graph is None:
                    results.append(run(inputs))
                else:
                    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)
    assert all((counts == 0).all() for counts in (*arrivals._captured, *arrivals._of_stream.values()))


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        (
            "        copies_wait<2 * STAGES - 1>();\n        meet_team();\n        multiply",
            "        meet_team();\n        multiply",
        ),
        (
            "        copies_wait<2 * STAGES - 1>();\n        meet_team();\n        add",
            "        meet_team();\n        add",
        ),
        ("    else block_sync(", "    else if (false) block_sync("),
        ("    if (!is_first) block_sync(", "    if (false) block_sync("),
    ],
    ids=[
        "no wait for the keys",
        "no wait for the values",
        "none for the other warp of a team",
        "scores before the last tile's",
    ],
)
def test_the_emulator_finds_what_a_gpu_may_hide(gpu, monkeypatch, tmp_path, line: str, instead: str) -> None:
    plant(monkeypatch, planning, tmp_path / "cuda_decode", "many_heads.cu", line, instead)
    gpu.multiprocessors = 1  # more tiles than buffers
    inputs = make_decode([700], 9, 1, 64, (6, 11), BF16)
    want = exact(*inputs)
    errors = []
    for gpu.seed in range(6):
        errors.append(relative_error(run(inputs), want))
    assert not max(errors) < 0.02


@pytest.mark.parametrize(
    ("dtype", "head_dim", "taps", "words"),
    [
        (torch.float32, 64, (6, 11), "dtype torch.float32 is not float16 or bfloat16"),
        (BF16, 8, (6, 11), "head_dim 8 is outside 16 to 256"),
        (BF16, 264, (6, 11), "head_dim 264 is outside 16 to 256"),
        (BF16, 64, (17, 11), "17x11 taps are outside 1x1 to 16x31"),
    ],
)
def test_what_it_cannot_take_is_told(gpu, dtype, head_dim, taps, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(make_decode([20], 1, 1, head_dim, taps, dtype))


def test_a_cpu_has_no_cuda() -> None:
    inputs = tuple(x.cpu() for x in make_decode([20], 1, 1, 64, (6, 11), BF16))
    with pytest.raises(ValueError, match="the CUDA kernels need an NVIDIA GPU, not a cpu device"):
        run(inputs)


def test_what_runs_a_decode_and_what_a_forward(gpu) -> None:
    inputs = make(1, 1, 1, 20, 64, (6, 11), BF16)
    typical = {"device": DEVICE, "dtype": BF16, "head_dim": 64, "query_taps": 6, "key_taps": 11}
    assert unsupported("hopper", **typical, decode=True) == "it has no decode"
    assert unsupported("cuda", **typical | {"head_dim": 17, "key_taps": 31}, decode=True) is None
    assert "head_dim 17" in (unsupported("cuda", **typical | {"head_dim": 17}) or "")
    with pytest.raises(ValueError, match="backend 'hopper' has no decode"):
        explain(*inputs, backend="hopper", decode=True)


def test_auto_takes_it_where_many_heads_share_a_cache(gpu) -> None:
    for heads, backend in ((24, "cuda"), (1, "triton")):
        *inputs, lengths = make_decode([40], heads, 1, 64, (3, 5), FP16)
        assert explain(*inputs, decode=True).backend == backend
        got = conv_attention_decode(*inputs, lengths=lengths)
        assert torch.equal(got, conv_attention_decode(*inputs, lengths=lengths, backend=backend))


def test_auto_takes_it_where_heads_share_many_keys(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(batch: int, keys: int, pages: int | None = None, heads: int = 8, head_dim: int = 64) -> str:
        cache = torch.empty(head_dim, dtype=FP16, device=DEVICE).expand(pages or batch, 2, keys, head_dim)
        shapes = (batch, heads, 6, head_dim), (heads, 3, 5)
        q, weight = (torch.empty(*shape, dtype=FP16, device=DEVICE) for shape in shapes)
        return explain(q, cache, weight=weight, v=cache, decode=True).backend

    monkeypatch.setattr(triton_backend, "_capability", lambda device: (9, 0))
    assert [choice(1, 1 << 12), choice(1, (1 << 12) + 1)] == ["triton", "cuda"]
    assert [choice(4, 1 << 10), choice(8, 1 << 10)] == ["triton", "cuda"]
    assert [choice(1, 1 << 13, head_dim=128), choice(1, 1 << 13, heads=4)] == ["triton", "triton"]
    assert choice(1, 64, heads=10) == "cuda"
    assert choice(4, 64, pages=100) == "cuda"
    monkeypatch.setattr(triton_backend, "_capability", lambda device: (8, 0))
    assert choice(1, 64) == "cuda"  # Triton without the copy engine


def test_it_has_no_gradient(gpu) -> None:
    q, *others = make_decode(RAGGED, 1, 1, 64, (6, 11), BF16)
    out = run((q.requires_grad_(), *others))
    with pytest.raises(RuntimeError, match="not differentiable through backend 'cuda'; use backend='reference'"):
        out.sum().backward()


@pytest.mark.parametrize("shared_memory", [H200, 166912, RTX_4090])
def test_a_plan_fits_every_gpu(gpu, shared_memory: int) -> None:
    if ON_GPU:
        pytest.skip("the GPU's own shared memory counts there")
    gpu.shared_memory = shared_memory
    for head_dim in (16, 40, 64, 128, 256):
        for taps in ((1, 1), (6, 11), (16, 31)):
            for group in (1, 3, 8, 12, 40):
                before = Convolution(*taps, 0)
                plan = choose_plan.__wrapped__(BF16, head_dim, before, group, False, True, torch.device("cpu"))
                constants = plan.constants
                assert constants.shared_memory <= shared_memory
                assert constants.heads * constants.sharing * constants.head_blocks >= group
                assert constants.heads <= 8
                assert plan.programs >= 1


@pytest.mark.parametrize(
    ("architecture", "limit", "head_dim", "group", "paged_cache"),
    [
        ("sm_80", 166912, 128, 1, False),
        ("sm_90", H200, 64, 4, True),
        ("sm_90", H200, 128, 4, False),
        ("sm_90", H200, 128, 8, False),
        ("sm_90", H200, 64, 16, True),
        ("sm_120", RTX_4090, 256, 4, False),
        ("sm_120", RTX_4090, 256, 8, False),
    ],
)
def test_it_compiles_without_spills(monkeypatch, architecture, limit, head_dim, group, paged_cache) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    monkeypatch.setattr(planning, "shared_memory_limit", lambda device: limit)
    monkeypatch.setattr(planning, "sm_count", lambda device: 100)
    plan = choose_plan.__wrapped__(BF16, head_dim, Convolution(6, 11, 5), group, paged_cache, True, torch.device("cpu"))
    for name in ("decode", "merge"):
        code, words = compiler.compile_source(plan.constants.source(architecture, name))
        assert code.startswith(b"\x7fELF")
        if "ptxas info" not in words:
            pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
        assert words.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1
