"""Tile sizes chosen by measuring: how a choice is found, where it is kept, and what is chosen."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import subprocess
import tomllib
import warnings
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernel_inputs import DEVICE, make

from mta_kernels.conv_attention import backends, conv_attention, conv_attention_decode, tile_sizes, tuner
from mta_kernels.conv_attention.tile_sizes import Entry, Key, best_config
from mta_kernels.conv_attention.triton import backward, decode, forward
from mta_kernels.conv_attention.triton.backend import TRITON
from mta_kernels.conv_attention.triton.tunable_kernels import KERNELS, Problem, TunedShape

ROOT = Path(__file__).parents[2]
GPU = "Some GPU 9/X"
ON_GPU = torch.device("cuda", 0)
KEY = Key.of(torch.bfloat16, 64, (6, 11), True, 4096, 2, 16)
SHAPE = TunedShape(1, 2, 1, 40, 16, (3, 5), torch.float16)


@dataclasses.dataclass(frozen=True)
class Tiles:
    block: int
    wide: bool = False


CANDIDATES = (Tiles(16), Tiles(32), Tiles(64), Tiles(128, wide=True))


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with a GPU that nothing is tuned for yet, and a user without files."""
    monkeypatch.setattr(tile_sizes, "device_name", lambda device: GPU if device.type == "cuda" else "")
    monkeypatch.setattr(tile_sizes, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(tile_sizes, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("MTA_KERNELS_CACHE", str(tmp_path / "user"))
    tile_sizes.reload()
    yield
    tile_sizes.reload()


def entry(config, key=KEY, triton="3.6.0", kernel="forward"):
    return Entry(kernel, key, dataclasses.asdict(config), {"microseconds": 1.5, "triton": triton})


def ship(*entries):
    tile_sizes.save(entries, GPU, tile_sizes.shipped_file(GPU))


def chosen(key=KEY, candidates=CANDIDATES, kernel="forward", device=ON_GPU):
    return best_config(kernel, key, candidates, device)


def test_the_users_choice_comes_before_the_shipped_one_and_that_before_the_first_candidate():
    assert chosen() == Tiles(16)
    ship(entry(Tiles(32)))
    assert chosen() == Tiles(32)
    tile_sizes.save([entry(Tiles(128, wide=True))], GPU)
    assert chosen() == Tiles(128, wide=True)
    assert chosen(kernel="decode") == Tiles(16)


def test_without_a_gpu_the_first_candidate_is_taken():
    ship(entry(Tiles(32)))
    assert chosen(device=torch.device("cpu")) == Tiles(16)


@pytest.mark.parametrize(
    ("seq_len", "wanted"),
    [(1, 32), (512, 32), (1023, 32), (1024, 32), (2047, 32), (2048, 64), (4096, 64), (65536, 64)],
)
def test_the_nearest_tuned_length_counts_and_the_longer_of_two(seq_len, wanted):
    ship(*(entry(Tiles(block), key=KEY._replace(seq_len=tuned)) for tuned, block in ((1024, 32), (4096, 64))))
    assert chosen(Key.of(torch.bfloat16, 64, (6, 11), True, seq_len, 2, 16)).block == wanted


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"head_dim": 128},
        {"query_taps": 11},
        {"key_taps": 6},
        {"causal": False},
        {"group": 1},
        {"sequences": 32},
    ],
)
def test_all_but_the_length_must_be_the_same(other):
    ship(entry(Tiles(32), key=KEY._replace(**other)))
    assert chosen() == Tiles(16)
    assert chosen(KEY._replace(**other)) == Tiles(32)


def test_keys_count_lengths_and_sequences_in_powers_of_two():
    assert Key.of(torch.bfloat16, 64, (6, 11), True, 8191, 2, 31) == KEY
    assert Key.of(torch.bfloat16, 64, (6, 11), True, 8192, 2, 31) != KEY
    assert Key.of(torch.bfloat16, 64, (6, 11), True, 8191, 2, 15) != KEY
    assert Key.of(torch.bfloat16, 64, (6, 11), True, 1)[-3:] == (1, 0, 0)
    shape = TunedShape(3, 16, 8, 5000, 64, (6, 11), torch.bfloat16)
    assert shape.key("decode") == KEY
    assert shape.key("forward") == KEY._replace(group=0, sequences=0)


