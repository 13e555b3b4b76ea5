"""The table of implementations: every row resolves, names are found, defaults suit pass and device."""

import pytest

from mtabench.errors import UsageError
from mtabench.problem.case import OPS, PASSES
from mtabench.registry import BASELINE, IMPLEMENTATIONS, default_names, find, load, names


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_every_row_resolves(implementation):
    assert callable(load(implementation.target))
    assert callable(load(implementation.unsupported))
    for reference in (implementation.splits_used, implementation.interpreted):
        assert not reference or callable(load(reference))
    assert implementation.op in OPS
    assert set(implementation.passes) <= set(PASSES)
    assert set(implementation.devices) <= {"cuda", "cpu"}
    assert implementation.work in ("dense", "tiled", "expanded", "banded", "overlapped")


def test_names_are_unique_and_the_baseline_is_among_them():
    assert len(set(names())) == len(IMPLEMENTATIONS)
    assert find(BASELINE).op == "conv-attention"


@pytest.mark.parametrize(("typed", "meant"), [("egaer", "eager"), ("tritn", "triton"), ("sdpa-cudn", "sdpa-cudnn")])
def test_an_unknown_name_gets_the_nearest(typed, meant):
    with pytest.raises(UsageError, match=f"did you mean .*{meant}"):
        find(typed)


def test_a_name_like_no_other_gets_all():
    with pytest.raises(UsageError, match=", ".join(names())):
        find("xyzzy")


def test_defaults_support_pass_and_device():
    assert default_names("fwd", "cuda") == ["eager", "compile", "triton", "hopper", "sdpa-flash", "sdpa-cudnn"]
    assert default_names("fwd", "cpu") == ["eager", "compile", "sdpa-flash"]
    for device in ("cuda", "cpu"):
        for pass_ in PASSES:
            chosen = [find(name) for name in default_names(pass_, device)]
            assert all(pass_ in i.passes and device in i.devices for i in chosen)
