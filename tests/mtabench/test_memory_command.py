"""`mtabench memory`: what implementations store and move, and where memory ends."""

import csv
import json
import weakref
from dataclasses import replace

import pytest
import torch
from changed_cases import with_changes
from command_line import contents, make_runner, refused
from torch.utils._python_dispatch import TorchDispatchMode

from mta_kernels.nvrtc.kernel import Kernel
from mta_kernels.operation import Operation
from mtabench.commands import memory as memory_command
from mtabench.commands.memory import parse_bytes
from mtabench.errors import UsageError
from mtabench.prediction.devices import find_device
from mtabench.prediction.memory import expected_memory_bytes, input_bytes, longest_seq
from mtabench.prediction.storage import storage_of
from mtabench.problem.case import Case
from mtabench.problem.work import bytes_moved
from mtabench.registry import GROUPS, find
from mtabench.results.memory_tables import COLUMNS
from mtabench.results.results_file import text_of
from mtabench.sweeps import traced_peak

H200 = find_device("h200")
ON_H200 = ("memory", "--device-name", "h200")
CONV = Case("fwd", "triton", Operation.of((6, 11), 64), "bf16", 1, 16, 16, 4096, 64, None, "cuda")
PLAIN = with_changes(CONV, impl="sdpa-flash", taps=None)


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return make_runner(monkeypatch, capsys, tmp_path, columns=120)


def line_of(out, name, title):
    """The cells of the line called `name` below a title."""
    lines = iter(out.splitlines())
    next(line for line in lines if line.startswith(title))
    return next(line for line in lines if line.startswith(name)).removeprefix(name).split()


def test_without_options_it_says_what_it_took_and_touches_no_file(mtabench, tmp_path):
    code, out, err = mtabench(*ON_H200)
    assert (code, err, contents(tmp_path)) == (0, "", {})
    assert out.startswith("fwd on NVIDIA H200; memory: 141 GB")
    assert "bf16, batch 1, 16 heads of 64, conv 6x11" in out
    assert line_of(out, "(score matrix)", "bytes that a call takes")[:2] == ["33.6M", "134M"]
    assert line_of(out, "eager", "bytes that a call takes")[5:] == ["103G", "413G!", "1.65T!", "64k", "38,281"]
    assert len(line_of(out, "triton", "bytes that a call takes")) == 9  # it never runs out here
    assert "compile" not in out.partition("bytes through memory")[2]  # which is not modelled
    assert max(map(len, out.splitlines())) < 160


@pytest.mark.parametrize("impl", ["eager", "triton", "hopper", "sdpa-flash"])
def test_the_longest_sequence_is_exact(impl):
    case = replace(CONV, impl=impl)
    work = find(impl).work
    longest = longest_seq(case, work, 80e9, multiple=1)

    def needed(seq):
        longer = replace(case, seq=seq)
        return input_bytes(longer) + expected_memory_bytes(longer, work)

    assert needed(longest) <= 80e9 < needed(longest + 1)
    assert storage_of(replace(case, seq=longest)).needed == needed(longest)


def test_scores_are_stored_by_dense_implementations_and_in_chunks_by_the_backward():
    matrix = storage_of(CONV).score_matrix
    assert matrix == 16 * 4096 * 4096 * 2
    assert storage_of(replace(CONV, impl="eager")).scores == 3 * matrix
    assert [storage_of(replace(CONV, impl=impl)).scores for impl in ("triton", "hopper")] == [0, 0]
    backward = replace(CONV, pass_="bwd")
    assert storage_of(backward).scores == 2 * 16 * 2048 * 4096 * 2
    # 15 chunks of 35 blocks of 118 rows, or the only one of one head; 4096 keys and 16 columns in tiles of 64.
    hopper = replace(backward, impl="hopper")
    for case, chunks in ((hopper, 15), (replace(hopper, heads=1, kv_heads=1), 1)):
        assert storage_of(case).scores == pytest.approx(chunks * 2 * 35 * 118 * 65 * 64 * 2, rel=0.05)
    assert storage_of(PLAIN).scores == 0
    for case in (backward, replace(backward, impl="hopper"), replace(CONV, impl="eager")):
        assert storage_of(case).scores < storage_of(case).beyond


