"""Exports for programs and for other benchmarks: JSON Lines, flashinfer-bench traces, PyTorch's benchmark database."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from command_line import contents, make_runner, refused
from written_runs import case, rounds, write_run

from mtabench.cli import app
from mtabench.commands.export import FORMATS
from mtabench.results.results_file import COLUMNS, read_file
from mtabench.results.runs import read_run

ROOT = Path(__file__).parents[2]
KEPT = sorted(
    path
    for path in (ROOT / "results/nvidia-h200").glob("*.csv")
    if "run_id" in path.read_text()[:99] and not path.stem.endswith(".samples")
)
CELLS = {
    case(1024): rounds(2.0),
    case(1024, "triton"): rounds(0.5),
    case(1024, "sdpa-flash", taps=None): rounds(0.25),
    case(2048): ("oom", "needs 30 GiB"),
    case(2048, "triton"): ("wrong", "error 0.5", 0.5),
    case(4096, "triton"): ("timeout", "slow"),
    case(8192, "triton"): ("unsupported", "too long"),
    case(64, "triton", pass_="decode", splits=4): rounds(0.1),
    case(64, "eager", pass_="bwd", heads=4, kv_heads=1): rounds(3.0),
}


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    write_run(tmp_path / "a.csv", CELLS)
    return make_runner(monkeypatch, capsys, tmp_path)


def test_json_lines_have_a_typed_object_a_row(mtabench, tmp_path):
    assert mtabench("export", "a.csv", "--out", "new/a.jsonl") == (0, "new/a.jsonl\n", "")
    lines = (tmp_path / "new/a.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len(CELLS)
    assert list(rows[0]) == list(COLUMNS)
    assert (rows[0]["seq"], rows[0]["causal"], rows[0]["mix"], rows[0]["timer"]) == (1024, True, None, "cpu")
    assert (rows[3]["status"], rows[3]["median_ms"]) == ("oom", None)
    assert mtabench("export", "a.csv", "--format", "jsonl")[1].splitlines() == lines


def test_json_lines_are_read_back_like_the_csv(mtabench, tmp_path):
    mtabench("export", "a.csv", "--out", "a.jsonl")
    whole, back = read_file(tmp_path / "a.csv"), read_file(tmp_path / "a.jsonl")
    assert back.rows() == whole.rows()
    shown = mtabench("show", "a.csv")[1], mtabench("show", "a.jsonl")[1]
    assert shown[0].splitlines()[1:] == shown[1].splitlines()[1:]  # the rounds too: the samples are beside both
    assert next(iter(read_run(tmp_path / "a.jsonl").cells.values())).processes
    assert mtabench("results", "select", "a.jsonl", "--out", "b.csv")[0] == 0
    assert read_file(tmp_path / "b.csv").rows() == whole.rows()


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.stem)
def test_every_committed_run_survives_json_lines(mtabench, tmp_path, kept):
    assert mtabench("export", kept, "--out", "kept.jsonl")[0] == 0
    assert read_file(tmp_path / "kept.jsonl").rows() == read_file(kept).rows()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda text: text.replace('"seq": 1024', '"seq": [1]', 1), "line 1 of a.jsonl has a value of several parts"),
        (lambda text: text.replace('"seq": 1024', '"seq": -1', 1), "in the column seq; expected a whole number"),
        (
            lambda text: text.replace('"median_ms": 2', '"median_ms": NaN, "x": 2', 1),
            "line 2 of a.jsonl has other names",
        ),
        (lambda text: text.replace('"impl"', '"inpl"'), "it has no column impl"),
        (lambda text: "[1]\n" + text, "line 1 of a.jsonl is no JSON object"),
        (lambda text: "[" * 100_000 + "\n" + text, "line 1 of a.jsonl is no JSON object"),
        (lambda text: "\xff" + text, "is no JSON object"),
        (lambda text: "", "a.jsonl is empty: it has no rows"),
        (lambda text: text.replace("{", "\x00{", 1), "has a byte 0"),
    ],
)
def test_spoiled_json_lines_are_one_sentence(mtabench, tmp_path, spoil, sentence):
    mtabench("export", "a.csv", "--out", "a.jsonl")
    path = tmp_path / "a.jsonl"
    path.write_text(spoil(path.read_text()), encoding="latin-1")
    refused(mtabench("show", "a.jsonl"), sentence)


def test_a_torn_line_is_left_out_and_a_sweep_does_not_write_json_lines(mtabench, tmp_path):
    mtabench("export", "a.csv", "--out", "a.jsonl")
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text()[:-20])
    assert len(json.loads(mtabench("show", "a.jsonl", "--json")[1])["data"]["rows"]) == len(CELLS) - 1
    before = contents(tmp_path)
    for more in ((), ("--resume",)):
        words = ("fwd", "--impl", "eager", "--seq", "64", "--device", "cpu", "--out", "a.jsonl")
        refused(mtabench(*words, *more), "a sweep writes CSV")
    assert contents(tmp_path) == before


def traces(mtabench, *words):
    code, out, err = mtabench("export", "a.csv", "--format", "flashinfer-trace", *words)
    assert code == 0
    return [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()], err


def test_flashinfer_traces_keep_the_rules_of_that_format(mtabench):
    found, err = traces(mtabench)
    assert err == "left out, since the format has no place for them: 1 unsupported\n"
    assert [one["evaluation"]["status"] for one in found] == [
        *["PASSED"] * 3, "RUNTIME_ERROR", "INCORRECT_NUMERICAL", "TIMEOUT", "PASSED", "PASSED"
    ]  # fmt: skip
    for one in found:
        evaluation = one["evaluation"]
        assert set(one) == {"definition", "workload", "solution", "evaluation"}
        assert ("correctness" in evaluation) == (evaluation["status"] in ("PASSED", "INCORRECT_NUMERICAL"))
        assert ("performance" in evaluation) == (evaluation["status"] == "PASSED")
        assert evaluation["environment"]["hardware"] == "some,_device"
        assert set(one["workload"]["axes"]) == {"batch_size", "seq_len"}
    assert found[0]["definition"] == "conv_attention_fwd_fp32_h2_kv2_d16_c6x11_causal"
    assert found[2]["definition"] == "attention_fwd_fp32_h2_kv2_d16_causal"
    assert list(found[-1]["workload"]["inputs"]) == ["q", "k", "v", "weight", "dout"]
    assert found[-2]["solution"] == "mtabench_triton_splits_4"
    assert found[0]["workload"]["uuid"] == found[1]["workload"]["uuid"] != found[4]["workload"]["uuid"]
    assert found[0]["evaluation"]["performance"]["latency_ms"] == pytest.approx(2, rel=0.01)
    assert found == traces(mtabench)[0]  # and again the same


def test_flashinfer_traces_are_taken_by_that_project(mtabench):
    data = pytest.importorskip("flashinfer_bench.data", reason="needs flashinfer-bench")
    for one in traces(mtabench)[0]:
        assert data.Trace.model_validate(one).is_successful() == (one["evaluation"]["status"] == "PASSED")


def test_a_whole_model_is_no_trace_of_attention(mtabench, tmp_path):
    model = replace(case(512, "auto", pass_="train"), layers=4, conv_every=4)
    write_run(tmp_path / "m.csv", {model: rounds(2.0), case(512, "triton"): rounds(1.0)})
    lines = mtabench("export", "m.csv", "--format", "flashinfer-trace")[1].splitlines()
    assert [json.loads(line)["solution"] for line in lines] == ["mtabench_triton"]


def test_speedups_over_eager_are_those_over_the_reference(mtabench, tmp_path):
    kept = ROOT / "results/nvidia-h200/fwd.csv"
    out = mtabench("export", kept, "--format", "flashinfer-trace", "--where", "seq=1k,head_dim=64")[1]
    found = {one["solution"]: one["evaluation"]["performance"] for one in map(json.loads, out.splitlines())}
    eager, triton = found["mtabench_eager"], found["mtabench_triton"]
    assert triton["reference_latency_ms"] == pytest.approx(eager["latency_ms"], rel=1e-4)
    assert triton["speedup_factor"] == pytest.approx(eager["latency_ms"] / triton["latency_ms"], rel=1e-4)
    assert found["mtabench_sdpa_cudnn"]["speedup_factor"] == 0  # of plain attention, which eager is not


def texts(value):
    return isinstance(value, dict) and all(isinstance(one, str) for pair in value.items() for one in pair)


def test_pytorch_records_have_the_fields_of_its_schema(mtabench, tmp_path):
    code, out, err = mtabench("export", "a.csv", "--out", "a.json", "--format", "pytorch-benchmark")
    assert (code, out) == (0, "a.json\n")
    assert "1 oom, 1 wrong, 1 timeout, 1 unsupported" in err
    records = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    latencies = [one for one in records if one["metric"]["name"] == "latency"]
    assert len(latencies) == 5
    for one in records:
        assert set(one) == {"benchmark", "model", "dependencies", "runners", "metric"}
        assert set(one["benchmark"]) == {"name", "mode", "dtype", "extra_info"}
        assert set(one["model"]) == {"name", "type", "backend", "extra_info"}
        assert set(one["runners"][0]) == {"gpu_info", "gpu_count", "extra_info"}
        assert set(one["metric"]) == {"name", "benchmark_values", "extra_info"}
        for part in (one["benchmark"], one["model"], one["runners"][0], one["metric"]):
            assert texts(part["extra_info"])  # a map from texts to texts
        assert all(isinstance(value, float) for value in one["metric"]["benchmark_values"])
    assert [one["benchmark"]["mode"] for one in latencies] == [*["inference"] * 4, "training"]
    assert latencies[0]["metric"]["benchmark_values"] == [float(read_file(tmp_path / "a.csv").rows()[0]["median_ms"])]
    assert latencies[0]["dependencies"]["pytorch"] == {"version": "2.13.0"}


def test_the_page_has_every_format():
    text = (ROOT / "docs/results.md").read_text().partition("<!-- formats -->")[2].partition("<!-- /formats -->")[0]
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \|", text, re.MULTILINE)
    assert rows == [(name, one.suffix) for name, one in FORMATS.items()]
    for name in FORMATS:
        assert name in export_help()


def export_help():
    command = typer.main.get_command(app).commands["export"]
    return " ".join(option.help or "" for option in command.params)
