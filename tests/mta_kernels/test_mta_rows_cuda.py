"""The CUDA row kernels against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from emulated_rows import H200, emulated_rows  # noqa: F401
from kernel_inputs import DEVICE, relative_error
from mta_rows import Chunk, exact, exact_backward, make_chunk
from planted_faults import plant
from torch import Tensor

from mta_kernels.gpu_limits import gpu_of
from mta_kernels.multi_token_attention.rows_cuda import mix_rows, mix_rows_backward, rows
from mta_kernels.multi_token_attention.rows_cuda import plan as planning
from mta_kernels.multi_token_attention.rows_cuda.plan import RowConstants, RowPlan, plan_on, segment_of
from mta_kernels.nvrtc import compiler

ON_GPU = DEVICE == "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
A100, RTX_4090 = 166912, 101376  # bytes of shared memory a block


@pytest.fixture
def gpu(request: pytest.FixtureRequest):
    """The row kernels run, in the emulator where there is no GPU, whose fields may then be changed."""
    return SimpleNamespace(capability=(9, 0)) if ON_GPU else request.getfixturevalue("emulated_rows")


def forward(chunk: Chunk, **options) -> tuple[Tensor, Tensor]:
    """Mixed probabilities and logsumexp by the kernel."""
    mixed, logsumexp = chunk.scores.clone(), chunk.logsumexp()
    mix_rows(mixed, chunk.pre_mix, chunk.post_mix, logsumexp, **chunk.options, **options)
    return mixed, logsumexp


def assert_near(got: Tensor, want: Tensor, eager: Tensor) -> None:
    """As near to float64 as twice eager's error, in all and in each row of each head; eager may overflow."""
    unit = torch.finfo(got.dtype).eps
    norm = want.norm(dim=-1).clamp_min(1e-300)
    of_eager = torch.nan_to_num(((eager - want).norm(dim=-1) / norm).amax(), nan=0)
    assert relative_error(got, want) <= max(torch.tensor(2 * relative_error(eager, want)).nan_to_num(nan=0), unit / 2)
    assert ((got - want).norm(dim=-1) / norm).amax() <= max(2 * of_eager, 2 * unit)


def assert_mixes(chunk: Chunk, **options) -> None:
    """Near to float64; zeros where a row does not see."""
    mixed, logsumexp = forward(chunk, **options)
    want, sums, _ = exact(chunk)
    assert (mixed[~chunk.visible.expand_as(mixed)] == 0).all()
    assert_near(mixed, want, exact(chunk, chunk.scores.dtype)[0])
    torch.testing.assert_close(logsumexp.double(), sums, rtol=2e-6, atol=2e-5)


def backward(chunk: Chunk, **options) -> tuple[Tensor | None, ...]:
    """Mixed probabilities, gradients of scores, pre_mix and post_mix by the kernel."""
    mixed, gradients = chunk.scores.clone(), chunk.gradients.clone()
    logsumexp = exact(chunk)[1].float()
    mixes = chunk.pre_mix, chunk.post_mix
    return mixed, gradients, *mix_rows_backward(mixed, gradients, *mixes, logsumexp, **chunk.options, **options)


