"""What a command loads before it has something to measure, and the answers that are kept so that it need not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtabench import disk_cache, environment

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "numpy", "scipy", "pandas", "matplotlib", "rich")
PROGRAM = f"""
import sys
from mtabench.cli import main
try:
    main()
finally:
    print("HEAVY", *sorted(set(sys.modules) & {set(HEAVY)!r}), file=sys.stderr)
"""


def heavy_modules(words, **variables):
    """The heavy modules that `mtabench WORDS` loads in a process of its own, and what it prints."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, **variables},
    )  # fmt: skip
    assert done.returncode in (0, 2), done.stderr
    return done.stderr.splitlines()[-1].split()[1:], done.stdout


@pytest.mark.parametrize("command", ["list", "env"])
def test_what_was_found_is_shown_again_without_torch(tmp_path, command):
    words, cache = [command, "--device", "cpu"], {"MTA_KERNELS_CACHE": str(tmp_path)}
    first, shown = heavy_modules(words, **cache)
    assert "torch" in first
    assert heavy_modules(words, **cache) == (["rich"], shown)
    if command == "list":
        assert "torch" in heavy_modules([*words, "--anew"], **cache)[0]


@pytest.mark.parametrize("words", ["--help", "bwd --help", "results merge --help", "fwd --seq 4k..1k", "--version"])
def test_help_and_slips_of_the_fingers_load_nothing_heavy(words):
    assert heavy_modules(words.split())[0] == ["rich"] * ("--seq" in words)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Asks a question with answers 1, 2, ...; a folder of its own keeps them."""
    monkeypatch.setattr(disk_cache, "cache_folder", lambda kind="": tmp_path / "cache" / kind)
    count = iter(range(1, 100))
    return lambda **options: disk_cache.cached_answer("question", lambda: {"n": next(count)}, **options)["n"]


def test_an_answer_is_kept_and_asked_anew_when_wished(asked):
    assert [asked(), asked(), asked(anew=True), asked()] == [1, 1, 2, 2]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b'{"of": 1}', b"\xff\xfe", b'{"of": 1, "asked": []}'])
def test_an_answer_that_cannot_be_read_is_asked_for_again(asked, tmp_path, content):
    assert asked() == 1
    (tmp_path / "cache/answers/question.json").write_bytes(content)
    assert [asked(), asked()] == [2, 2]


def test_what_an_answer_depends_on(asked, tmp_path, monkeypatch):
    assert [asked(), asked()] == [1, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert [asked(), asked()] == [2, 2]
    (tmp_path / "driver").write_text("580")
    monkeypatch.setattr(disk_cache, "FILES", [tmp_path / "driver"])
    assert [asked(), asked()] == [3, 3]
    (tmp_path / "driver").write_text("590")
    assert [asked(), asked()] == [4, 4]
    monkeypatch.setattr(disk_cache, "DEVICES", ((tmp_path, "nvidia*"),))
    (tmp_path / "nvidia0").touch()
    assert [asked(), asked()] == [5, 5]
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    assert [asked(), asked()] == [6, 6]
    os.utime(tmp_path / "site", (1, 1))  # as if a package were put into it
    assert [asked(), asked()] == [7, 7]
    (tmp_path / "cache/tuned.json").touch()
    assert [asked(), asked()] == [8, 8]


def test_the_code_of_this_project_is_among_it(monkeypatch):
    facts = set(disk_cache._facts())
    source = Path(environment.__file__)
    assert f"{source} {source.stat().st_mtime_ns}" in facts
    assert any("conv_attention" in fact for fact in facts)


@pytest.mark.parametrize("later", [25 * 3600, -60])
def test_an_answer_is_kept_for_a_day(asked, monkeypatch, later):
    now = time.time()
    assert asked() == 1
    monkeypatch.setattr(time, "time", lambda: now + later)
    assert asked() == 2


def test_an_answer_that_cannot_be_kept_is_given_all_the_same(asked, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert [asked(), asked()] == [1, 2]


def test_only_what_shows_goes_by_kept_answers():
    users = [path for path in (ROOT / "mtabench").rglob("*.py") if "import cached_answer" in path.read_text()]
    assert sorted(path.name for path in users) == ["env.py", "list.py"]


def test_torch_says_the_same_of_itself():
    import torch

    assert environment.torch_build() == (torch.__version__, torch.version.cuda or "")


def test_answers_are_values_that_json_has(asked, tmp_path):
    asked()
    assert json.loads((tmp_path / "cache/answers/question.json").read_text())["answer"] == {"n": 1}
