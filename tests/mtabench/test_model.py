"""The model of times: held against the committed results, and against counts made by hand."""

import csv
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from changed_cases import with_changes
from command_line import make_runner, refused

from mta_kernels.conv_attention.banded import backward_plan
from mta_kernels.conv_attention.cuda_decode import backend
from mta_kernels.conv_attention.cuda_sm80.backward_constants import constants_for
from mta_kernels.conv_attention.cuda_sm80.forward import ForwardConstants, multiply_adds
from mta_kernels.conv_attention.hopper import backward, backward_scratch, forward
from mta_kernels.operation import Convolution, Operation
from mtabench.errors import UsageError
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import keep_ceilings
from mtabench.model import banded, fused, mma
from mtabench.model.devices import DEVICES, find_device, rates_of
from mtabench.model.fused import Tiles
from mtabench.model.kernel import Kernel, scores, time_of
from mtabench.model.tiles import tiles_of
from mtabench.prediction.predict import kernels_of, predict, tiles_on, unmodelled
from mtabench.problem.case import Case
from mtabench.results.results_file import read_file
from mtabench.sweeps.estimate import RATES, call_seconds

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
H200, A100 = find_device("h200"), find_device("a100")
WITHIN, LONG = 0.25, 4096
CONV = Case("fwd", "triton", Operation.of((6, 11), 64), "bf16", 1, 1, 1, 128, 64, None, "cuda")


HOPPER, CUDA = replace(CONV, impl="hopper"), replace(CONV, impl="cuda")
# Of results of one GPU; those of multi-token attention are in test_mta_model.py.
FILES = (
    "fwd", "bwd", "decode", "decode-groups", "decode-splits", "hopper-bwd", "hopper-fwd", "ladder", "long-bwd",
    "long-fwd", "cuda-fwd", "cuda-bwd", "sm80-fwd", "sm80-bwd",
)  # fmt: skip
GROUPS_BY_TRITON = "history/decode-groups-29390ce71324"  # the newest file with these


def case_of(row):
    return Case.of_row({**row, "causal": row["causal"] == "true"}, "cuda")


def predicted(case, device=H200):
    return predict(case, device, rates_of(device), tiles_on(case, device))


def measured_cells():
    """Each time in ms of the results files, its cell, and how far off the prediction is."""
    for name in FILES:
        for row in read_file(RESULTS / f"{name}.csv").rows():
            case = case_of(row)
            if row["status"] == "ok" and not unmodelled(case) and not is_of_other_kernels(name, case):
                yield case, name, predicted(case).seconds * 1e3 / float(row["median_ms"]) - 1


def is_of_other_kernels(file, case):
    """Whether a file's results are of kernels of another GPU, or of an earlier commit."""
    return (file, case.impl) in (("sm80-fwd", "triton"), ("sm80-bwd", "triton"), ("cuda-bwd", "cuda"))


def test_every_modelled_cell_of_the_committed_results_is_within_25_percent():
    off = [(case, name, error) for case, name, error in measured_cells() if case.seq >= LONG]
    assert {case.impl for case, *_ in off} >= {"eager", "triton", "hopper", "cuda", "sdpa-flash", "sdpa-cudnn"}
    assert len(off) > 200
    assert [one for one in off if abs(one[-1]) > WITHIN] == []


def test_the_cuda_kernels_are_within_15_percent_forward_from_1024_tokens_on_and_backward_from_4096():
    off = [(case, name, error) for case, name, error in measured_cells() if case.impl == "cuda"]
    lengths = {("fwd", 1024), *itertools.product(("fwd", "bwd"), (4096, 16384))}
    assert {(case.pass_, case.seq) for case, *_ in off} == lengths
    assert [one for one in off if abs(one[-1]) > 0.15] == []


def test_of_a_decode_of_four_sharing_heads_by_triton_it_predicts_21_to_30_percent_less():
    rows = [row for row in read_file(RESULTS / f"{GROUPS_BY_TRITON}.csv").rows() if row["impl"] == "triton"]
    off = [predicted(case_of(row)).seconds * 1e3 / float(row["median_ms"]) - 1 for row in rows]
    assert off
    assert all(-0.3 < error < -0.2 for error in off)