def assert_differentiates(chunk: Chunk, **options) -> None:
    """Near to float64; zeros where a row does not see."""
    mixed, *gradients = backward(chunk, **options)
    dtype = chunk.scores.dtype
    assert_near(mixed, exact(chunk)[0], exact(chunk, dtype)[0])
    assert (mixed[~chunk.visible.expand_as(mixed)] == 0).all()
    assert (gradients[0][~chunk.visible.expand_as(mixed)] == 0).all()
    unit = torch.finfo(dtype).eps
    for got, want, eager in zip(gradients, exact_backward(chunk), exact_backward(chunk, dtype), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert relative_error(got, want) <= max(2 * relative_error(eager, want), 2 * unit)
            norm = want.norm(dim=-1).clamp_min(want.norm() / want[..., 0].numel() ** 0.5 * 1e-2 + 1e-300)
            worst, of_eager = (((x - want).norm(dim=-1) / norm).amax() for x in (got, eager))
            assert worst <= max(2 * of_eager, 2 * unit)


def plan_of(
    chunk: Chunk, *, cluster: int = 1, warps: int = 4, stages: int = 1, backward: bool = False, bulk=True
) -> RowPlan:
    """A plan other than the one that would be chosen."""
    mixed = (chunk.pre_mix is not None, chunk.post_mix is not None)
    if ON_GPU and not 9 <= torch.cuda.get_device_capability()[0] < 12:
        cluster, bulk = 1, False
    constants = RowConstants(chunk.scores.dtype, chunk.scores.shape[1], backward, *mixed, bulk, cluster, warps, 1)
    return RowPlan(constants, segment_of(chunk.keys, cluster), stages)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_a_cluster_shares_a_row(gpu, cluster: int) -> None:
    chunk = make_chunk(2, 16, 4, 500, room=24)
    assert_mixes(chunk, plan=plan_of(chunk, cluster=cluster, warps=2, stages=2))
    assert_differentiates(chunk, plan=plan_of(chunk, cluster=cluster, warps=2, stages=2, backward=True))


@pytest.mark.parametrize(
    ("heads", "dtype", "cluster", "warps", "mixed"),
    [
        (10, BF16, 2, 1, (True, True)),
        (1, FP16, 1, 2, (True, True)),
        (24, FP16, 1, 4, (True, False)),
        (48, BF16, 1, 4, (True, True)),
        (64, FP16, 2, 2, (False, True)),
        (16, FP16, 1, 1, (False, False)),
    ],
    ids=str,
)
def test_heads(gpu, heads: int, dtype: torch.dtype, cluster: int, warps: int, mixed: tuple[bool, bool]) -> None:
    for keys, causal in ((200, True), (77, False)):
        chunk = make_chunk(1, heads, 3, keys, dtype=dtype, causal=causal, mixed=mixed, mix_dtype=torch.float32)
        assert_mixes(chunk, plan=plan_of(chunk, cluster=cluster, warps=warps, stages=3))
        if heads <= 32:
            plan = plan_of(chunk, cluster=cluster, warps=warps, stages=3, backward=True)
            assert_differentiates(chunk, plan=plan)


def test_documents(gpu) -> None:
    for causal in (True, False):
        chunk = make_chunk(2, 16, 9, 150, causal=causal, above=70, starts=[0, 13, 72, 73, 144, 148], room=200)
        assert_mixes(chunk, plan=plan_of(chunk, cluster=2, warps=2, stages=2))
        assert_differentiates(chunk, plan=plan_of(chunk, cluster=2, warps=2, stages=2, backward=True))


def test_keys_that_are_not_whole_units(gpu) -> None:
    for keys, count in ((1, 1), (2, 2), (7, 7), (9, 4), (65, 3), (129, 2)):
        chunk = make_chunk(1, 16, count, keys, room=8)
        assert_mixes(chunk, plan=plan_of(chunk, cluster=2, warps=1))
        assert_differentiates(chunk, plan=plan_of(chunk, cluster=2, warps=1, backward=True))


def test_without_a_copy_engine(gpu) -> None:
    gpu.capability = (8, 0)
    for chunk in (
        make_chunk(2, 16, 5, 300, room=96),
        make_chunk(1, 16, 9, 150, causal=False, above=70, starts=[0, 13, 72, 73, 144, 148]),
    ):
        assert_mixes(chunk, plan=plan_of(chunk, bulk=False))
        assert_differentiates(chunk, plan=plan_of(chunk, bulk=False, backward=True))
    chunk = make_chunk(1, 10, 5, 130, dtype=FP16)
    assert_mixes(chunk, plan=plan_of(chunk, bulk=False, warps=2))


@pytest.mark.parametrize("size", [1e-3, 40.0, 20000.0])
def test_small_and_large_scores(gpu, size: float) -> None:
    """Differences of large logits are as exact as eager's, although 2^x - 2^y could not be told apart from x and y."""
    chunk = make_chunk(1, 16, 3, 200, dtype=FP16, size=size)
    chunk.scores[:, :, :, 5::7] = 65504.0 if size > 1e4 else 0.0
    chunk.scores.masked_fill_(~chunk.visible, float("nan"))
    assert_mixes(chunk, plan=plan_of(chunk, cluster=2, warps=2))


@pytest.mark.parametrize("cluster", [2, 1])
@pytest.mark.parametrize("size", [1e9, 1e17, -1e17])
def test_logits_whose_rounding_exponentials_cannot_hold(gpu, size: float, cluster: int) -> None:
    """A document of huge scores has right probabilities, and changes nothing in those beside it.

    Two blocks share a row, or one has it without a copy engine.
    """
    chunk = make_chunk(1, 16, 9, 150, causal=False, above=70, starts=[0, 13, 72, 75, 144, 148])
    blocks = {"cluster": cluster, "warps": 2, "bulk": cluster > 1}
    usual = plan_of(chunk, **blocks), plan_of(chunk, **blocks, backward=True)
    before = *forward(chunk, plan=usual[0]), *backward(chunk, plan=usual[1])[:2]
    chunk.scores[:, :, 2:5] *= size
    mixed, logsumexp = forward(chunk, plan=usual[0])
    after = mixed, logsumexp, *backward(chunk, plan=usual[1])[:2]
    assert_near(mixed, exact(chunk)[0], exact(chunk, torch.float32)[0])
    assert all(torch.isfinite(x).all() for x in after)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :, :2], y[:, :, :2])
        assert torch.equal(x[:, :, 5:], y[:, :, 5:])
    assert_near(after[2], exact(chunk)[0], exact(chunk, torch.float32)[0])


