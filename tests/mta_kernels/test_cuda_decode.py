"""The CUDA decode against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from decode_steps import assert_decodes, check_independence, exact, make_decode, paged
from emulated_decode import H200, emulated_decode  # noqa: F401
from kernel_inputs import DEVICE, RANGES, far_apart, make, poison_memory, relative_error, with_gaps, with_range
from planted_faults import plant
from torch import Tensor

from mta_kernels.conv_attention import (
    conv_attention_decode,
    conv_attention_reference,
    explain,
    identity_weight,
    unsupported,
)
from mta_kernels.conv_attention.cuda_decode import arrivals
from mta_kernels.conv_attention.cuda_decode import plan as planning
from mta_kernels.conv_attention.cuda_decode.decode import choose_splits
from mta_kernels.conv_attention.cuda_decode.plan import choose_plan
from mta_kernels.conv_attention.triton import backend as triton_backend
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution

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


def off_by_one(x: Tensor) -> Tensor:
    """The same numbers, contiguous, but not at a multiple of 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


RAGGED = [40, 0, 300, 1, 5, 17, 6, 70]  # some shorter than the taps


@pytest.mark.parametrize("splits", ["auto", 1, 3])
def test_ragged_lengths(gpu, splits: int | str) -> None:
    inputs = make_decode(RAGGED, 1, 1, 64, (6, 11), BF16)
    assert_decodes(run(inputs, splits=splits), *inputs, rounding=4)


@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_any_number_of_programs(gpu, multiprocessors: int) -> None:
    """More sequences than a warp has threads; programs with many heads, and heads with many programs."""
    gpu.multiprocessors = multiprocessors
    for lengths in ([1, 30, 2, 90] * 9, [700]):
        inputs = make_decode(lengths, 2, 2, 64, (6, 11), BF16)
        assert_decodes(run(inputs), *inputs, rounding=4)


def test_heads_of_one_length_are_shared_evenly(gpu) -> None:
    """By as many programs each as `choose_splits` tells; longer and shorter ones by runs of equal length."""
    gpu.multiprocessors = 8
    q, k, v, weight, lengths = make_decode([300, 300], 2, 2, 64, (6, 11), BF16)
    splits = choose_splits(2, 2, 2, 300, BF16, 64, (6, 11), q.device)
    assert splits in (2, 4)  # of 8 programs, or where a GPU has more, of 64 keys or more each
    assert torch.equal(run((q, k, v, weight, lengths)), run((q, k, v, weight, lengths), splits=splits))
    lengths[1] = 200
    assert not torch.equal(run((q, k, v, weight, lengths)), run((q, k, v, weight, lengths), splits=splits))


def test_the_order_of_threads_changes_nothing(gpu) -> None:
    inputs = make_decode([200, 130], 1, 1, 64, (6, 11), BF16)
    results = []
    for gpu.seed in (0, 1, 2):
        results.append(run(inputs))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "taps", "dtype", "options"),
    [
        (128, 8, 1, (6, 11), BF16, {}),
        (128, 2, 2, (6, 11), FP16, {"scale": 0.3}),
        (32, 24, 2, (8, 17), BF16, {"pad_key": "right"}),
        (80, 1, 1, (16, 31), FP16, {"pad_key": "left"}),
        (64, 5, 1, (16, 31), BF16, {"pad_key": "right"}),
        (32, 16, 1, (1, 1), FP16, {}),
        (40, 3, 1, (1, 1), FP16, {"splits": 2}),
    ],
    ids=lambda x: f"{x[0]}x{x[1]}" if isinstance(x, tuple) else str(x),
)
def test_shapes(gpu, head_dim, heads, kv_heads, taps, dtype, options) -> None:
    for lengths in ([150, 30], [9, 3]):
        inputs = make_decode(lengths, heads, kv_heads, head_dim, taps, dtype)
        kept = {name: value for name, value in options.items() if name != "splits"}
        assert_decodes(run(inputs, **options), *inputs, rounding=4, **kept)


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


@pytest.mark.parametrize("page_size", [16, 256])
def test_pages(gpu, page_size: int) -> None:
    inputs = make_decode([16, 65, 290], 4, 1, 64, (6, 11), FP16)
    q, k, v, weight, lengths = inputs
    (k_pages, table), (v_pages, _) = paged(k, page_size), paged(v, page_size)
    used = -(-lengths // page_size)
    table[torch.arange(table.shape[1], device=DEVICE) >= used[:, None]] = 2**30  # such entries are never read
    got = run((q, k_pages, v_pages, weight, lengths), block_table=table, splits=3)
    assert_decodes(got, *inputs, rounding=4)
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_pages, v_pages)]
    dim_major = [x.mT.contiguous().mT for x in (k_pages, v_pages)]
    wide = torch.stack([table, table], dim=2).flatten(1)[:, ::2]
    for caches in (token_major, dim_major):
        other = run((q, *caches, weight, lengths), block_table=wide, splits=3)
        if ON_GPU:  # of Hopper, whose copy engine reads some of these
            assert_decodes(other, *inputs, rounding=4)
        else:
            assert torch.equal(other, got)


