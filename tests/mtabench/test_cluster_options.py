"""Options of workers that cannot be had give one sentence, before anything is started or written."""

import os
import socket
import stat

import pytest
from command_line import contents, make_runner, printed, refused

from mtabench import options
from mtabench.cluster import dask_cluster, facts

CPU = ("--device", "cpu", "--seq", "16", "--impl", "eager")
GPU = ("--seq", "16", "--impl", "eager")


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make_runner(monkeypatch, capsys, tmp_path)


@pytest.fixture
def two_gpus(monkeypatch, tmp_path_factory):
    """An nvidia-smi that lists an H200 and an A100."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "nvidia-smi"
    script.write_text("#!/bin/sh\necho '0, GPU-aaaa, NVIDIA H200'\necho '1, GPU-bbbb, NVIDIA A100-SXM4-80GB'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "all", "--device", "cpu"), "--workers 2 --device cpu"),
        (("--workers", "2"), "needs --device cpu"),
        (("--workers", "0", "--device", "cpu"), "it must be 1 or more"),
        (("--workers", "99999", "--device", "cpu"), "cores of this machine"),
        (("--workers", "2", "--device", "cpu", "--gpus", "all"), "exclude each other"),
        (("--gpus", "all", "--scheduler", "tls://a:1"), "exclude each other"),
        (("--workers", "2", "--device", "cpu", "--isolate"), "drop --isolate or --workers"),
        (("--gpus", "7"), "there is no GPU 7 here; expected all, or some of 0, 1"),
        (("--gpus", "0,x"), "expected all, or numbers of GPUs"),
        (("--scheduler", "tcp://node01:8786"), "plain tcp:// is for this machine only"),
        (("--scheduler", "ws://127.0.0.1:8786"), "is no address"),
        (("--scheduler", "tls://node01:x"), "is no address"),
        (("--scheduler", "tls://node01:8786"), "distributed.comm.tls.ca-file, .client.cert and .client.key"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_options_that_cannot_be_had(mtabench, tmp_path, words, message):
    refused(mtabench("fwd", *GPU, *words), message)
    assert contents(tmp_path) == {}


def test_tls_files_that_are_not_there_or_no_certificates(mtabench, tmp_path):
    dask = pytest.importorskip("dask")
    words = ("fwd", *CPU, "--scheduler", "tls://node01:8786")
    names = {"ca-file": "ca.pem", "client.cert": "c.pem", "client.key": "k.pem"}
    with dask.config.set({f"distributed.comm.tls.{name}": str(tmp_path / file) for name, file in names.items()}):
        refused(mtabench(*words), "a PEM file each", "No such file")
        for name in names.values():
            (tmp_path / name).write_text("nothing")
        refused(mtabench(*words), "a PEM file each", "PEM")


@pytest.mark.parametrize("accepts", [True, False])
def test_a_scheduler_that_is_not_there_or_never_speaks(mtabench, tmp_path, monkeypatch, accepts):
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 0.5)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if accepts:
            port.listen()
        address = f"tcp://127.0.0.1:{port.getsockname()[1]}"
        result = mtabench("fwd", *CPU, "--scheduler", address, "--out", "a.csv")
    # The time may be over, on a busy machine, before the system refuses.
    why = "(Connection refused)" if "refused" in result[2] else "(no answer within 0.5 s)"
    refused(result, f"no scheduler of Dask answers at {address} {why}; start it")
    assert contents(tmp_path) == {}


def test_without_dask_it_says_what_to_install(mtabench, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    words = ("fwd", *CPU, "--scheduler", "tls://node01:8786")
    refused(mtabench(*words), "needs the package distributed", "pip install 'mtabench[cluster]'")


def test_without_nvidia_smi_there_are_no_gpus(mtabench, monkeypatch):
    monkeypatch.setattr(facts.subprocess, "run", lambda *args, **options: (_ for _ in ()).throw(FileNotFoundError()))
    refused(mtabench("fwd", *GPU, "--gpus", "all"), "nvidia-smi lists no GPU here", "--workers 2 --device cpu")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "expected"), [(None, [0, 1]), ("1", [1]), ("GPU-aa", [0]), ("", []), ("1,0", [0, 1])]
)
def test_gpus_that_cuda_does_not_see_are_none(monkeypatch, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in facts.gpus_of_machine()] == expected


@pytest.mark.usefixtures("two_gpus")
def test_a_dry_run_starts_nothing_and_says_who_would_measure(mtabench, tmp_path):
    out = printed(mtabench("fwd", "--gpus", "0", "--dry-run"))
    assert "workers: 1 on NVIDIA H200" in out
    assert "device    cuda" in out
    assert contents(tmp_path) == {}


def test_only_what_is_the_same_may_measure():
    here = {"device": "H200", "mtabench": "0.1.0", "git_sha": "abc", "sources": "1", "torch": "2.13.0", "triton": ""}
    assert facts.differences(here, here | {"torch": "2.13.0+cu130"}) == ""
    assert facts.differences(here, here | {"git_sha": ""}) == "git revision unknown instead of abc"
    there = here | {"torch": "2.11.0", "mtabench": "0.2.0", "sources": "2"}
    expected = "mtabench 0.2.0 instead of 0.1.0, torch 2.11.0 instead of 2.13.0, sources 2 instead of 1"
    assert facts.differences(here, there) == expected