def test_a_row_of_nan_stays_in_its_document(gpu) -> None:
    """Its gradients are zero at keys of other documents, which lie in the same tile."""
    chunk = make_chunk(1, 16, 9, 150, causal=False, above=70, starts=[0, 13, 72, 75, 144, 148])
    chunk.scores[:, :, 3, 72:75] = torch.nan
    mixed, gradients, *_ = backward(chunk, plan=plan_of(chunk, warps=2, backward=True))
    for x in (mixed, gradients):
        assert x[:, :, 3, 72:75].isnan().all()
        assert (x.masked_fill(chunk.visible, 0) == 0).all()


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("much", [1000, -1000])
def test_large_logits_of_heads_that_fill_no_tile(gpu, much: float, mixed: bool) -> None:
    """A tile's other heads, whose logits are zero if mixed, do not have the last head's logsumexp."""
    chunk = make_chunk(1, 10, 3, 20, mixed=(mixed, True))
    chunk.scores += much
    if mixed:
        chunk.pre_mix.copy_(torch.eye(10))
    assert_mixes(chunk, plan=plan_of(chunk))
    assert_differentiates(chunk, plan=plan_of(chunk, backward=True))


@pytest.mark.parametrize("starts", [None, [0, 13, 72, 73, 144, 148]])
def test_each_sequence_and_document_has_a_loss_scale(gpu, starts: list[int] | None) -> None:
    chunk = make_chunk(3 - 2 * bool(starts), 5, 9, 150, causal=False, above=70, dtype=FP16, starts=starts)
    scale = torch.exp2(torch.arange(3.0 if starts is None else 150.0, device=DEVICE) % 5 - 2)
    of_rows = scale[:, None, None, None]
    if chunk.documents is not None:  # the same in all of a document
        scale = scale[chunk.documents[0].long()]
        of_rows = scale[70:79, None]
    mixed, grad, dpre, dpost = backward(chunk)
    scaled = replace(chunk, gradients=(chunk.gradients * of_rows).to(FP16))
    of_scaled = backward(scaled, loss_scale=scale)
    assert torch.equal(of_scaled[0], mixed)
    torch.testing.assert_close(of_scaled[1], (grad * of_rows).to(FP16), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(of_scaled[2:], (dpre, dpost), rtol=1e-4, atol=1e-4)


def test_equal_scores_are_the_mean(gpu) -> None:
    chunk = make_chunk(1, 16, 2, 100)
    chunk.scores[:] = -3.0
    assert_mixes(chunk, plan=plan_of(chunk, cluster=2, warps=2))


def test_the_order_of_threads_changes_nothing(gpu) -> None:
    chunk = make_chunk(2, 16, 3, 300)
    results = []
    for seed in range(4):
        gpu.seed = seed
        both = forward(chunk, plan=plan_of(chunk, cluster=2, warps=2, stages=2))
        both += backward(chunk, plan=plan_of(chunk, cluster=2, warps=2, stages=2, backward=True))
        results.append(both)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_the_chosen_plan_runs(gpu) -> None:
    assert_mixes(make_chunk(1, 16, 3, 300))
    assert_differentiates(make_chunk(1, 16, 3, 300))
    gpu.shared_memory = 20000
    assert_mixes(make_chunk(1, 16, 3, 300))


@pytest.mark.parametrize(("capability", "shared_memory"), [((9, 0), H200), ((8, 0), A100), ((8, 9), RTX_4090)])
def test_a_plan_fits_every_gpu(capability: tuple[int, int], shared_memory: int) -> None:
    found = 0
    for heads in (1, 10, 16, 32, 64):
        for keys in (1, 40, 1000, 2048, 4096, 16384, 40000):
            for backward in (False, True):
                chosen = plan_on(capability, shared_memory, BF16, heads, keys, backward=backward)
                if chosen is None:
                    continue
                found += 1
                constants = chosen.constants
                assert chosen.shared_memory <= shared_memory
                assert chosen.segment * constants.cluster >= keys
                assert constants.threads * constants.blocks <= 1536
                assert capability[0] == 9 or (constants.cluster == 1 and not constants.bulk)
    assert found > 20


def test_what_does_not_fit_is_refused(emulated_rows) -> None:  # noqa: F811
    cpu = gpu_of(torch.device("cpu"))  # the Hopper GPU that is played there
    assert rows.shape_unsupported(cpu, BF16, 16, 16384, False) is None
    assert "do not fit" in rows.shape_unsupported(cpu, BF16, 16, 200_000, False)
    assert "more than the 64" in rows.shape_unsupported(cpu, BF16, 65, 100, False)
    assert "float32" in rows.shape_unsupported(cpu, torch.float32, 16, 100, False)
    chunk = make_chunk(1, 2, 2, 20)
    for wrong in (chunk.scores[..., :20], chunk.scores[..., 1:], chunk.scores[:, :, :, ::2]):
        with pytest.raises(ValueError, match="expected contiguous rows"):
            mix_rows(wrong, None, None, chunk.logsumexp(), **chunk.options)
    chunk = make_chunk(1, 16, 1, 120_000)
    with pytest.raises(ValueError, match="do not fit"):
        mix_rows(chunk.scores, None, None, chunk.logsumexp(), **chunk.options)


@pytest.mark.parametrize(
    ("architecture", "capability", "limit", "heads", "keys", "backward"),
    [
        ("sm_80", (8, 0), A100, 16, 2048, False),
        ("sm_86", (8, 6), RTX_4090, 10, 1024, False),
        ("sm_90a", (9, 0), H200, 16, 4096, False),
        ("sm_90a", (9, 0), H200, 64, 2048, False),
        ("sm_80", (8, 0), A100, 16, 1024, True),
        ("sm_90a", (9, 0), H200, 16, 4096, True),
        ("sm_90a", (9, 0), H200, 32, 4096, True),
    ],
)
def test_it_compiles_without_spills(architecture, capability, limit, heads, keys, backward) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    chosen = plan_on(capability, limit, BF16, heads, keys, backward=backward)
    code, words = compiler.compile_source(chosen.constants.source(architecture))
    assert code.startswith(b"\x7fELF")
    if "ptxas info" not in words:
        pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
    assert words.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("rows.cuh", "barrier_wait(shared + FULL_AT + 8 * turn.stage, turn.round);", ""),
        ("copies.cuh", "barrier_wait(shared + DONE_AT + 8 * going.stage, going.round);", ""),
        ("copies.cuh", "            stores_wait();\n            waiting--;", "            waiting--;"),
        ("sums.cuh", "received.next(2);", "received.next(1);"),
        ("backward.cu", "if (!row.sees(position + i / 2 * 8)) a[i] &= 0xFFFF0000u;", ""),
    ],
    ids=["no wait", "stored too soon", "a load over a store", "one slot for sums", "hidden columns"],
)
def test_the_emulator_finds_what_a_gpu_may_hide(emulated_rows, monkeypatch, tmp_path, name, line, instead) -> None:  # noqa: F811
    if ON_GPU:
        pytest.skip("the emulator takes tensors of the CPU")
    chunk = make_chunk(2, 16, 4, 150)
    want = exact(chunk)[0], *exact_backward(chunk)
    plant(monkeypatch, planning, tmp_path / "rows_cuda", name, line, instead)
    found = False
    for emulated_rows.seed in range(8):
        try:
            got = backward(chunk, plan=plan_of(chunk, cluster=4, warps=1, backward=True), clusters=1)
        except AssertionError:  # the emulator's own
            found = True
        else:
            found |= not all(relative_error(x, y) < 0.02 for x, y in zip(got, want, strict=True))
    assert found


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [2048, 4096, 8192, 16384])
@pytest.mark.parametrize(("heads", "dtype"), [(16, BF16), (10, FP16)])
def test_long_rows(heads: int, dtype: torch.dtype, keys: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for causal in (True, False):
        chunk = make_chunk(2, heads, 20, keys - 3, dtype=dtype, causal=causal, above=100, room=8)
        if rows.shape_unsupported(gpu_of(device), dtype, heads, keys, False) is None:
            assert_mixes(chunk)
        if rows.shape_unsupported(gpu_of(device), dtype, heads, keys, True) is None:
            assert_differentiates(chunk)


@pytest.mark.gpu
def test_more_numbers_than_2_to_31() -> None:
    chunk = make_chunk(1, 16, 4, 2048)
    count = 2**31 // (16 * 2048) + 8
    scores = torch.zeros(1, 16, count, 2048, dtype=BF16, device=DEVICE)
    scores[:, :, -4:] = chunk.scores
    logsumexp = torch.empty(1, 16, count, device=DEVICE)
    options = {**chunk.options, "first_position": 2048 - count}  # the first rows see nothing
    mix_rows(scores, chunk.pre_mix, chunk.post_mix, logsumexp, **options)
    assert_near(scores[:, :, -4:], exact(chunk)[0], exact(chunk, BF16)[0])
    assert (scores[:, :, : count - 2048] == 0).all()