def test_any_layout(gpu) -> None:
    inputs = make_decode([4, 90], 6, 2, 17, (4, 6), BF16)
    q, k, v, weight, lengths = inputs
    want = run(inputs)
    assert_decodes(want, *inputs, rounding=4)

    def dim_major(x):
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    for change in (dim_major, off_by_one):
        changed = (*(change(x) for x in (q, k, v)), weight.transpose(1, 2).contiguous().transpose(1, 2), lengths.int())
        assert torch.equal(run(changed), want), change.__name__


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_any_strides_of_lengths_pages_and_weight(gpu, dtype: torch.dtype) -> None:
    q, k, v, weight, lengths = make_decode([17, 9, 30, 9], 2, 1, 64, (6, 11), FP16)
    (k, table), (v, _) = paged(k, 16), paged(v, 16)
    lengths = lengths.to(dtype)
    want = run((q, k, v, weight, lengths), block_table=table)
    got = run((q, k, v, with_gaps(weight), with_gaps(lengths)), block_table=with_gaps(table))
    assert torch.equal(got, want)
    alike = [x[:1].expand_as(x) for x in (weight, lengths, table)]
    copies = [x.clone() for x in alike]
    got, want = (run((q, k, v, weight, lengths), block_table=table) for weight, lengths, table in (alike, copies))
    assert torch.equal(got, want)


@pytest.mark.skipif(ON_GPU, reason="takes memory that only a CPU need not have")
@pytest.mark.parametrize("heads", [(3, 3), (12, 2)], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "weight", "lengths", "table"])
def test_numbers_beyond_2_to_the_31(gpu, name: str, heads: tuple[int, int]) -> None:
    """Offsets do not fit 32 bits, nor do some strides in bytes."""
    q, k, v, weight, lengths = make_decode([17, 9, 30], *heads, 64, (3, 3), FP16)
    (k, table), (v, _) = paged(k, 16), paged(v, 16)
    table = torch.cat([table, table[:, :1]], dim=1)
    given = {"q": q, "k": k, "v": v, "weight": weight, "lengths": lengths, "table": table}

    def with_table(table: Tensor, **given: Tensor) -> Tensor:
        return run(tuple(given.values()), block_table=table)

    want = with_table(**given)
    for dim in range(given[name].dim()):
        assert torch.equal(with_table(**given | {name: far_apart(given[name], dim)}), want), dim


def test_queries_of_any_layout_beside_aligned_caches(gpu) -> None:
    q, k, v, weight, lengths = make_decode(RAGGED, 1, 1, 64, (6, 11), BF16)
    want = run((q, k, v, weight, lengths))
    short = torch.stack([lengths, lengths], dim=1)[:, 0].int()
    assert torch.equal(run((torch.stack([q, q], dim=4)[..., 0], k, v, weight, short)), want)
    assert torch.equal(run((off_by_one(q), k, v, weight, short)), want)


@pytest.mark.parametrize("window", [3, 9])
def test_window_of_any_size(gpu, window: int) -> None:
    """Shorter than the convolution while the sequence is, or longer than it looks back."""
    inputs = make_decode([1, 2, 3] if window == 3 else [1, 5, 120], 1, 1, 64, (6, 11), BF16, window=window)
    assert_decodes(run(inputs), *inputs, rounding=4)


def test_every_row_of_the_forward(gpu) -> None:
    """One sequence a row, all in one ragged batch; nothing is read of queries before the first."""
    rows = 24
    q, k, v, weight = make(1, 1, 1, rows, 64, (6, 11), BF16)
    whole = conv_attention_reference(*(x.double() for x in (q, k, v, weight)))
    before = torch.cat([torch.full_like(q[:, :, :5], float("nan")), q], 2)
    windows = before[0].unfold(1, 6, 1).permute(1, 0, 3, 2)  # [rows, Hq, cq, D]
    lengths = torch.arange(1, rows + 1, device=DEVICE, dtype=torch.int32)
    got = run((windows, *(x.expand(rows, -1, -1, -1) for x in (k, v)), weight, lengths))
    for row in range(rows):
        assert relative_error(got[row, :, 0], whole[0, :, row]) < 0.02, row


def test_float32_weight_and_the_identity(gpu) -> None:
    inputs = make_decode(RAGGED, 1, 1, 64, (6, 11), BF16)
    q, k, v, weight, lengths = inputs
    exact_weight = (q, k, v, weight.float() * 1.001, lengths)
    assert_decodes(run(exact_weight), *inputs[:3], *exact_weight[3:], rounding=4)
    plain = identity_weight(1, 6, 11, dtype=BF16, device=DEVICE)
    assert_decodes(run((q, k, v, plain, lengths)), q, k, v, plain, lengths, rounding=4)


@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 300.0])
def test_scores_of_any_size(gpu, magnitude: float) -> None:
    inputs = make_decode([5, 70, 200], 1, 1, 64, (6, 11), BF16, magnitude=magnitude)
    assert_decodes(run(inputs), *inputs, rounding=4)


def test_very_negative_scores(gpu) -> None:
    """Every true score far below zero: a masked zero must not win the softmax."""
    q, k, v, weight, lengths = make_decode([3, 200], 1, 1, 64, (6, 11), BF16)
    inputs = (q.abs() * 5, -k.abs() * 5, v, weight.abs() + 0.1, lengths)
    assert_decodes(run(inputs, splits=2), *inputs, rounding=4)


@pytest.mark.parametrize(("heads", "dtype"), [(4, FP16), (8, BF16)])
def test_sequences_and_heads_are_independent(gpu, heads: int, dtype: torch.dtype) -> None:
    gpu.shared_memory = 40_000  # a warp takes one tile after another
    inputs = q, k, v, weight, lengths = make_decode([50, 150, 20, 0], heads, 1, 64, (6, 11), dtype)
    check_independence(lambda *inputs: run(inputs, splits=1), inputs)
    alone = run((q[1:2], k[1:2], v[1:2], weight, lengths[1:2]), splits=1)
    assert torch.equal(alone, run(inputs, splits=1)[1:2])


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


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_as_one_graph(gpu, dynamic: bool | None) -> None:
    inputs = make_decode(RAGGED, 1, 1, 64, (6, 11), BF16)
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(compiled(inputs), run(inputs))


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
