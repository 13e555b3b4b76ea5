"""Ceilings beside the results: kept by device and versions, replaced when measured anew, never misread."""

import json

import pytest

from mtabench.errors import UsageError
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import keep_ceilings, read_ceilings

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