def test_a_choice_that_is_no_candidate_is_passed_over():
    tile_sizes.save([entry(Tiles(256)), entry(Tiles(64), key=KEY._replace(seq_len=1024))], GPU)
    assert chosen() == Tiles(64)
    ship(entry(Tiles(32)))
    assert chosen() == Tiles(32)
    assert chosen(candidates=CANDIDATES[:1]) == Tiles(16)
    assert chosen(candidates=list(CANDIDATES)) == Tiles(32)
    ship(Entry("forward", KEY, {"block": 32}, {}))  # of another version of the code, without a field that is there now
    assert chosen() == Tiles(64)


def test_a_choice_of_this_triton_comes_before_one_of_another():
    tile_sizes.save([entry(Tiles(32), triton="3.5.1")], GPU)
    assert chosen() == Tiles(32)
    ship(entry(Tiles(64)))
    assert chosen() == Tiles(64)


def text_of(**changes):
    record = {"kernel": "forward", **KEY._asdict(), "dtype": "bfloat16", "config": {"block": 32}, "measured": {}}
    return json.dumps({"format": 1, "device": GPU, "entries": [record | changes]})


@pytest.mark.parametrize(
    "content",
    [
        text_of()[:-20],
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"format": 1}',
        text_of().replace(GPU, "Another GPU"),
        text_of().replace('"format": 1', '"format": 2'),
        text_of(seq_len="4096"),
        text_of(causal=1),
        text_of(dtype="bfloat17"),
        text_of(dtype="nn"),
        text_of(kernel=["forward"]),
        text_of(config=3),
        text_of(measured=None),
        text_of().replace('"head_dim": 64, ', ""),
        text_of().replace('"entries": [', '"entries": [3, '),
        "\udcff",
    ],
)
def test_a_file_that_cannot_be_read_is_ignored_with_one_warning(content):
    ship(entry(Tiles(32)))
    path = tile_sizes.user_file(GPU)
    path.parent.mkdir()
    path.write_text(content, errors="surrogateescape")
    with pytest.warns(RuntimeWarning) as warned:
        found = [chosen(), chosen(KEY._replace(seq_len=1024)), chosen(kernel="decode")]
    assert found == [Tiles(32), Tiles(32), Tiles(16)]
    (warning,) = warned
    assert str(path) in str(warning.message)
    assert len(str(warning.message).splitlines()) == 1


