"""`attention` and its rungs by name: which is taken, what is refused, and that nothing is imported before its time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mta_kernels import torch_compile
from mta_ladder import RUNGS, attention, attention_reference, flash_attn, rung_unsupported

X = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_rung_that_is_named_is_taken(monkeypatch):
    called = []
    monkeypatch.setattr("mta_ladder.sdpa.attention", lambda *args, **options: called.append(options))
    attention(X, X, X, causal=False, scale=2.0, rung="sdpa-flash")
    assert called == [{"causal": False, "scale": 2.0, "backend": "flash"}]


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_says_in_a_clause_why_it_cannot_run_or_that_it_can(rung):
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in (64, 1000):
            reason = rung_unsupported(rung, device="cpu", dtype=dtype, head_dim=head_dim)
            assert reason is None or (reason and "\n" not in reason and not reason.endswith(".")), reason


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X[0], X, X), ValueError, "expected four dimensions"),
        ((X, X[:, :, :5], X[:, :, :5]), ValueError, "as many rows as k, or fewer"),
        ((X, X, X[:, :, :5]), ValueError, "batch, heads and rows must be the same"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_sentence(arguments, error, words):
    with pytest.raises(error, match=words) as caught:
        attention(*arguments, rung="sdpa-flash")
    assert "\n" not in str(caught.value)


def test_an_unknown_rung_gets_the_nearest():
    with pytest.raises(ValueError, match=r"no rung 'flash'; did you mean .*'flash-attn'"):
        attention(X, X, X, rung="flash")
    with pytest.raises(ValueError, match="expected one of c-loops, "):
        rung_unsupported("xyzzy", device="cpu", dtype=torch.float32, head_dim=8)


@pytest.mark.parametrize("rung", ["triton-fmha", "cuda-flash", "sdpa-flash", "flex", "cutile-fmha"])
def test_a_gpu_that_is_not_there_is_a_reason(rung):
    reason = rung_unsupported(rung, device="cuda:99", dtype=torch.bfloat16, head_dim=64)
    assert reason == "PyTorch finds no cuda:99 device on this machine"


def test_a_rung_that_cannot_run_is_refused_and_no_other_takes_its_place():
    with pytest.raises(ValueError, match=r"rung 'sdpa-cudnn' cannot run this: .*CUDA"):
        attention(X, X, X, rung="sdpa-cudnn")


@pytest.mark.parametrize("rung", ["flash-attn", "flash-attn-3", "flash-attn-4"])
def test_a_package_that_is_missing_comes_with_the_line_that_installs_it(rung, monkeypatch):
    def find_spec(name):
        if "." in name:  # it imports what the module lies in
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(flash_attn.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr("mta_ladder.absent", lambda device: None)
    reason = rung_unsupported(rung, device="cuda", dtype=torch.bfloat16, head_dim=64)
    assert reason.startswith(f"{rung} is not installed (pip install ")


@pytest.mark.parametrize(("rung", "capability", "head_dim", "reason"), [
    ("flash-attn-4", (8, 0), 64, "flash-attn-4 needs a GPU of sm_90 or later"),
    ("flash-attn-4", (10, 0), 192, "flash-attn-4 takes head dims .* up to 128 on this GPU, not 192"),
    ("flash-attn-4", (9, 0), 192, "None"),
    ("flash-attn-3", (10, 0), 64, r"flash-attn-3 needs an H100 or H200 \(sm_90\)"),
    ("flash-attn", (8, 6), 260, "flash-attn takes head dims .* up to 256 on this GPU, not 260"),
])  # fmt: skip
def test_a_package_takes_its_gpus_and_head_dims(monkeypatch, rung, capability, head_dim, reason):
    monkeypatch.setattr(flash_attn, "_installed", lambda module: True)
    monkeypatch.setattr(flash_attn, "_function", lambda module: None)
    monkeypatch.setattr(flash_attn.torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    found = flash_attn.unsupported(device=device, dtype=torch.bfloat16, head_dim=head_dim, package=rung)
    assert re.fullmatch(reason, str(found))


def test_a_package_that_is_installed_is_called_as_its_authors_say(monkeypatch):
    """A stand-in for all of them: [B, N, heads, D], the softmax's scale, and a tuple from some versions."""
    found = []

    def function(q, k, v, softmax_scale, causal):
        found.append(tuple(q.shape))
        out = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, scale=softmax_scale)
        return out.transpose(1, 2), None

    monkeypatch.setattr(flash_attn, "_function", lambda module: function)
    q, k = X[:, :, -3:], X[:, :1]
    for package in flash_attn.PACKAGES:
        out = flash_attn.attention(q, k, k, causal=True, scale=0.5, package=package)
        assert torch.equal(out, attention_reference(q, k, k, scale=0.5))
    assert found == [(1, 3, 2, 8)] * 3


@pytest.mark.long
def test_flex_takes_grouped_heads_and_the_last_rows_of_many():
    reason = rung_unsupported("flex", device="cpu", dtype=torch.float32, head_dim=16)
    if reason:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 33, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, 150, 16, generator=generator)
    torch.testing.assert_close(attention(q, k, v, rung="flex"), attention_reference(q, k, v))


def test_torch_compile_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_compile.shutil, "which", lambda name: None)
    assert "C++ compiler" in torch_compile.missing("cpu")
    assert "C++ compiler" in rung_unsupported("flex", device="cpu", dtype=torch.float32, head_dim=16)
    monkeypatch.setattr(torch_compile.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch_compile.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in torch_compile.missing("cpu")
    (tmp_path / "Python.h").touch()
    assert torch_compile.missing("cpu") is None


def test_functions_compiled_apart_do_not_share_code():
    """torch.compile stops compiling one code object after eight shapes."""
    originals = [
        torch_compile.compiled_apart(attention_reference)._torchdynamo_orig_callable.__code__ for _ in range(2)
    ]
    assert originals[0] is not originals[1]
    assert all(code is not attention_reference.__code__ for code in originals)


def test_rungs_are_imported_when_they_are_asked_for():
    program = """
import sys
import mta_ladder
print(*(name for name in sys.modules if name.startswith("mta_ladder.")))
print(*({"torch._dynamo", "cuda.tile", "flash_attn"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "kernels")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines() == ["mta_ladder.reference mta_ladder.sdpa", ""]


def test_a_rung_without_a_backward_refuses_to_lose_a_gradient():
    q = torch.randn(1, 1, 4, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"rung 'triton-fmha' has no gradient; call it under torch\.no_grad"):
        attention(q, q, q, rung="triton-fmha")


def test_a_rung_without_derivatives_refuses_dual_tensors():
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(RuntimeError, match="rung 'c-loops' has no forward-mode derivatives"):
        torch.func.jvp(lambda q: attention(q, q, q, rung="c-loops"), (q,), (q,))


def test_a_package_that_a_rung_is_written_in_is_a_reason(monkeypatch):
    monkeypatch.delitem(sys.modules, "mta_ladder.triton_fmha", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    q = torch.randn(1, 1, 4, 16)
    reason = "triton is not installed (pip install triton)"
    assert rung_unsupported("triton-fmha", device="cpu", dtype=torch.float32, head_dim=16) == reason
    with pytest.raises(ValueError, match=f"cannot run this: {re.escape(reason)}"):
        attention(q, q, q, rung="triton-fmha")
