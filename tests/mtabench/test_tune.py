"""`mtabench tune`, and what `mtabench env` says of it: with planted trials, so without a GPU."""

import dataclasses

import pytest
import torch
from command_line import make_runner

from mta_kernels.conv_attention import tile_sizes, tuner
from mta_kernels.conv_attention.backends import BackendConfig
from mta_kernels.conv_attention.tuner import Trial, TunedShape

GPU = "Some GPU"
ENTRY = tile_sizes.Entry("forward", tile_sizes.Key.of(torch.bfloat16, 64, (6, 11), True, 1024), {}, {"triton": "3.6.0"})


@dataclasses.dataclass(frozen=True)
class Tiles:
    block_m: int
    num_warps: int = 4


FASTER = [Trial(Tiles(64), 1250.0, "ok"), Trial(Tiles(128, 8), 100.0, "ok")]


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    """Runs the command line in an empty folder, with the user's cache in it; exit code, standard output and error."""
    monkeypatch.setenv("MTA_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tile_sizes, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tile_sizes, "triton_version", lambda: "3.6.0")
    tile_sizes.reload()
    yield make_runner(monkeypatch, capsys, tmp_path)
    tile_sizes.reload()


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tile_sizes, "device_name", lambda device: GPU)
    monkeypatch.setattr(tuner, "compiled_capability", lambda device: (9, 0))
    monkeypatch.setattr("mtabench.commands.tune.unsupported_reason", lambda case: None)
    monkeypatch.setattr(tuner.CONV_ATTENTION, "able", lambda request: ["the only one"])


@pytest.fixture
def planted(monkeypatch, gpu):
    """What each call of `tune` gives or raises, the last for all that follow, and the calls so far."""

    class Planted:
        def __init__(self):
            self.results, self.calls = (FASTER,), []

        def tune(self, kernel, shape, *, path):
            result = self.results[min(len(self.calls), len(self.results) - 1)]
            self.calls.append((kernel, shape, path))
            if isinstance(result, Exception):
                raise result
            return result

    found = Planted()
    monkeypatch.setattr(tuner, "tune", found.tune)
    return found


