"""Documents of --json have the fields and types that docs/json.md says, and say what the command says without it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from command_line import make_runner, refused
from own_cases import OWN, forget
from written_runs import case, rounds, write_pair, write_run

from mtabench.checking import verify
from mtabench.checking.verify import CheckedShape, CheckRow
from mtabench.commands import verify as verify_command
from mtabench.json_output import plain
from mtabench.measuring.ceilings import Ceilings, keep_ceilings
from mtabench.results.results_file import COLUMNS, KEY_COLUMNS, read_file

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
TYPES = {
    "text": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "flag": lambda value: isinstance(value, bool),
    "list of text": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def documented(section):
    """Fields of a section of the page, and the names of their types."""
    text = PAGE.read_text()
    body = text.partition(f"\n## `{section}`\n")[2].partition("\n## ")[0] if section else text.partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| ", body, re.MULTILINE)
    return {name: kinds.split(" or ") for names, kinds in rows for name in re.findall(r"`(.*?)`", names)}


def fields(value, leaves, path=""):
    """The paths of all fields, with their values; what is an object in `leaves` is not looked into."""
    if path and "object" in leaves.get(path, ()):
        yield path, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from fields(one, leaves, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and "list of text" not in leaves.get(path, ()):
        for one in value:
            yield from fields(one, leaves, f"{path}[]")
    else:
        yield path, value


def checked(result, command):
    """The data of a document that is as documented."""
    code, out, _ = result
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (document["version"], document["command"], set(document)) == (1, command, set(documented("")))
    expected = documented(command)
    found = set()
    for path, value in fields(document["data"], expected):
        assert path in expected, f"{path} is not documented"
        assert any(TYPES[kind](value) for kind in expected[path]), f"{path} is {value!r}"
        found.add(path)
    return code, document["data"], set(expected) - found


def test_list(mtabench):
    code, data, absent = checked(mtabench("list", "--device", "cpu", "--json"), "list")
    assert (code, absent) == (0, set())
    named = [one for one in data["implementations"] if (one["name"], one["op"]) == ("eager", "conv-attention")]
    (eager, of_models) = named
    assert of_models["passes"] == ["train", "prefill", "generate"]
    assert (eager["ready"], eager["reason"], eager["passes"]) == (True, None, ["fwd", "bwd", "decode"])
    assert [one for one in data["implementations"] if one["ready"] == bool(one["reason"])] == []
    assert "ladder" in {group["name"] for group in data["groups"]}


def test_env(mtabench, tmp_path):
    code, data, absent = checked(mtabench("env", "--device", "cpu", "--json"), "env")
    assert (code, absent) == (
        0,
        {"ceilings[].dtype", *(f"ceilings[].{one.name}" for one in dataclasses.fields(Ceilings))},
    )
    assert {"device", "torch", "git_sha", "python"} <= set(data["environment"])
    assert data["environment"]["driver"] is None
    environment = {name: value if value is not None else "" for name, value in data["environment"].items()}
    keep_ceilings(tmp_path / "kept.json", environment, {"fp32": Ceilings(100.0, 1.5, None)})
    _, data, absent = checked(mtabench("env", "--device", "cpu", "--out", "kept.json", "--json"), "env")
    assert absent == set()
    assert data["ceilings"] == [{"dtype": "fp32", "copy_gbytes_s": 100, "matmul_tflops": 1.5, "read_gbytes_s": None}]


def test_verify(mtabench, monkeypatch):
    rows = [
        CheckRow("eager", "error fwd", "fp32", True, 1e-7, 1e-6),
        CheckRow("eager", "causal, bit for bit", "fp32", True, None, None),
        CheckRow("hopper", "not checked: no GPU", "", True, None, None, "no GPU"),
    ]
    monkeypatch.setattr(verify_command, "run_checks", lambda *words: rows)
    code, data, absent = checked(mtabench("verify", "--seed", "7", "--json"), "verify")
    assert (code, absent, data["failed"], data["seed"]) == (0, set(), 0, 7)
    assert data["not_checked"] == [{"implementation": "hopper", "reason": "no GPU"}]
    rows[0] = dataclasses.replace(rows[0], ok=False, rel_error=float("nan"), reason="not finite")
    code, data, _ = checked(mtabench("verify", "--json"), "verify")
    assert (code, data["failed"], data["checks"][0]["rel_error"]) == (4, 1, None)
    rows[:2] = []
    assert mtabench("verify", "--json")[0] == 5


def test_what_a_person_s_kernel_prints_is_no_part_of_the_document(tmp_path, monkeypatch, capfd):
    """Whether Python prints it, or a program that it runs, as compilers do."""
    mtabench = make_runner(monkeypatch, capfd, tmp_path)
    small = {"cpu": (CheckedShape(1, 2, 1, 9, 16, 3, 3),)}
    monkeypatch.setattr(verify, "SHAPES", small)
    monkeypatch.setattr(verify, "LONG_SHAPES", {**small, "interpreter": small["cpu"]})
    forget(monkeypatch)
    loud = "import os\nprint('imported')\n" + OWN.read_text().replace(
        "    return scores.softmax(-1)", "    print('called')\n    os.system('echo ran')\n    return scores.softmax(-1)"
    )
    (tmp_path / "loud.py").write_text(loud)
    result = mtabench("verify", "--impl", "loud.py:attention", "--device", "cpu", "--dtype", "fp32", "--json")
    code, data, _ = checked(result, "verify")
    assert (code, data["failed"]) == (0, 0)
    assert {"imported", "called", "ran"} <= set(result[2].splitlines())


def test_show_has_every_column_with_its_type(mtabench, tmp_path):
    path = write_run(tmp_path / "a.csv", {case(64): rounds(1.0), case(128): ("oom", "no room")}, git_dirty=False)
    code, data, absent = checked(mtabench("show", "a.csv", "--sort", "-seq", "--json"), "show")
    assert (code, absent, data["torn"]) == (0, set(), False)
    failed, timed = data["rows"]
    assert list(timed) == list(COLUMNS)
    assert (timed["seq"], timed["causal"], timed["git_dirty"], timed["splits"]) == (64, True, False, None)
    assert isinstance(timed["seq"], int)
    assert timed["median_ms"] == float(read_file(path).rows()[0]["median_ms"])
    assert (failed["status"], failed["reason"], failed["median_ms"]) == ("oom", "no room", None)
    _, data, _ = checked(mtabench("show", "a.csv", "--where", "status=ok", "--json"), "show")
    assert [row["seq"] for row in data["rows"]] == [64]


def test_compare(mtabench, tmp_path):
    write_pair(tmp_path, head={case(64): rounds(1.1, seed=20), case(128): ("error", "broke"), case(512): rounds(8.0)})
    table = mtabench("compare", "base.csv", "head.csv")
    code, data, absent = checked(mtabench("compare", "base.csv", "head.csv", "--json"), "compare")
    assert (code, absent) == (table[0], set())
    assert data["exit_code"] == code == 1
    assert data["outcome"] == table[1].splitlines()[-1]
    assert {cell["problem"]["seq"]: cell["verdict"] for cell in data["cells"]} == {
        64: "slower", 128: "broken", 256: "same", 512: "new"
    }  # fmt: skip
    assert all(list(cell["problem"]) == list(KEY_COLUMNS) for cell in data["cells"])
    (slower,) = [cell for cell in data["cells"] if cell["verdict"] == "slower"]
    assert slower["change_low"] < slower["change"] < slower["change_high"]
    assert slower["change"] == pytest.approx(slower["head_ms"] / slower["base_ms"] - 1)
    assert mtabench("compare", "base.csv", "head.csv", "--format", "json")[1].startswith("{")


def test_compare_across_devices(mtabench, tmp_path):
    write_pair(tmp_path, device="other")
    words = ("compare", "base.csv", "head.csv", "--across-devices", "--json")
    code, data, absent = checked(mtabench(*words), "compare")
    assert (code, absent, data["head"]["devices"], len(data["cells"])) == (0, set(), ["other"], 3)
    assert {cell["verdict"] for cell in data["cells"]} == {None}


def test_a_refusal_prints_no_document(mtabench, tmp_path):
    write_pair(tmp_path, device="other")
    code, out, err = mtabench("compare", "base.csv", "head.csv", "--json")
    assert (code, out) == (5, "")
    assert err.startswith("mtabench: ")
    refused(mtabench("show", "none.csv", "--json"), "there is no file none.csv")


def test_what_json_lacks_is_null():
    found = plain({"a": [float("inf"), 1.5, (2,)], "b": {1: float("nan")}, "c": Path("x"), "d": None})
    assert found == {"a": [None, 1.5, [2]], "b": {"1": None}, "c": "x", "d": None}
