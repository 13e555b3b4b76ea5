"""Functions of a person's own: right ones are found right, and what cheats is caught and reported in one sentence."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from own_cases import EXAMPLES, OWN, case_of, forget, judged, own

from mta_kernels.operation import Operation
from mtabench.checking import judge
from mtabench.checking.judge import Judge
from mtabench.errors import UnsupportedError
from mtabench.measuring.failures import WrongResultError
from mtabench.problem.inputs import make_inputs
from mtabench.registry import chosen, implementation_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-kernel.md").read_text()
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    forget(monkeypatch)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_plain_function_is_right_in_both_passes(pass_):
    assert judged(own("attention", pass_)).ok


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
def test_an_object_is_right_with_its_own_backward_and_decode(pass_):
    assert judged(own("with_backward", pass_)).ok


@pytest.mark.parametrize("name", ["paged", "pages_in_order"])
def test_a_decode_that_takes_a_block_table_is_judged_with_pages(name):
    contiguous = own(name, "decode")
    assert judged(contiguous).ok
    check = judged(replace(contiguous, page_size=16))
    assert check.ok == (name == "paged")
    assert check.ok or "NaN" in check.reason
    assert implementation_of(contiguous).pages


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
@pytest.mark.parametrize("function", ["attention", "conv_attention"])
def test_the_example_in_pytorch_is_right(function, pass_):
    (entry,) = chosen([f"{EXAMPLES / 'my_attention.py'}:{function}"])
    if pass_ in entry.passes:
        assert judged(case_of(entry, pass_)).ok
    else:
        assert function == "conv_attention"


@pytest.mark.parametrize("causal", [True, False])
def test_the_example_in_triton_is_right(causal):
    (entry,) = chosen([f"{EXAMPLES / 'triton_attention.py'}:attention"])
    one = case_of(entry, device="cuda" if torch.cuda.is_available() else "cpu")
    one = replace(one, operation=Operation.of(None, 16, causal=causal))
    check = judged(one)
    assert check.ok, check


CHEATS = {
    "cached_by_version": "cached",
    "lazy": "its result is a Lazy; expected a torch.Tensor",
    "changes_inputs": "it changes its inputs: k",
    "changes_inputs_and_raises": "it changes its inputs: q",
    "resizes_inputs": "it changes its inputs: q",
    "freezes_inputs": "it changes its inputs",
    "late": "is not there when the call is over, and comes later",
}


@pytest.mark.parametrize("function", CHEATS)
def test_a_cheat_is_caught_and_said_and_inputs_that_it_changed_are_drawn_again(function):
    one = own(function, "bwd" if function == "freezes_inputs" else "fwd")
    inputs = make_inputs(one, 0)
    judge = Judge(one, inputs, 0)
    check = judge.first_of(implementation_of(one).build(one, inputs), one)
    assert not check.ok
    assert CHEATS[function] in check.reason
    assert "\n" not in check.reason
    fresh = make_inputs(one, 0)
    assert torch.equal(inputs.q, fresh.q)
    assert torch.equal(inputs.k, fresh.k)
    assert inputs.q.requires_grad == fresh.q.requires_grad
    (right,) = chosen([f"right={OWN}:attention"])
    assert judge.first_of(right.build(one, inputs), one).ok


def test_what_is_right_on_an_idle_device_only_is_said_to_work_on_another_stream():
    """As it is on a GPU, whose stream is busy when a call is made."""
    one = own("attention")
    inputs = make_inputs(one, 0)
    judging = Judge(one, inputs, 0)
    closure = implementation_of(one).build(one, inputs)
    early = judging.first(lambda probe: 0 * closure(), lambda probe: closure())
    assert (early.ok, early.reason) == (False, judge.EARLY)
    assert "against float64" in judging.first(lambda probe: 0 * closure(), lambda probe: 0 * closure()).reason


def test_a_result_that_changes_until_the_device_is_idle_is_late(monkeypatch):
    """A GPU's stream saw it before another one had written it, finite or not."""
    result = torch.zeros(2, 3)
    seen = judge.look([result])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    judge.check_in_time("cuda", seen, [result])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: result.fill_(1))
    with pytest.raises(WrongResultError, match="comes later"):
        judge.check_in_time("cuda", seen, [result])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_tell_whether_a_tensor_changed_however_it_lies(dtype):
    """Rows of an odd number, and places that eight bytes do not divide, among them."""
    buffer = torch.randn(4000).to(dtype)
    for x in (
        buffer[:960].view(2, 3, 10, 16), buffer[1:961].view(2, 3, 10, 16), buffer[:990].view(2, 3, 165), buffer[:1],
        buffer[:960].view(2, 10, 3, 16).transpose(1, 2), buffer[:16].as_strided((1, 1, 1, 16), (16, 16, 1, 1)),
    ):  # fmt: skip
        seen, before = judge.look([x]), x.clone()
        assert all(map(torch.equal, seen, judge.look([x])))
        for change in (lambda x: x[(0,) * x.dim()].neg_(), lambda x: x.copy_(x.roll(1, -1))):
            change(x)
            assert torch.equal(x, before) or not all(map(torch.equal, seen, judge.look([x])))
            x.copy_(before)


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "pass_", "fault"), [
    ("joined", "fwd", ""), ("joined", "bwd", ""), ("not_before", "fwd", "another stream"),
    ("not_before", "bwd", "another stream"), ("not_after", "fwd", "another stream"),  # autograd itself waits after bwd
    ("not_at_all", "fwd", "another stream"), ("not_at_all", "bwd", "another stream"),
])  # fmt: skip
def test_another_stream_without_waiting_is_caught(function, pass_, fault):
    one = own(function, pass_, device="cuda", seq=1025)
    check = judged(one)
    assert check.ok == (not fault), check
    assert fault in check.reason