def test_the_record_that_those_files_spoil_is_a_good_one():
    path = tile_sizes.user_file(GPU)
    path.parent.mkdir()
    path.write_text(text_of(config=dataclasses.asdict(Tiles(32))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == Tiles(32)


def test_saving_adds_replaces_sorts_and_leaves_nothing_else(tmp_path):
    lengths = (16384, 1024, 2048)
    for length in lengths:
        path = tile_sizes.save([entry(Tiles(32), key=KEY._replace(seq_len=length))], GPU)
    tile_sizes.save([entry(Tiles(64), key=KEY._replace(seq_len=2048)), entry(Tiles(16), kernel="decode")], GPU)
    entries = tile_sizes.read_entries(path, GPU)
    found = [(found.kernel, found.key.seq_len, found.config["block"]) for found in entries]
    assert found == [("decode", 4096, 16), ("forward", 1024, 32), ("forward", 2048, 64), ("forward", 16384, 32)]
    assert entries[2] == entry(Tiles(64), key=KEY._replace(seq_len=2048))
    content = path.read_text()
    assert len(content.splitlines()) == len(entries) + 6
    tile_sizes.save(reversed(entries), GPU)
    assert path.read_text() == content
    assert list(path.parent.iterdir()) == [path]
    assert path == tmp_path / "user" / "some-gpu-9-x.json"


def test_what_cannot_be_read_is_moved_out_of_the_way():
    path = tile_sizes.user_file(GPU)
    path.parent.mkdir()
    path.write_text("precious")
    tile_sizes.save([entry(Tiles(32))], GPU)
    assert chosen() == Tiles(32)
    assert path.with_name(f"{path.name}.old").read_text() == "precious"


def save_many(path, length):
    for number in range(50):
        tile_sizes.save([entry(Tiles(32), key=KEY._replace(head_dim=16 + number, seq_len=length))], GPU, path)


def test_writers_in_two_processes_lose_nothing_and_readers_see_whole_files(tmp_path):
    path = tmp_path / "gpu.json"
    forked = multiprocessing.get_context("fork")
    writers = [forked.Process(target=save_many, args=(path, length)) for length in (1024, 2048)]
    for writer in writers:
        writer.start()
    reads = []
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            reads.append(len(tile_sizes.read_entries(path, GPU)))
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert reads == sorted(reads)
    found = {(entry.key.head_dim, entry.key.seq_len) for entry in tile_sizes.read_entries(path, GPU)}
    assert found == {(16 + number, length) for number in range(50) for length in (1024, 2048)}
    assert list(tmp_path.iterdir()) == [path]


def test_where_the_users_file_is(monkeypatch):
    monkeypatch.setenv("MTA_KERNELS_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert tile_sizes.user_file("NVIDIA H200") == Path("/a/nvidia-h200.json")
    monkeypatch.setenv("MTA_KERNELS_CACHE", "")
    assert tile_sizes.user_file("NVIDIA H200") == Path("/b/mta_kernels/nvidia-h200.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tile_sizes.user_file("NVIDIA H200") == Path("/c/.cache/mta_kernels/nvidia-h200.json")


def shipped_entries():
    folder = resources.files("mta_kernels.conv_attention") / "tuned"
    with resources.as_file(folder / "nvidia-h200.json") as path:
        return tile_sizes.read_entries(path, "NVIDIA H200")


def test_the_file_for_the_h200_is_in_the_package_and_in_its_wheel():
    assert isinstance(shipped_entries(), list)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "kernels/mta_kernels" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    path = "kernels/mta_kernels/conv_attention/tuned/nvidia-h200.json"
    # hatch leaves out what git ignores
    ignored = subprocess.run(["git", "-C", ROOT, "check-ignore", path], capture_output=True)
    assert ignored.returncode != 0, ignored.stdout


class Fake:
    """A kernel whose configs are numbers of the result to compute: what they give, and how long they take."""

    def __init__(self, results, times):
        self.results, self.times, self.out = results, times, torch.full((256, 4), float("nan"))

    def problem(self, shape, device):
        return Problem([Tiles(number) for number in range(len(self.results))], self.run)

    def run(self, config):
        result = self.results[config.block]
        if isinstance(result, Exception):
            raise result
        if result is not None:
            self.out.copy_(result)
        return (self.out,)

    def measure(self, calls, cold):
        self.cold = cold
        return [self.times[call.args[0].block] for call in calls]


def tune_fake(monkeypatch, results, times, kernel="forward"):
    fake = Fake(results, times)
    monkeypatch.setattr(tuner, "KERNELS", {kernel: fake.problem})
    monkeypatch.setattr(tile_sizes, "device_name", lambda device: GPU)
    trials = tuner.tune(kernel, dataclasses.replace(SHAPE, dtype=torch.bfloat16), measure=fake.measure)
    return trials, fake


def test_the_fastest_of_the_right_candidates_is_saved(monkeypatch):
    right = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    one_row_wrong = right.clone()
    one_row_wrong[5] *= 1.2
    rounded = right * (1 + 2**-8)
    nothing, nan, too_large = None, right * float("nan"), MemoryError("too\nlarge")
    results = [right, right * 1.1, right, rounded, nothing, one_row_wrong, nan, too_large]
    trials, fake = tune_fake(monkeypatch, results, [5.0, 1.0, 4.0, 3.004, 1.0, 1.0, 1.0, 1.0])
    assert [trial.status.partition(":")[0] for trial in trials] == [
        "ok", "wrong", "ok", "ok", "wrong", "wrong", "wrong", "failed",
    ]  # fmt: skip
    assert [trial.microseconds for trial in trials] == [5.0, None, 4.0, 3.004, None, None, None, None]
    assert trials[-1].status == "failed: MemoryError: too"
    assert tuner.fastest(trials) is trials[3]
    assert not fake.cold
    (saved,) = tile_sizes.read_entries(tile_sizes.user_file(GPU), GPU)
    assert (saved.kernel, saved.key) == ("forward", Key.of(torch.bfloat16, 16, (3, 5), True, 32))
    assert saved.config == {"block": 3, "wide": False}
    assert saved.measured == {
        "batch": 1, "heads": 2, "kv_heads": 1, "seq_len": 40,
        "microseconds": 3.0, "heuristic_microseconds": 5.0, "triton": "3.6.0",
    }  # fmt: skip
    candidates = tuple(Tiles(number) for number in range(len(results)))
    assert chosen(saved.key, candidates) is candidates[3]  # at once, in this process


def test_a_first_candidate_that_cannot_run_is_no_reference(monkeypatch):
    right = torch.ones(256, 4)
    results = [RuntimeError("no resources"), right * float("nan"), right, right]
    trials, fake = tune_fake(monkeypatch, results, [0.0, 0.0, 2.0, 1.0], kernel="decode")
    assert [trial.status.partition(":")[0] for trial in trials] == ["failed", "wrong", "ok", "ok"]
    assert fake.cold
    (saved,) = tile_sizes.read_entries(tile_sizes.user_file(GPU), GPU)
    assert saved.config["block"] == 3
    assert saved.measured["heuristic_microseconds"] is None
    assert (saved.key.group, saved.key.sequences) == (2, 1)


def test_nothing_is_saved_if_nothing_runs(monkeypatch):
    trials, _ = tune_fake(monkeypatch, [RuntimeError(), RuntimeError("no")], [])
    assert [trial.status for trial in trials] == ["failed: RuntimeError: ", "failed: RuntimeError: no"]
    assert tuner.fastest(trials) is None
    assert not tile_sizes.user_file(GPU).exists()


def test_what_cannot_be_tuned(monkeypatch):
    with pytest.raises(ValueError, match=r"no kernel 'fwd'; expected one of forward, "):
        tuner.tune("fwd", SHAPE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="CUDA GPU"):
        tuner.tune("forward", SHAPE)


def test_kernels_ask_for_what_tuning_saves(monkeypatch):
    asked = {}

    def spy(kernel, key, candidates, device):
        asked[kernel] = key, candidates
        return best_config(kernel, key, candidates, device)

    def spy_backends(kernel, key, candidates, device):
        asked[kernel] = key, candidates
        return candidates[0], None

    for module in (forward, backward, decode):
        monkeypatch.setattr(module, "best_config", spy)
    monkeypatch.setattr(backends.CONV_ATTENTION, "able", lambda request: [TRITON, TRITON])
    monkeypatch.setattr(backends, "tile_sizes", SimpleNamespace(**vars(tile_sizes) | {"look_up": spy_backends}))
    q, k, v, weight = make(1, 2, 1, SHAPE.seq_len, SHAPE.head_dim, SHAPE.taps, SHAPE.dtype)
    conv_attention(q, k, v, weight)
    conv_attention(q.requires_grad_(), k, v, weight).sum().backward()
    lengths = torch.tensor([SHAPE.seq_len], device=DEVICE)
    shifted = torch.cat([k.flatten()[:1], k.flatten()])[1:].view(k.shape)
    for caches in ((k, v), (shifted, v)):  # for the copy engine, by pointers
        conv_attention_decode(q.detach()[:, :, -3:], *caches, weight, lengths=lengths, backend="triton")
    assert set(asked) == set(KERNELS)
    for kernel, (key, candidates) in asked.items():
        assert key == SHAPE.key(kernel)
        assert KERNELS[kernel](SHAPE, torch.device(DEVICE)).candidates == candidates


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate_is_right_and_the_fastest_is_taken(monkeypatch, kernel):
    monkeypatch.setattr(tile_sizes, "device_name", lambda device: GPU)
    last_wins = None if DEVICE == "cuda" else lambda calls, cold: [float(-number) for number, _ in enumerate(calls)]
    trials = tuner.tune(kernel, SHAPE, measure=last_wins)
    assert [trial.status for trial in trials] == ["ok"] * len(trials)
    best = tuner.fastest(trials)
    assert best is trials[-1] or DEVICE == "cuda"
    candidates = tuple(trial.config for trial in trials)
    assert best_config(kernel, SHAPE.key(kernel), candidates, torch.device(DEVICE)) == best.config


@pytest.mark.gpu
@pytest.mark.parametrize("cold", [False, True])
def test_times_on_a_gpu(cold):
    small, large = (torch.randn(size, size, device="cuda") for size in (256, 4096))
    times = tuner.time_in_turns([lambda: small @ small, lambda: large @ large], cold)
    assert 1 < times[0] < times[1] < 1e6


@pytest.mark.slow
def test_every_shipped_choice_is_a_candidate():
    if DEVICE == "cuda" and torch.cuda.get_device_name() != "NVIDIA H200":
        pytest.skip("other candidates fit on other GPUs")
    candidates = {}
    for found in shipped_entries():
        key = found.key
        shape = TunedShape(
            1, key.group or 1, 1, 16, key.head_dim, (key.query_taps, key.key_taps), key.dtype, key.causal
        )
        if (found.kernel, shape) not in candidates:
            candidates[found.kernel, shape] = KERNELS[found.kernel](shape, torch.device(DEVICE)).candidates
        assert found.config in map(dataclasses.asdict, candidates[found.kernel, shape]), found