def test_without_a_gpu(mtabench, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = mtabench("tune", "--seq", "1k")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "CUDA GPU" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--pass fdw", "expected one or more of fwd, bwd, decode"),
        ("--pass fwd,,bwd", "empty place"),
        ("--seq 4k..1k", "descends"),
        ("--head-dim 512", "out of range"),
        ("--conv 6x32", "out of range"),
        ("--dtype int8", "expected one or more of fp16, bf16, fp32"),
        ("--heads 6 --kv-heads 4", "multiple of --kv-heads"),
        ("--batch 1 --tokens 1k", "exclude each other"),
        ("--preset mta-7b", "expected one of mta-300m"),
        ("--impl triton", "--impl"),
        ("stray", "stray"),
        ("--out folder", "folder"),
        ("--out file/tuned.json", "file"),
        ("--out file", "does not hold tuned tile sizes"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(mtabench, planted, tmp_path, words, sentence):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("precious")
    code, out, err = mtabench("tune", *words.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("mtabench: ")
    assert sentence in err
    assert planted.calls == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "precious"


def test_every_kernel_of_a_pass_is_tuned_for_every_shape(mtabench, planted, tmp_path):
    axes = ("--seq", "1k,2k", "--head-dim", "64,128", "--conv", "6x11", "--dtype", "bf16", "--tokens", "4k")
    code, out, err = mtabench("tune", "--pass", "fwd,bwd", *axes, "--no-causal")
    assert (code, err) == (0, "")
    shapes = [
        TunedShape(4096 // seq, 16, 16, seq, head_dim, (6, 11), torch.bfloat16, causal=False)
        for head_dim in (64, 128)
        for seq in (1024, 2048)
    ]
    path = tmp_path / "cache" / "some-gpu.json"
    assert planted.calls == [
        *(("forward", shape, path) for shape in shapes),
        *((kernel, shape, path) for shape in shapes for kernel in ("probabilities", "value_gradients")),
    ]
    assert "[12/12] value_gradients: bf16 2 x 16 heads of 128, seq 2k, conv 6x11, not causal" in out
    assert f"tuned 12 of 12; saved in {path}" in out


@pytest.mark.parametrize(
    ("pass_", "gradients", "kernels"),
    [
        ("fwd", False, ["forward", "forward_backend"]),
        ("bwd", True, ["probabilities", "value_gradients", "training_backend"]),
    ],
)
def test_backends_are_compared_after_tiles_where_several_can_run(
    mtabench, planted, monkeypatch, pass_, gradients, kernels
):
    def able(request):
        asked.append(request.gradients)
        return ["cuda", "triton"] if request.head_dim == 64 else ["triton"]

    asked: list = []
    monkeypatch.setattr(tuner.CONV_ATTENTION, "able", able)
    backends = [Trial(BackendConfig("cuda"), 300.0, "ok"), Trial(BackendConfig("triton"), 200.0, "ok")]
    planted.results = (*(FASTER for _ in kernels[1:]), backends, FASTER)
    code, out, _ = mtabench("tune", "--pass", pass_, "--seq", "1k", "--head-dim", "64,80")
    assert (code, asked) == (0, [gradients] * 2)
    assert [(kernel, shape.head_dim) for kernel, shape, _ in planted.calls] == [
        *((kernel, 64) for kernel in kernels), *((kernel, 80) for kernel in kernels[:-1]),
    ]  # fmt: skip
    lines = [line.split() for line in out.splitlines()]
    assert ["backend", "us", "speedup", "status"] in lines
    assert ["triton", "200.0", "1.500x", "ok,", "the", "fastest"] in lines


def test_a_table_shows_times_and_the_winner_against_the_heuristic(mtabench, planted):
    failed = Trial(Tiles(16), None, "failed: OutOfResources: x")
    slow = [Trial(Tiles(64), 200.0, "ok"), Trial(Tiles(32), 250.0, "ok"), failed]
    planted.results = (FASTER, slow, [Trial(Tiles(64), None, "failed: E: y"), Trial(Tiles(32), 50.0, "ok")])
    code, out, _ = mtabench("tune", "--pass", "fwd", "--seq", "1k,2k,4k")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["block", "m", "num", "warps", "us", "speedup", "status"] in lines
    assert ["64", "4", "1250", "1.000x", "ok,", "the", "heuristic's", "choice"] in lines
    assert ["128", "8", "100.0", "12.500x", "ok,", "the", "fastest"] in lines
    assert ["64", "4", "200.0", "1.000x", "ok,", "the", "heuristic's", "choice,", "the", "fastest"] in lines
    assert ["16", "4", "failed:", "OutOfResources:", "x"] in lines
    assert ["64", "4", "failed:", "E:", "y,", "the", "heuristic's", "choice"] in lines
    assert ["32", "4", "50.0", "ok,", "the", "fastest"] in lines


def test_a_wrong_candidate_is_exit_code_4(mtabench, planted):
    planted.results = ([FASTER[0], Trial(Tiles(32), None, "wrong: differs from the first")], FASTER)
    code, out, _ = mtabench("tune", "--pass", "fwd", "--seq", "1k,2k")
    assert code == 4
    assert "wrong: differs from the first" in out
    assert len(planted.calls) == 2


def test_what_does_not_fit_in_memory_is_passed_over(mtabench, planted):
    planted.results = (torch.OutOfMemoryError("CUDA out of memory.\nTried"), ValueError("the smallest tiles"), FASTER)
    code, out, _ = mtabench("tune", "--pass", "fwd", "--seq", "1k,2k,4k")
    assert code == 0
    assert "not tuned: the smallest tiles" in out.splitlines()
    assert "not tuned: CUDA out of memory." in out.splitlines()
    assert "tuned 1 of 3; saved in" in out


def test_a_broken_gpu_ends_it_in_one_sentence(mtabench, planted):
    planted.results = (FASTER, RuntimeError("CUDA error: an illegal memory access\nmore"), FASTER)
    code, _, err = mtabench("tune", "--pass", "fwd", "--seq", "1k..4k")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "seq 2k" in err
    assert "illegal memory access; what came before is saved in" in err
    assert len(planted.calls) == 2


def test_out_is_added_to(mtabench, planted, tmp_path):
    path = tmp_path / "new" / "tuned.json"
    words = ("tune", "--pass", "fwd", "--seq", "1k", "--out", path)
    code, out, _ = mtabench(*words)
    assert code == 0
    assert planted.calls[0][2] == path
    assert f"saved in {path}" in out
    assert f"kernels on this machine read {tmp_path / 'cache' / 'some-gpu.json'}" in out
    tile_sizes.save([ENTRY], GPU, path)
    assert mtabench(*words)[0] == 0
    tile_sizes.save([ENTRY], "Another GPU", tmp_path / "other.json")
    assert mtabench(*words[:-1], tmp_path / "other.json")[0] == 2


def test_env_says_what_is_in_effect(mtabench, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr("mtabench.commands.env.describe", lambda device: {"device": GPU})
    monkeypatch.setattr("mtabench.commands.env._measurable", lambda device, name: "nothing")
    assert "tuned      nothing is tuned for Some GPU" in mtabench("env")[1]
    shipped, yours = tile_sizes.shipped_file(GPU), tile_sizes.user_file(GPU)
    tile_sizes.save([ENTRY], GPU, shipped)
    older = dataclasses.replace(ENTRY, kernel="decode", measured={"triton": "3.5.1"})
    tile_sizes.save([ENTRY, older], GPU)
    code, out, err = mtabench("env")
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("tuned ")]
    assert lines == [
        f"tuned      yours: 2 entries, some made with Triton 3.5.1, {yours}",
        f"tuned      shipped: 1 entry, {shipped}",
    ]
