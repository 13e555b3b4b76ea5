"""All implementations: what entries say, names that are found, defaults that suit pass and device."""

import ast
from pathlib import Path

import pytest

from mtabench.errors import UsageError
from mtabench.problem.case import PASSES
from mtabench.problem.operations import OPS
from mtabench.registry import BASELINE, IMPLEMENTATIONS, default_names, every, find, names


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: f"{i.name} {i.op}")
def test_every_entry_is_of_what_is_known(implementation):
    assert implementation.op in OPS
    assert set(implementation.passes) <= set(PASSES)
    assert set(implementation.devices) <= {"cuda", "cpu"}
    assert implementation.work in ("dense", "tiled", "staged", "expanded", "banded", "overlapped")


def test_a_name_stands_for_one_entry_an_operation_and_the_baseline_for_one_of_each():
    assert len({(entry.name, entry.op, entry.of_models) for entry in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
    assert len(set(names())) == len(names())
    assert find(BASELINE).op == "conv-attention"
    assert {entry.op for entry in every(BASELINE)} == set(OPS) - {"attention"}
    assert all(entry.op != "attention" or len(every(entry.name)) == 1 for entry in IMPLEMENTATIONS)


def test_a_name_has_one_style():
    assert all(entry.style == find(entry.name).style for entry in IMPLEMENTATIONS)


@pytest.mark.parametrize(("typed", "meant"), [("egaer", "eager"), ("tritn", "triton"), ("sdpa-cudn", "sdpa-cudnn")])
def test_an_unknown_name_gets_the_nearest(typed, meant):
    with pytest.raises(UsageError, match=f"did you mean .*{meant}"):
        find(typed)


@pytest.mark.parametrize("typed", ["xyzzy", "foo", "mine", "", "cub"])
def test_a_name_like_no_other_gets_all(typed):
    with pytest.raises(UsageError, match=", ".join(names())):
        find(typed)


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("sdpa", "sdpa-flash or sdpa-cudnn or sdpa-math"),
        ("tirton", "triton"),
        ("Hoper", "hopper"),
        ("lader", "ladder"),
    ],
)
def test_only_names_that_are_near_are_suggested(typed, near):
    with pytest.raises(UsageError) as caught:
        find(typed)
    assert f"did you mean {near}?" in str(caught.value)


def test_defaults_support_pass_and_device():
    usual = ["eager", "compile", "triton", "hopper", "sdpa-flash", "sdpa-cudnn"]
    assert [name for name in default_names("fwd", "cuda") if name in usual] == usual
    assert [name for name in default_names("fwd", "cpu") if name in usual] == ["eager", "compile", "sdpa-flash"]
    for device in ("cuda", "cpu"):
        for pass_ in PASSES:
            entries = [
                [i for i in every(name) if pass_ in i.passes and device in i.devices and not i.by_name]
                for name in default_names(pass_, device)
            ]
            assert all(entries)


def tables_with_names(source):
    """Implementations that collections of a source name; some are columns of results or texts of options, too."""
    tables = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict)
    ]
    texts = {node.value for table in tables for node in ast.walk(table) if isinstance(node, ast.Constant)}
    return texts & (set(names()) - {"auto", "cuda", "plain", "triton"})


def test_no_other_table_knows_an_implementation():
    folder = Path(__file__).parents[2] / "mtabench"
    files = [path for path in folder.rglob("*.py") if path.parent.name != "implementations"]
    found = {str(path.relative_to(folder)): tables_with_names(path.read_text()) for path in files}
    assert {path: known for path, known in found.items() if known} == {}