@pytest.mark.parametrize(("pass_", "head_dim"), [*itertools.product(("fwd", "bwd"), (64, 96, 128))])
def test_on_an_a100_it_agrees_with_the_rule_by_which_auto_takes_cuda(pass_, head_dim):
    case = replace(CUDA, pass_=pass_, batch=4, heads=16, kv_heads=16, seq=4096, head_dim=head_dim)
    of_triton = (6 + 1) * head_dim
    assert multiply_adds(head_dim, 6, 11) <= backend.MOST_MULTIPLY_ADDS * of_triton
    assert predicted(case, A100).gpu_s < 0.75 * predicted(replace(case, impl="triton"), A100).gpu_s


def test_the_splits_of_auto_are_those_that_the_kernels_took():
    names = ("decode", "decode-groups", GROUPS_BY_TRITON)
    rows = [row for name in names for row in read_file(RESULTS / f"{name}.csv").rows()]
    taken = {
        case_of(row): int(row["splits_used"]) for row in rows if (row["impl"], row["splits"]) == ("triton", "auto")
    }
    assert len(taken) > 15
    assert {case: tiles_of(case, H200).splits for case in taken} == taken


def test_so_is_a_backward_of_a_shape_that_nothing_was_calibrated_on():
    """One sequence of 131072 tokens and 16 heads of 128 on an H200; a row that is not kept."""
    case = replace(CONV, pass_="bwd", heads=16, kv_heads=16, seq=131072, head_dim=128)
    assert predicted(case).seconds * 1e3 == pytest.approx(1406, rel=WITHIN)


def test_tiles_stop_at_the_diagonal():
    assert scores(256, 64, 64, causal=True) == 64 * 64 * (1 + 2 + 3 + 4)
    assert scores(256, 128, 64, causal=True) == 128 * (128 + 256)
    assert scores(200, 128, 128, causal=True) == 128 * (128 + 256)
    assert scores(200, 128, 128, causal=False) == 256 * 256


def test_a_forward_multiplies_taps_times_head_dim_for_each_score_and_head_dim_for_its_value():
    kernel = {one.name: one for one in fused.forward(CONV, Tiles(forward=(64, 64)), 132)}["_conv_attention_fwd"]
    assert kernel.macs == 3 * 64 * 64 * (6 * 64 + 64)
    assert kernel.exponentials == 3 * 64 * 64
    assert kernel.l2_bytes == 3 * 64 * 64 * ((6 * 64 + 64) * 2 / 64 + 6 * 64 * 2 / 64)
    rows = 128 * 64 * 2  # bytes of q
    assert kernel.memory_bytes == rows + 6 * rows + rows + rows + 128 * 16 * 4  # Q', K', V, out, band
    # Fewer taps over keys than over queries: those are folded, and the depth is theirs.
    wide = with_changes(CONV, taps=(11, 3))
    assert {one.name: one for one in fused.forward(wide, Tiles(), 132)}[
        "_conv_attention_fwd"
    ].macs == 128 * 128 * 4 * 64


def test_a_backward_has_three_passes_of_the_depth_and_two_of_the_head_dim():
    kernels = fused.backward(CONV, Tiles(), 132)
    passes = [one for one in kernels if one.macs and one.name != "_prepare"]
    assert sum(one.macs for one in passes) == 128 * 128 * (3 * 6 + 2) * 64
    assert (
        len([one for one in fused.backward(with_changes(CONV, causal=False), Tiles(), 132) if "band" in one.name]) == 0
    )
    chunks = {one.name: one.launches for one in fused.backward(replace(CONV, seq=5000), Tiles(), 132)}
    assert (chunks["_probabilities"], chunks["_row_product"], chunks["_expand_transposed"]) == (3, 3, 1)


def tile_of(kernel, tiles=None):
    """What a tile of 64 x 64 of a Hopper kernel needs: cycles of the tensor cores and of shared memory of one SM."""
    tiles = tiles or kernel.exponentials / 64**2
    return kernel.macs / tiles / 2048, kernel.shared_bytes / tiles / 128


