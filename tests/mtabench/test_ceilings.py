"""What a device can do at most: measured, and kept beside the results by device and versions, never misread."""

import json

import pytest

from mtabench.errors import MtabenchError, UsageError
from mtabench.measuring import ceilings
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import keep_ceilings, read_ceilings


def test_of_a_cpu(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**24})
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 256})
    monkeypatch.setattr(ceilings, "run_delays_s", dict)  # beside whatever this machine does
    found = ceilings.measure_ceilings("cpu", "fp32")
    assert 0.1 < found.copy_gbytes_s <= found.read_gbytes_s < 10_000
    assert 0.0001 < found.matmul_tflops < 100


def test_beside_another_job_a_cpu_has_none(monkeypatch):
    waits = iter([{"1": 0.0}, {"1": 50.0}])
    monkeypatch.setattr(ceilings, "run_delays_s", lambda: next(waits))
    monkeypatch.setattr(ceilings, "_measured", lambda device, dtype: ceilings.Ceilings(1.0, 1.0))
    with pytest.raises(MtabenchError, match=r"fp16 is not known: threads waited for a core \d+ % .* end it, and"):
        ceilings.measure_ceilings("cpu", "fp16")


def test_the_best_call_counts(monkeypatch):
    seconds = iter([3.0, 1.0, 2.0] + [5.0] * ceilings.CALLS)
    monkeypatch.setattr(ceilings, "_seconds", lambda call, device: next(seconds))
    assert ceilings._best_seconds(lambda: None, "cpu") == 1.0


def test_every_reader_reads_the_whole_buffer_and_writes_next_to_nothing(monkeypatch):
    """A reduction of what it skips would not change: each element that is changed changes the result."""
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**16})
    buffer = ceilings._buffer("cpu")
    for read in ceilings._readers():
        before = read(buffer)
        assert before.nbytes <= buffer.nbytes / ceilings.ROW
        for place in (0, buffer.numel() // 2, buffer.numel() - 1):
            changed = buffer.clone()
            changed[place] = 3.0
            assert not read(changed).equal(before)


def test_the_fastest_way_to_read_counts(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**16})
    left = iter([4.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(ceilings, "_best_seconds", lambda call, device: next(left))
    assert ceilings._read_gbytes_s("cpu") == pytest.approx(65.536e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_of_a_gpu(dtype):
    found = ceilings.measure_ceilings("cuda", dtype)
    assert 100 < found.copy_gbytes_s <= found.read_gbytes_s < 20_000
    assert 1 < found.matmul_tflops < 5_000


HERE = {"device": "GPU A", "driver": "1.2", "torch": "2.13.0", "git_sha": "abc"}


def test_what_is_kept_is_read_for_the_same_device_and_versions_alone(tmp_path):
    path = tmp_path / "new" / "ceilings.json"
    found = {"fp32": Ceilings(3000.0, 50.0, 3300.0), "bf16": Ceilings(3001.0, 700.0)}
    assert read_ceilings(path, HERE) == {}
    keep_ceilings(path, HERE, found)
    assert read_ceilings(path, HERE | {"git_sha": "def"}) == found
    for name in ("device", "driver", "torch"):
        assert read_ceilings(path, HERE | {name: "other"}) == {}


def test_what_is_measured_anew_takes_the_place_of_the_old(tmp_path):
    path = tmp_path / "ceilings.json"
    other = HERE | {"device": "GPU B"}
    keep_ceilings(path, HERE, {"fp32": Ceilings(1.0, 1.0), "bf16": Ceilings(2.0, 2.0)})
    keep_ceilings(path, other, {"fp32": Ceilings(3.0, 3.0)})
    keep_ceilings(path, HERE, {"fp32": Ceilings(4.0, 4.0)})
    assert read_ceilings(path, HERE) == {"bf16": Ceilings(2.0, 2.0), "fp32": Ceilings(4.0, 4.0)}
    assert read_ceilings(path, other) == {"fp32": Ceilings(3.0, 3.0)}
    entries = json.loads(path.read_text())
    assert len(entries) == 3
    assert all(entry["measured_utc"].endswith("Z") for entry in entries)
    assert [file.name for file in tmp_path.iterdir()] == ["ceilings.json"]


def test_a_file_from_before_reading_was_measured_says_nothing_of_it(tmp_path):
    place = {"device": "GPU A", "driver": "1.2", "torch": "2.13.0"}
    entry = place | {"dtype": "fp32", "copy_gbytes_s": 3000.0, "matmul_tflops": 50.0}
    (tmp_path / "ceilings.json").write_text(json.dumps([entry]))
    assert read_ceilings(tmp_path / "ceilings.json", HERE) == {"fp32": Ceilings(3000.0, 50.0, None)}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        pytest.param("[" * 100_000, id="deep"),
        pytest.param(" " * (1 << 20) + "[]", id="large"),
        '{"device": 1}',
        '[{"device": "GPU A"}]',
        '[{"device": "a", "driver": "", "torch": "", "dtype": "fp32", "copy_gbytes_s": 0.0, "matmul_tflops": 1.0}]',
        '[{"device": "a", "driver": "", "torch": "", "dtype": "fp32", "copy_gbytes_s": NaN, "matmul_tflops": 1.0}]',
        '[{"device": "a", "driver": "", "torch": "", "dtype": "fp32", "copy_gbytes_s": 1.0, "matmul_tflops": 1.0, '
        '"read_gbytes_s": 0.0}]',
    ],
)
def test_a_file_of_something_else_is_told_and_left_alone(tmp_path, text):
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"not a file of ceilings.*env --measure"):
        read_ceilings(path, HERE)
    with pytest.raises(UsageError):
        keep_ceilings(path, HERE, {"fp32": Ceilings(1.0, 1.0)})
    assert path.read_text() == text


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        keep_ceilings(tmp_path / "file" / "ceilings.json", HERE, {"fp32": Ceilings(1.0, 1.0)})
