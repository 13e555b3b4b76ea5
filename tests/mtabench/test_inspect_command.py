"""`mtabench inspect` on kernels planted for it: what it shows and writes, the gate, bad input, what is missing."""

import dataclasses
import json
import re
from importlib.util import find_spec

import planted_sources
import pytest
from command_line import make_runner, printed, refused

from mta_kernels.nvrtc.compiler import missing_package
from mtabench.commands import inspect as command
from mtabench.static import compiling
from mtabench.static.limits import limits_of
from mtabench.static.records import SKIPPED, Inspection, Kernel, json_text, read_json
from mtabench.static.shapes import Shape

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="compiles with Triton")
ONE = ("--target", "sm_90", "--head-dim", "64")
PLACE = "sm_90, bf16, head dim 64, conv 6x11: "


@pytest.fixture
def inspect(monkeypatch, capsys, tmp_path):
    """Runs `mtabench inspect` in an empty folder, on planted sources; the exit code, standard output and error."""
    mtabench = make_runner(monkeypatch, capsys, tmp_path, columns=100)

    def run(*words, planted=("modest",)):
        monkeypatch.setattr(command, "SOURCES", [planted_sources.planted(name) for name in planted])
        return mtabench("inspect", *words)

    return run


@pytest.fixture(scope="module")
def modest():
    """The modest kernels for sm_90."""
    pytest.importorskip("triton")
    return compiling.inspect([limits_of("sm_90")], [Shape()], [planted_sources.planted("modest")])


@pytest.fixture
def compiles_to(monkeypatch):
    """Have `mtabench inspect` find these kernels, and compile nothing."""

    def plant(found):
        monkeypatch.setattr(command, "inspect", lambda *args, **options: found)
        monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: object())

    return plant


def test_what_a_kernel_takes(modest):
    product, _, copy = modest.kernels
    assert [kernel.kernel for kernel in modest.kernels] == ["product", "product.2", "copy"]
    assert {(kernel.target, kernel.language, kernel.status) for kernel in modest.kernels} == {("sm_90", "triton", "ok")}
    assert (product.warps, product.stages, product.tiles) == (4, 2, "BLOCK_ROWS=64 BLOCK_DEPTH=64")
    assert product.dynamic_shared_bytes == 2 * 2 * 64 * 64 * 2  # two stages of two tiles of bf16
    assert (product.static_shared_bytes, product.shared_limit_bytes) == (0, 227 * 1024)
    assert product.warps_per_sm == 4 * product.blocks_per_sm
    assert (copy.spill_bytes, copy.stack_bytes) == (0, 0)
    assert modest.toolchain.keys() == {"triton", "ptxas"}


def test_the_table_fits_in_100_columns_and_the_file_holds_the_same(inspect, compiles_to, modest, tmp_path):
    compiles_to(modest)
    out = printed(inspect(*ONE, "--json-file", "kernels.json"))
    assert "sm_90: bf16, head dim 64, conv 6x11 (H200: 64 warps, 228 KiB an SM, 227 KiB a block)" in out
    assert out.splitlines()[-1] == "kernels: 3, spilling: 0, not fitting: 0, failed: 0, skipped: 0"
    assert max(map(len, out.splitlines())) <= 100
    assert read_json(tmp_path / "kernels.json") == Inspection([*modest.kernels], [Shape()], modest.toolchain)


@needs_triton
def test_rows_keep_the_order_asked_for_and_are_the_same_in_every_run(inspect, modest, tmp_path):
    words = ("--target", "sm_90", "--head-dim", "128,64", "--json-file", "found.json")
    code, _, err = inspect(*words)
    assert code == 0, err
    kernels = read_json(tmp_path / "found.json").kernels
    assert [kernel.shape.split(", ")[1] for kernel in kernels] == ["head dim 128"] * 3 + ["head dim 64"] * 3
    assert kernels[3:] == [*modest.kernels]
    assert "[2/2] " in err


@needs_triton
def test_the_gate_catches_a_spill_and_shared_memory_that_is_outgrown(inspect, modest, tmp_path):
    (tmp_path / "base.json").write_text(json_text(modest))
    code, out, _ = inspect("--baseline", "base.json", planted=["greedy"])
    assert code == 1
    assert f"worse: {PLACE}product starts to spill: " in out
    assert f"worse: {PLACE}product loses occupancy: " in out
    [outgrown] = re.findall(rf"worse: {PLACE}product\.2 no longer fits: (\d+) bytes of shared memory, of 232448 ", out)
    assert int(outgrown) > 232448
    assert "copy" not in out
    assert out.splitlines()[-1] == (
        "3 for the worse among 3 kernels compared with base.json; "
        "to accept what is there now: mtabench inspect --baseline base.json --accept"
    )
    assert (tmp_path / "base.json").read_text() == json_text(modest)


def test_what_is_accepted_is_the_baseline_from_then_on(inspect, compiles_to, modest, tmp_path):
    (tmp_path / "base.json").write_text(json_text(modest))
    left = dataclasses.replace(modest, kernels=modest.kernels[:2])
    compiles_to(left)
    out = printed(inspect("--baseline", "base.json", "--accept"))
    assert f"worse: {PLACE}copy is gone" in out
    assert "kernels that base.json holds now: 2" in out
    assert inspect("--baseline", "base.json")[0] == 0