@pytest.mark.parametrize(("function", "pass_", "error", "words"), [
    ("raises", "fwd", RuntimeError, "is invalid for input"),
    ("exits", "fwd", RuntimeError, r"it calls sys.exit\(0\)"),
    ("returns_a_tuple", "fwd", TypeError, "own returns a tuple of 2; expected the output, a tensor; only a"),
    ("without_gradient", "bwd", UnsupportedError, "own has no backward: autograd finds no way"),
    ("two_gradients", "bwd", TypeError, "the backward of own returns a tuple of 2; expected dq, dk, dv"),
    ("no_gradient", "bwd", TypeError, "the backward of own returns None as dv, not a tensor"),
])  # fmt: skip
def test_what_a_call_raises_is_one_sentence(function, pass_, error, words):
    with pytest.raises(error, match=words):
        judged(own(function, pass_))


def test_gradients_that_are_not_there_are_named():
    check = judged(own("detached", "bwd"))
    assert not check.ok
    assert check.reason.startswith("there is no gradient of k and v: autograd finds no way from the output to them;")


def test_an_error_names_the_line_of_the_file():
    line = 1 + next(i for i, text in enumerate(OWN.read_text().splitlines()) if "the line that a row names" in text)
    with pytest.raises(RuntimeError) as raised:
        judged(own("raises"))
    assert raised.value.__notes__ == [f"own_kernels.py, line {line}"]


def blocks(text, language):
    """The code of the fences of a language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [code for of, code in fences if of == language]


@pytest.mark.parametrize("text", [PAGE, README], ids=["docs/your-kernel.md", "README.md"])
def test_the_pages_run(mtabench, tmp_path, text, monkeypatch):
    """Their function is right, and each of their commands that measures with it can be planned."""
    (source,) = (block for block in blocks(text, "python") if "def attention(" in block)
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    (entry,) = chosen(["./mine.py:attention"])
    assert judged(case_of(entry)).ok
    commands = [line.split("#")[0].split() for block in blocks(text, "") for line in block.splitlines()]
    mine = [words[1:] for words in commands if words[:1] == ["mtabench"] and any("mine.py" in word for word in words)]
    assert {words[0] for words in mine} - {"ci"} == {"verify", "fwd", "ab"}
    for words in mine:
        if words[0] == "fwd":
            code, out, err = mtabench(*words, "--device", "cpu", "--dry-run")
            assert code == 0, err
            assert "mine:attention" in out