def test_cycles_of_a_tile_of_the_hopper_kernels():
    """Tensor cores: products by 2048 a cycle. Shared memory, 128 bytes a cycle: operands, stored scores, copies."""
    convolution = 4 * (8 + 5 * 24)  # 16 columns at a time: T, and for shifted rows A
    assert tile_of(banded.forward(HOPPER, 132)[1]) == (
        128 + 384 + 128, pytest.approx(64 + 48 + convolution + 64 + 64 + 128 / 3),
    )  # fmt: skip
    assert tile_of(banded.forward(replace(HOPPER, head_dim=128), 132)[1]) == (
        256 + 384 + 256, 128 + convolution + 128 + 64 + 8 / 2 + 256 / 2,
    )  # fmt: skip
    # Both row products, both convolutions, the weight's (8 slabs of 64 rows), dq; stores, last columns, rows that one
    # warpgroup passes to the other, copies.
    backward = replace(HOPPER, pass_="bwd", head_dim=128)
    assert tile_of(banded.backward_rows(backward, 132)) == (
        2 * 256 + 2 * 384 + 384 + 256,
        2 * 256 + 2 * convolution + 32 * 22 + 128 + 2 * 64 + 32 + 42 + 384 / 2,
    )  # fmt: skip
    # Its products, of p and of ds: two blocks of 64 rows of 256 places each; a quarter of the right side's copy.
    assert tile_of(banded.backward_products(backward, 132), 2 * 2 * 4) == (256, 64 + 128 + 64 + 32)


def test_rows_that_only_feed_the_convolution_are_computed_too():
    def tiles(case):
        kernels = {one.name: one for one in kernels_of(case, Tiles(), H200)}
        return kernels[f"hopper_{'forward' if case.pass_ == 'fwd' else 'backward'}"].exponentials / 64**2

    # 59 rows of 64, 8 columns beyond the scores: rows to 59, 118, 128 see 1, 2 and 3 tiles; without taps 2 of 64.
    assert tiles(HOPPER) == 2 + 2 + 3
    assert tiles(with_changes(HOPPER, taps=(1, 1))) == 1 + 2
    assert tiles(with_changes(HOPPER, causal=False)) == 3 * 3
    # 118 rows of 128, 16 columns: rows to 118 and to 128 see 3 tiles, of which each warpgroup works on its rows.
    assert tiles(replace(HOPPER, pass_="bwd")) == 2 * (3 + 3)
    # Two warpgroups compute one halo, so that theirs are rows to 59, 123 and 128, with 3 tiles for the second.
    assert tiles(replace(HOPPER, head_dim=128)) == 2 + 3 + 3
    assert tiles(replace(HOPPER, head_dim=192)) == 2 * (2 + 3 + 3)  # each half of v's columns has all scores