def test_traffic_of_a_fused_kernel_is_its_inputs_and_outputs_and_what_is_unknown_stays_so():
    one = storage_of(PLAIN)
    assert one.traffic == bytes_moved(PLAIN) == 4 * 16 * 4096 * 64 * 2
    assert one.intensity == pytest.approx(one.flops / one.traffic)
    unknown = storage_of(replace(CONV, impl="compile"))
    assert (unknown.traffic, unknown.intensity) == (None, None)


class Allocated(TorchDispatchMode):
    """The most bytes that were alive at once, of what was allocated within; views of the inputs are not."""

    def __init__(self, *inputs):
        super().__init__()
        self.alive, self.most, self._known = 0, 0, {x.untyped_storage()._cdata for x in inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, torch.utils._pytree.tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.alive += storage.nbytes()
                self.most = max(self.most, self.alive)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, place, size):
        self._known.discard(place)
        self.alive -= size


class Unlaunched:
    """A Triton kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


NOTHING_RUNS = {
    "cuda-naive": ("cuda_unfused.kernel", lambda *args: Kernel(None, 0, 0, 0)),
    "cuda-tiled": ("cuda_unfused.kernel", lambda *args: Kernel(None, 0, 0, 0)),
    "cuda-flash": ("cuda_flash.kernel", lambda *args: Kernel(None, 0, 0, 0)),
    "triton-pointer": ("triton_pointer._attention_pointer_kernel", Unlaunched()),
    "triton-descriptor": ("triton_descriptor._attention_descriptor_kernel", Unlaunched()),
    "triton-fmha": ("triton_fmha.launch", lambda *args, **kwargs: None),
}


@pytest.mark.parametrize("impl", NOTHING_RUNS)
def test_rungs_allocate_what_the_table_says(monkeypatch, impl):
    import mta_ladder

    place, stub = NOTHING_RUNS[impl]
    monkeypatch.setattr(f"mta_ladder.{place}", stub)
    monkeypatch.setattr("mta_kernels.nvrtc.driver.launch", lambda *args, **options: None)
    module, options = mta_ladder._rung(impl)
    case = replace(PLAIN, impl=impl, dtype="fp16", heads=4, kv_heads=2, seq=512)
    q, k, v = (torch.zeros(1, heads, 512, 64, dtype=torch.float16) for heads in (4, 2, 2))
    with Allocated(q, k, v) as allocated:
        out = module.attention(q, k, v, causal=True, scale=1.0, **options)
    assert out.shape == q.shape
    assert allocated.most == expected_memory_bytes(case, find(impl).work)


def test_the_published_approach_allocates_what_is_expected(monkeypatch):
    from mta_ladder.cuda_conv import attention

    monkeypatch.setattr(attention, "launch", lambda *args: None)
    monkeypatch.setattr(attention, "refuse", lambda q, weight: None)
    case = replace(CONV, impl="cuda-conv", dtype="fp16", heads=4, kv_heads=4, seq=512)
    q, k, v, dout = (torch.zeros(1, 4, 512, 64, dtype=torch.float16) for _ in range(4))
    weight = torch.zeros(4, 6, 11, dtype=torch.float16)
    for x in (q, k, v, weight):
        x.requires_grad_()
    with Allocated(q, k, v, weight, dout) as allocated:
        out = attention.conv_attention(q, k, v, weight)
        assert allocated.most == pytest.approx(expected_memory_bytes(case, "overlapped"), rel=0.05)
        torch.autograd.grad(out, (q, k, v, weight), dout)
    assert allocated.most == pytest.approx(expected_memory_bytes(replace(case, pass_="bwd"), "overlapped"), rel=0.05)


def test_flex_makes_its_mask_of_two_bytes_a_score():
    from mta_ladder import flex

    flex._block_mask.cache_clear()
    with Allocated() as allocated:
        flex._block_mask(2048, 2048, torch.device("cpu"))
    assert allocated.most == pytest.approx(find("flex").stores.mask_bytes * 2048**2, rel=0.01)
    case = replace(PLAIN, impl="flex", heads=1, kv_heads=1)
    assert expected_memory_bytes(case, "tiled") == 4096 * 64 * 2 + 2 * 4096**2
    assert expected_memory_bytes(with_changes(case, causal=False), "tiled") == 4096 * 64 * 2


def test_the_columns_that_read_the_scores_once_are_those_of_a_tile_in_cuda_tiled():
    from mta_ladder import cuda_unfused

    assert find("cuda-tiled").stores.columns == cuda_unfused.TILE
    naive, tiled = (storage_of(replace(PLAIN, impl=f"cuda-{name}", head_dim=128)) for name in ("naive", "tiled"))
    assert naive.scores == tiled.scores == 2 * naive.score_matrix  # float32
    assert naive.traffic > 7 * naive.scores
    assert tiled.traffic == pytest.approx(8 / 7 * naive.traffic / 2, rel=0.01)  # causal: half of the tiles


def test_the_loops_in_c_store_the_scores_of_one_head():
    from mta_ladder.c_compiler import FOLDER

    assert "malloc(M * N * sizeof(float))" in (FOLDER / "c_loops.c").read_text()
    case = replace(PLAIN, impl="c-loops", dtype="fp32", device="cpu")
    assert storage_of(case).scores == 4096**2 * 4
    assert storage_of(case).traffic > 7 * 16 * storage_of(case).scores


def test_every_rung_of_the_ladder_that_only_goes_forward_says_what_it_stores():
    assert [name for name in GROUPS["ladder"] if find(name).passes == ("fwd",) and find(name).stores is None] == []


def test_the_ladder_is_one_table_whose_c_rungs_are_float32_in_the_hosts_memory(mtabench):
    code, out, err = mtabench(*ON_H200, "--op", "attention", "--impl", "ladder", "--seq", "1k..128k", "--dtype", "bf16")
    assert (code, err) == (0, "")
    assert line_of(out, "(score matrix fp32)", "bytes that a call takes")[-1] == "1.1T"
    assert line_of(out, "c-loops fp32", "bytes that a call takes")[-1].replace(",", "").isdigit()
    assert "in the host's memory, held against the same limit: c-loops, c-tiled" in out
    for name in GROUPS["ladder"]:
        assert f"\n{name} " in out.partition("bytes through memory")[2]


def test_csv_and_json_hold_a_row_a_cell_and_are_not_replaced(mtabench, tmp_path):
    words = (*ON_H200, "--impl", "eager,triton", "--seq", "4k,64k", "--memory", "80GB")
    files = ("--csv", "cells.csv", "--json-file", "cells.json")
    code, out, err = mtabench(*words, *files)
    assert (code, err) == (0, "")
    assert "csv: cells.csv" in out
    with (tmp_path / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["impl"], row["seq"], row["fits"]) for row in rows] == [
        ("eager", "4096", "true"), ("triton", "4096", "true"), ("eager", "65536", "false"), ("triton", "65536", "true"),
    ]  # fmt: skip
    assert rows[0]["memory_bytes"] == "80000000000"
    assert rows[0]["traced_peak_bytes"] == ""
    cells = json.loads((tmp_path / "cells.json").read_text())["cells"]
    known = [{name: text for name, text in row.items() if text} for row in rows]
    assert [{name: text_of(value) for name, value in cell.items()} for cell in cells] == known
    before = contents(tmp_path)
    refused(mtabench(*words, *files), "cells.csv already exists", "another --csv")
    refused(mtabench(*words, "--csv", "a", "--json-file", "a"), "is the file of another option")
    refused(mtabench(*words, "--json-file", str(tmp_path)), "--json-file", "is a folder")
    assert contents(tmp_path) == before
    assert mtabench(*words, *files, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("text", "count"), [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("1.5tb", 1.5e12), ("141e9", 141e9), ("512MB", 512e6)]
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "-1GB", "1e99GB", "0GB", "1KB", "nan", "8\u0660GB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(UsageError, match="--memory"):
        parse_bytes(text)


def test_what_cannot_be_done_is_refused_in_one_sentence(mtabench):
    refused(mtabench("memory"), "PyTorch finds none here; name one: --device-name h200")
    refused(mtabench("memory", "--device-name", "h300"), "h300", "h200")
    refused(mtabench("memory", "--memory", "much"), "--memory cannot read 'much'", "80GB")
    refused(mtabench("memory", "--pass", "sideways"), "sideways", "fwd, bwd, decode")
    refused(mtabench("memory", "--measure"), "PyTorch finds none here")
    refused(mtabench("memory", "--impl", "hopper", "--device-name", "a100"), "no Hopper GPU")
    refused(mtabench(*ON_H200, "--impl", "hopper", "--pass", "decode"), "hopper: has no decode pass")


def test_what_a_device_does_not_run_is_said_and_left_out(mtabench):
    code, out, _ = mtabench("memory", "--impl", "triton,hopper", "--device-name", "a100", "--seq", "1k")
    assert code == 0
    assert "\nhopper: NVIDIA A100-SXM4-80GB is no Hopper GPU" in out
    assert out.count("hopper") == 1


def test_shapes_have_tables_of_their_own_and_batches_follow_tokens(mtabench):
    words = (*ON_H200, "--impl", "eager", "--seq", "1k..4k", "--conv", "6x11,3x3", "--head-dim", "64,128")
    _, out, _ = mtabench(*words, "--tokens", "4k", "--pass", "bwd", "--no-causal")
    assert "bf16, batch 4 to 1, 16 heads of 64, conv 6x11, 3x3, not causal" in out
    assert "16 heads of 128" in out
    cells = line_of(out, "eager 3x3", "bytes that a call takes")
    assert (len(cells), cells[-1]) == (4, f"{longest_seq(replace(CONV, pass_='bwd'), 'dense', 141e9, multiple=1):,}")
    assert "too long" not in out  # where all fit


def test_traced_peaks_stand_beside_those_of_the_plan(mtabench, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(memory_command, "_memory_here", lambda: 150e9)
    monkeypatch.setattr(
        traced_peak, "traced_peak",
        lambda case: (None, "out of memory at 64k") if case.seq > 4096 else (storage_of(case).beyond + 10**6, ""),
    )  # fmt: skip
    words = ("memory", "--impl", "eager", "--seq", "4k,64k")
    code, out, err = mtabench(*words, "--measure")
    assert (code, err.splitlines()) == (0, ["[1/2] eager at 4k", "[2/2] eager at 64k"])
    assert out.startswith("fwd on NVIDIA H200; memory: 150 GB")
    assert line_of(out, "eager", "bytes beyond the inputs") == ["1.62G"]
    assert "\neager: out of memory at 64k" in out
    assert "next: --measure" in mtabench(*words)[1]
    refused(mtabench(*words, "--measure", "--device-name", "h200"), "--device-name")


def test_a_gpu_that_the_table_does_not_have_has_its_own_memory(mtabench, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(memory_command, "_memory_here", lambda: 24e9)
    code, out, _ = mtabench("memory", "--impl", "triton", "--seq", "1k")
    assert code == 0
    assert out.startswith("fwd on NVIDIA GeForce RTX 4090; memory: 24 GB")


def test_cells_that_cannot_be_traced_say_why(monkeypatch):
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(
        traced_peak, "unsupported_reason", lambda case: "no such GPU" if case.impl == "hopper" else None
    )
    monkeypatch.setattr(traced_peak, "available_memory_bytes", lambda device: 140e9)
    why = {
        "memory of the CPU is not traced": replace(CONV, device="cpu"),
        "no such GPU": replace(CONV, impl="hopper"),
        "64k is not run: it needs 413 GB, and 140 GB are free": replace(CONV, impl="eager", seq=65536),
        "one call may take": replace(CONV, seq=1 << 22),
    }
    for words, case in why.items():
        peak, reason = traced_peak.traced_peak(case)
        assert peak is None
        assert words in reason
    # What is left is run; here that fails, in one line.
    assert traced_peak.traced_peak(CONV)[1]


@pytest.mark.gpu
def test_the_peak_traced_on_a_gpu_is_near_the_plan():
    for impl in ("eager", "triton", "sdpa-flash"):
        case = replace(PLAIN if impl == "sdpa-flash" else CONV, impl=impl)
        peak, reason = traced_peak.traced_peak(case)
        assert reason == ""
        assert peak == pytest.approx(storage_of(case).beyond, rel=0.1)