@pytest.mark.parametrize(
    ("tools", "head", "words", "code", "text"),
    [
        ({}, slice(None), "", 0, "kernels as good as in base.json, or better: 3\n"),
        ({}, slice(2, None), "--kernel copy", 0, "kernels as good as in base.json, or better: 1\n"),
        ({}, slice(None), "--target sm_80", 5, "nothing could be compared"),
        ({"triton": "3.5.0"}, slice(2), "", 5, f"worse: {PLACE}copy is gone"),
        ({"triton": "3.5.0"}, slice(2), "", 5, "instead of 3.5.0, so a change may be the compiler's"),
    ],
)
def test_the_gate_is_open_or_says_why_it_is_not(inspect, compiles_to, modest, tmp_path, tools, head, words, code, text):
    base = dataclasses.replace(modest, toolchain=dict(modest.toolchain) | tools)
    (tmp_path / "base.json").write_text(json_text(base))
    compiles_to(dataclasses.replace(modest, kernels=modest.kernels[head]))
    got, out, _ = inspect("--baseline", "base.json", *words.split())
    assert got == code
    assert (out == text) if code == 0 else (text in out)


def test_nothing_is_accepted_where_a_kernel_cannot_be_compiled(inspect, compiles_to, modest, tmp_path):
    (tmp_path / "base.json").write_text(json_text(modest))
    skipped = Kernel("sm_90", Shape().name, "hopper", SKIPPED, "hopper", "cuda", "no compiler")
    compiles_to(dataclasses.replace(modest, kernels=[*modest.kernels, skipped]))
    code, _, err = inspect("--baseline", "base.json", "--accept")
    assert code == 1
    assert "base.json is left as it is: hopper cannot be compiled here: no compiler" in err
    assert (tmp_path / "base.json").read_text() == json_text(modest)


@needs_triton
def test_what_does_not_compile_is_a_row_and_no_end(inspect, tmp_path):
    """Beside kernels of a CUDA source, which NVRTC compiles."""
    code, out, _ = inspect(*ONE, "--json-file", "found.json", planted=["wrong", "unavailable", "cuda"])
    assert code == 0
    found = read_json(tmp_path / "found.json")
    kernel, host_code, source, *of_cuda = found.kernels
    assert (kernel.kernel, kernel.status) == ("wrong", "failed")
    assert "no_such_function" in kernel.reason
    assert (host_code.status, host_code.reason) == ("failed", "ValueError: the smallest tiles need more")
    assert (source.status, source.reason) == ("skipped", "its compiler is not installed; install it")
    assert "failed: 2, skipped: 1" in out
    if missing_package():
        return
    lookup, reverse = of_cuda
    assert (lookup.language, lookup.warps, lookup.stack_bytes, lookup.spill_bytes) == ("cuda", 8, 256, 0)
    assert (reverse.static_shared_bytes, reverse.status) == (512, "does not fit")
    assert reverse.reason == f"{512 + 227 * 1024} bytes of shared memory, of {227 * 1024} that a block can have"
    assert "nvrtc" in found.toolchain


@needs_triton
def test_a_compiler_that_crashes_is_a_row_and_no_end(inspect, tmp_path):
    assert inspect(*ONE, "--json-file", "found.json", planted=["dying"])[0] == 0
    [lost] = read_json(tmp_path / "found.json").kernels
    assert (lost.kernel, lost.status) == ("all", "failed")
    assert lost.reason.startswith("its process was ended by SIGABRT")


def test_without_triton_it_says_what_to_install(inspect, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    code, out, err = inspect(*ONE)
    assert (code, out) == (1, "")
    assert "pip install triton" in err


def test_a_kernel_that_is_not_launched_is_wrong_usage(inspect, compiles_to):
    compiles_to(Inspection([], [Shape()], {}, ["copy", "product"]))
    found = inspect(*ONE, "--kernel", "product,softmax")
    refused(found, "--kernel 'softmax' is part of no name of a kernel that is launched", "there are copy, product")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--target sm_70", "--target 'sm_70' is not known"),
        ("--target sm_90,", "empty place"),
        ("--conv 6x32", "out of range"),
        ("--kernel ''", "--kernel is empty"),
        (
            "--baseline none.json",
            "none.json cannot be read: No such file or directory; make one with `mtabench inspect",
        ),
        ("--baseline text.json", "text.json is not JSON"),
        ("--baseline other.json", "schema version 99, and this mtabench reads 1"),
        ("--baseline broken.json", "is no inspection of kernels"),
        ("--baseline empty.json", "has no kernel for a target that is known"),
        ("--baseline empty.json --json-file empty.json", "is one of the files that are read"),
        ("--json-file text.json", "text.json already exists; give --overwrite"),
        ("--accept", "it needs --baseline FILE"),
        ("--accept --baseline empty.json --target sm_90", "no target, kernel or shape"),
        ("--all-shapes --head-dim 33", "none of the shapes to inspect is as asked for"),
    ],
)
def test_bad_input_is_one_sentence_and_touches_no_file(inspect, tmp_path, words, sentence):
    head = {"schema_version": 1, "toolchain": {}, "shapes": {}}
    contents = {
        "text.json": "not json",
        "other.json": '{"schema_version": 99}',
        "broken.json": json.dumps(head | {"kernels": [{"target": "sm_90"}]}),
        "empty.json": json.dumps(head | {"kernels": []}),
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    refused(inspect(*(word.strip("'") for word in words.split())), sentence)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == contents