def test_blocks_of_the_hopper_kernels_are_those_that_are_launched():
    for head_dim in (16, 64, 72, 128, 192, 256):
        geometry = forward.ForwardConstants(torch.bfloat16, head_dim, Convolution(6, 11, 5), True, False)
        assert banded.forward_warpgroups(head_dim) == geometry.warpgroups
        assert sum(banded.forward_rows(head_dim, 6)) == geometry.block_rows
        assert -(-head_dim // banded.MOST_VALUES) == geometry.value_parts
    for taps in (1, 6, 8):
        geometry = backward.BackwardConstants(torch.bfloat16, 64, Convolution(taps, 11, 5), True, False)
        assert banded.backward_block_rows(taps) == geometry.block_rows
    assert (banded.MOST_BACKWARD, banded.MOST_TAPS) == (
        forward.MAX_BACKWARD_HEAD_DIM, (forward.QUERY_TAPS, forward.KEY_TAPS),
    )  # fmt: skip


@pytest.mark.parametrize("taps", [1, 6, 8])
def test_chunks_of_the_hopper_backward_are_those_of_its_launch(taps):
    """The model, which knows nothing of torch, works them out once more."""
    geometry = backward.BackwardConstants(torch.bfloat16, 64, Convolution(taps, 11, 5), True, False)
    lengths = [1, 100, 4096, 16384, 131072, 10**6, *(int(1.17**n) for n in range(30, 90))]
    for batch, heads, seq in itertools.product((1, 3), (1, 2, 7, 8, 16, 40, 64), lengths):
        case = with_changes(HOPPER, pass_="bwd", batch=batch, heads=heads, seq=seq, taps=(taps, 11))
        for sm_count in (132, 114, 78):
            plan = backward_plan.ChunkPlan.of(geometry, batch * heads, seq, seq, sm_count)
            chunks = banded.chunks_of(case, sm_count)
            assert chunks == (plan.row_blocks * geometry.block_rows, plan.chunks, plan.slots)
            assert banded.scratch_pitch(seq) == plan.pitch
        layout = backward_scratch.ScratchLayout.of(
            geometry, backward_plan.ChunkPlan.of(geometry, batch * heads, seq, seq, 132), batch, heads, heads, seq, 0
        )
        assert banded.scratch_bytes(case) == layout.stored


@pytest.mark.parametrize("head_dim", [64, 112, 120, 128, 136, 224, 232, 256])
def test_the_scratch_of_the_cuda_backward_is_that_of_its_launch(head_dim):
    geometry = constants_for(torch.bfloat16, head_dim, Convolution(6, 11, 5), True, False, 227 * 1024)
    for heads, seq in itertools.product((1, 16), (100, 4096, 16384, 131072)):
        case = with_changes(HOPPER, pass_="bwd", impl="cuda", heads=heads, seq=seq, head_dim=head_dim)
        plan = backward_plan.ChunkPlan.of(geometry, case.batch * heads, seq, seq, 132 * geometry.tiles.blocks)
        assert banded.scratch_bytes(case) == 4 * plan.slots * plan.row_blocks * geometry.block_rows * plan.pitch


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("device", ["a100", "h200"])
def test_tiles_and_chunks_of_the_cuda_kernels_are_those_of_their_launches(device, head_dim):
    device = find_device(device)
    shape = torch.bfloat16, head_dim, Convolution(6, 11, 5), True, False, {108: 163, 132: 227}[device.sm_count] * 1024
    case = replace(CUDA, head_dim=head_dim, heads=16, kv_heads=16, seq=5000)
    one, tiles = ForwardConstants(*shape), tiles_on(case, device)
    assert tiles.forward == (one.block_rows + 5, one.keys) == (128, 32 if (head_dim, device) == (128, A100) else 64)
    assert (tiles.blocks, tiles.in_registers) == (2, head_dim == 64)
    (kernel,) = kernels_of(case, tiles, device)
    assert kernel.waves == 16 * -(-5000 // one.block_rows) / (2 * device.sm_count)
    found, back = constants_for(*shape), replace(case, pass_="bwd")
    tiles = tiles_on(back, device)
    assert (tiles.probabilities[0] - 10, tiles.blocks) == (found.block_rows, found.tiles.blocks)
    at_once = device.sm_count * found.tiles.blocks
    plan = backward_plan.ChunkPlan.of(found, 16, 5000, 5000, at_once)
    chunks = banded.chunks_of(back, at_once, rows=found.block_rows)
    assert chunks == (plan.row_blocks * found.block_rows, plan.chunks, plan.slots)


def test_counts_of_the_cuda_kernels():
    """A warp of 32 rows and 32 columns, by hand; of three eights one makes a product of half the depth."""
    case, tiles = replace(CUDA, seq=123), Tiles(forward=(128, 64), in_registers=True, blocks=2)
    (kernel,) = mma.forward(case, tiles, 132)
    # The halo of 5 rows leaves warps whose last rows are 26, 58, 90 and 122.
    chunks = 1 + 2 + 3 + 4
    assert kernel.exponentials == chunks * 32 * 32
    assert kernel.macs == pytest.approx(chunks * 32 * 32 * (64 + 6 * 16 * (1 + 2 / 3) + 64))
    # 512 bytes a load: keys and values, 7 sets of rows of 3 loads and 6 of taps; stores, and copies of 128 rows.
    assert kernel.shared_bytes == chunks * ((8 + 8 + 7 * 3 + 6) * 512 + 32 * 32 * 2 + 32 * 32 * 2 * 64 * 2 / 128)
    back = {one.name: one for one in mma.backward(replace(case, seq=118), Tiles(probabilities=(128, 64)), 132)}
    of_rows = 2 * 64 + 2 * 160 + 3 * 3 * 16  # scores, dp, both convolutions, the weight
    assert back["cuda_backward"].macs == pytest.approx(chunks * 32 * 32 * (of_rows + 3 * 64))


def test_a_hopper_backward_is_one_launch_of_rows_and_products():
    case = replace(HOPPER, pass_="bwd", seq=5000, heads=2)
    kernel = kernels_of(case, Tiles(), H200)[1]
    parts = banded.backward_rows(case, 132), banded.backward_products(case, 132)
    assert (kernel.name, kernel.launches) == ("hopper_backward", 1)
    assert all(getattr(kernel, name) == sum(getattr(part, name) for part in parts) for name in ("macs", "memory_bytes"))
    assert banded.chunks_of(case) == (22 * 118, 2, 4)


def test_a_kernel_takes_its_products_and_exponentials_or_its_slowest_memory_and_what_nothing_hides():
    rates = rates_of(H200)
    busy = Kernel(
        "k", macs=rates.macs, tensor_share=0.5, exponentials=rates.exponentials, memory_bytes=rates.memory_bytes
    )
    time = time_of(replace(busy, waves=2, wave_s=0.25), rates)
    assert time.seconds == pytest.approx(2 + 1 + 0.5, abs=1e-5)
    assert time.bound_by == ("tensor cores", pytest.approx(2))
    time = time_of(replace(busy, memory_share=0.2), rates)
    assert (time.seconds, time.bound_by[0]) == (pytest.approx(5, abs=1e-5), "memory")
    assert time_of(replace(busy, shared_bytes=rates.shared_bytes, shared_share=0.2), rates).bound_by == (
        "shared memory", pytest.approx(5),
    )  # fmt: skip
    assert time_of(replace(busy, memory_limit=rates.memory_bytes / 8), rates).seconds == pytest.approx(8, abs=1e-5)


def test_few_programs_cannot_ask_for_all_the_bandwidth():
    decode = replace(CONV, pass_="decode", heads=16, kv_heads=16, seq=65536, splits=8)
    assert predicted(decode).seconds > 1.5 * predicted(replace(decode, splits=15)).seconds


def test_the_host_is_waited_for_when_the_gpu_has_little_to_do():
    prediction = predicted(CONV)
    assert prediction.seconds == prediction.host_s > prediction.gpu_s
    assert predicted(replace(CONV, pass_="decode", splits="auto")).host_s == 0


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_shape_has_a_prediction_on_every_device(pass_, device):
    shapes = [
        {}, {"taps": (11, 3)}, {"taps": (1, 1)}, {"head_dim": 96}, {"head_dim": 256},
        {"heads": 8, "kv_heads": 2}, {"causal": pass_ == "decode"}, {"seq": 1}, {"seq": 5000, "dtype": "fp16"},
    ]  # fmt: skip
    for shape in shapes:
        splits = "auto" if pass_ == "decode" else None
        prediction = predicted(with_changes(CONV, pass_=pass_, splits=splits, **shape), device)
        assert 0 < prediction.gpu_s < 1
        assert prediction.largest[2] > 0
        hopper = with_changes(HOPPER, pass_=pass_, **shape)
        for other in (hopper, replace(hopper, impl="cuda")):
            if not unmodelled(other, device):
                assert 0 < predicted(other, device).gpu_s < 1


def test_what_is_not_modelled_says_so():
    assert "compile is not modelled" in unmodelled(replace(CONV, impl="compile"))
    assert "fp32 is not modelled" in unmodelled(replace(CONV, dtype="fp32"))
    assert unmodelled(HOPPER, H200) is None
    assert unmodelled(replace(HOPPER, pass_="decode")) == "hopper has no decode pass"
    assert unmodelled(HOPPER, find_device("a100")).startswith("NVIDIA A100-SXM4-80GB is no Hopper GPU")
    assert unmodelled(with_changes(HOPPER, taps=(11, 11))) == "hopper takes up to 8x17 taps"
    assert "rate of mma.sync on NVIDIA B200 is not known" in unmodelled(CUDA, find_device("b200"))
    assert "decode of cuda is not modelled" in unmodelled(replace(CUDA, pass_="decode"))
    assert unmodelled(replace(CUDA, head_dim=136)) == "cuda is not modelled for head dims above 128"
    assert unmodelled(with_changes(CUDA, taps=(9, 11))) == "cuda takes up to 8x17 taps there"
    assert unmodelled(CUDA, A100) is None
    assert unmodelled(replace(HOPPER, head_dim=192)) is None
    assert unmodelled(replace(HOPPER, head_dim=192, pass_="bwd")) == (
        "the backward of hopper above head dim 128, that of cuda, is not modelled"
    )


def test_devices_are_found_by_their_names_and_by_short_ones():
    assert find_device("NVIDIA H200") == find_device("H200") == H200
    assert find_device("a100").capability == (8, 0)
    with pytest.raises(UsageError, match=r"'h300' are not known; did you mean h200"):
        find_device("h300")
    with pytest.raises(
        UsageError, match="'80gb' could be NVIDIA A100-SXM4-80GB or NVIDIA H100 80GB HBM3; give more of"
    ):
        find_device("80gb")
    for other in ("NVIDIA A10", "NVIDIA H20", "h"):  # the beginning of a name is another name
        with pytest.raises(UsageError, match="are not known"):
            find_device(other)
    with pytest.raises(UsageError, match="expected one of a100, h100, h200, b200"):
        find_device("")


def test_rates_come_from_what_was_measured_before_the_data_sheet():
    given = rates_of(H200, (4000.0, 700.0), "here")
    assert (given.macs, given.memory_bytes, given.source) == (350e12, 4e12, "here")
    assert rates_of(H200).macs == 392e12
    guessed = rates_of(find_device("h100"))
    assert 0.7 * 989e12 < 2 * guessed.macs < 0.85 * 989e12
    assert "data sheet" in guessed.source


def test_the_estimate_before_a_sweep_goes_by_the_model_where_it_can():
    case = replace(CONV, batch=4, heads=16, kv_heads=16, seq=4096)
    assert call_seconds(case, H200) == pytest.approx(0.914e-3, rel=WITHIN)
    assert call_seconds(replace(case, impl="hopper"), H200) == pytest.approx(0.649e-3, rel=WITHIN)
    assert call_seconds(replace(case, impl="compile"), H200) > 0.05
    assert call_seconds(case, None) == pytest.approx(4 * 16 * 4096 * 4097 * 7 * 64 / RATES["cuda"].fused)
    assert call_seconds(replace(case, pass_="decode", seq=65536, splits="auto"), H200) < 1e-3


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    return make_runner(monkeypatch, capsys, tmp_path, columns=120)


def test_explain_says_what_a_cell_is_made_of_and_what_was_measured(mtabench, tmp_path):
    words = ("explain", "fwd", "--seq", "4k", "--device-name", "h200", "--results", RESULTS / "fwd.csv")
    code, out, err = mtabench(*words, "--impl", "triton,compile,sdpa-cudnn")
    assert (code, err, list(tmp_path.iterdir())) == (0, "", [])
    assert "rule: a kernel takes max(" in out
    assert "tiles: 64 x 64, queries in registers (tuned at 4096 tokens)" in out
    with (RESULTS / "fwd.csv").open() as file:
        (row,) = (x for x in csv.DictReader(file) if (x["impl"], x["seq"], x["head_dim"]) == ("triton", "4096", "64"))
    assert f"measured: {float(row['median_ms']):.4g} ms" in out
    assert "largest term: tensor cores of _conv_attention_fwd" in out
    assert "no prediction: compile is not modelled" in out
    assert "beside the products" not in out
    _, out, _ = mtabench("explain", "fwd", "--seq", "4k", "--device-name", "h200", "--impl", "hopper")
    assert "exponentials of hopper_forward run beside the products, and are not added" in out
    assert "fit in 141 GB" in out
    assert max(map(len, out.splitlines())) < 250


def test_explain_knows_the_hopper_kernels(mtabench):
    words = ("explain", "bwd", "--seq", "16k", "--impl", "hopper", "--device-name")
    code, out, err = mtabench(*words, "h200")
    assert (code, err) == (0, "")
    assert "largest term: shared memory of hopper_backward" in out
    assert "no prediction: NVIDIA A100-SXM4-80GB is no Hopper GPU" in mtabench(*words, "a100")[1]


def test_explain_knows_the_cuda_kernels(mtabench):
    words = ("explain", "fwd", "--seq", "4k", "--head-dim", "128", "--impl", "cuda", "--device-name")
    code, out, err = mtabench(*words, "a100")
    assert (code, err) == (0, "")
    assert "tiles: 128 x 32, queries in shared memory (by the shared memory of a block)" in out
    assert "largest term: tensor cores of cuda_forward" in out


def test_explain_takes_ceilings_that_were_measured(mtabench, tmp_path):
    place = {"device": "NVIDIA H200", "driver": "1", "torch": "2.13"}
    keep_ceilings(tmp_path / "mtabench-results" / "ceilings.json", place, {"bf16": Ceilings(4000.0, 392.0)})
    words = ("explain", "fwd", "--seq", "16k", "--device-name", "h200", "--impl", "sdpa-cudnn")
    code, out, _ = mtabench(*words)
    assert code == 0
    assert "products at 392 TFLOP/s, copies at 4000 GB/s, measured (mtabench-results/ceilings.json)" in out


def test_explain_refuses_what_it_cannot_do_in_one_sentence(mtabench, tmp_path, monkeypatch):
    refused(mtabench("explain", "fwd", "--device-name", "h300"), "h300", "h200")
    refused(mtabench("explain", "sideways", "--device-name", "h200"), "sideways", "fwd, bwd, decode")
    refused(mtabench("explain", "fwd", "--seq", "1k..64k:+1k", "--device-name", "h200"), "64 cells", "at most 40")
    refused(mtabench("explain", "fwd", "--device-name", "h200", "--ceilings", "no.json"), "no file no.json")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(mtabench("explain", "fwd"), "--device-name h200")
