"""Sweeps on a Dask cluster that is there, by TLS as docs/cluster.md says or plain on this machine; what is refused."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time

import planted_workers
import pytest
from command_line import contents, make_runner, refused

pytest.importorskip("distributed")
import dask
from distributed import LocalCluster, Security

from mtabench import environment, registry
from mtabench.cluster import dask_cluster, facts, team
from mtabench.cluster import worker as tasks
from mtabench.results.results_file import read_results

pytestmark = pytest.mark.slow

SHAPE = ("--head-dim", "16", "--heads", "2", "--conv", "3x3", "--rounds", "2", "--no-plot", "--impl", "eager")
CPU = ("--device", "cpu", "--seq", "16,32", *SHAPE)


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_workers.implementations())
    monkeypatch.syspath_prepend(planted_workers.FOLDER / "planted_site")
    return make_runner(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def plain():
    """The address of a cluster in this process with one worker, which says that it has a core and a GPU."""
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, protocol="tcp://", host="127.0.0.1", memory_limit=None,
        resources={"CPU": 1, "GPU": 1}, dashboard_address="127.0.0.1:0", silence_logs=60,
    ) as cluster:  # fmt: skip
        yield cluster.scheduler_address


@contextlib.contextmanager
def with_tls(files):
    """Within, Dask's configuration has the files of an authority, a certificate and its key."""
    names = ("ca-file", "client.cert", "client.key")
    settings = {f"distributed.comm.tls.{name}": path for name, path in zip(names, files, strict=True)}
    with dask.config.set(settings):
        yield


def certificate(folder):
    """Options with the files of an authority, a certificate and its key."""
    made = Security.temporary()
    folder.mkdir()
    for name, text in (("ca", made.tls_ca_file), ("cert", made.tls_client_cert), ("key", made.tls_client_key)):
        (folder / f"{name}.pem").write_text(text)
    return [str(folder / f"{name}.pem") for name in ("ca", "cert", "key")]


@pytest.fixture
def encrypted(tmp_path_factory):
    """The address of a cluster in processes of its own, and the TLS files of its clients."""
    folder = tmp_path_factory.mktemp("cluster")
    files = certificate(folder / "tls")
    tls = [word for pair in zip(("--tls-ca-file", "--tls-cert", "--tls-key"), files, strict=True) for word in pair]
    common = [*tls, "--scheduler-file", str(folder / "scheduler.json"), "--dashboard-address", "127.0.0.1:0"]
    commands = [
        ["scheduler", "--host", "127.0.0.1", "--port", "0", "--protocol", "tls", *common],
        ["worker", "--host", "127.0.0.1", "--nthreads", "1", "--memory-limit", "0", "--resources", "CPU=1", *common],
    ]
    environ = planted_workers.environment()
    started = []
    with (folder / "log").open("w") as log:
        try:
            for words in commands:
                process = subprocess.Popen([sys.executable, "-m", "dask", *words], stdout=log, stderr=log, env=environ)
                started.append(process)
                environ.setdefault(planted_workers.SCHEDULER, str(process.pid))
            deadline = time.monotonic() + 300
            while "Scheduler at:" not in (text := (folder / "log").read_text()):
                assert time.monotonic() < deadline, text
                time.sleep(0.1)
            yield text.partition("Scheduler at:")[2].split()[0], files
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait(20)


def test_a_cluster_by_tls_measures_until_its_scheduler_is_gone(mtabench, tmp_path, caplog, encrypted):
    """What was measured is kept, and a stranger gets nothing."""
    address, files = encrypted
    assert address.startswith("tls://")
    with with_tls(certificate(tmp_path / "stranger")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dask_cluster, "CONNECT_S", 1.0)
        refused(mtabench("fwd", *CPU, "--scheduler", address), "no scheduler of Dask answers", address)
    impl = ("--seq", "16..64", "--impl", "kills-scheduler")
    with with_tls(files):
        code, _, err = mtabench("fwd", *CPU, *impl, "--scheduler", address, "--out", "out.csv")
    assert code == 1
    assert len(err.splitlines()) == 1, err
    assert "the connection to Dask's scheduler was lost; what was measured is kept in out.csv" in err
    assert [record for record in caplog.records if record.name == "distributed.client"] == []
    # The shape whose measuring ends the scheduler goes out once the rows of the one before it are on disk.
    table = read_results(tmp_path / "out.csv")
    expected = [["eager", 64, "ok"], ["kills-scheduler", 64, "ok"]]
    assert table[["impl", "seq", "status"]].values.tolist() == expected
    assert table["worker"].str.startswith(f"{os.uname().nodename} CPU ").all()


def test_a_cluster_on_this_machine_may_be_plain(mtabench, tmp_path, plain):
    """Also where an event loop runs already, as in a notebook."""

    async def measure():
        return mtabench("fwd", *CPU, "--scheduler", plain, "--out", "out.csv")

    code, _, err = asyncio.run(measure())
    assert (code, err) == (0, "")
    assert read_results(tmp_path / "out.csv")["status"].tolist() == ["ok", "ok"]
    assert tasks._measurer is None  # the worker is let go


def test_a_worker_without_the_gpu_that_it_offers(mtabench, tmp_path, plain):
    result = mtabench("fwd", "--seq", "16", *SHAPE, "--scheduler", plain, "--out", "out.csv")
    refused(result, "cannot measure", "PyTorch")
    assert contents(tmp_path) == {}


def test_a_worker_with_another_revision(mtabench, tmp_path, monkeypatch, plain):
    monkeypatch.setattr(environment, "git_state", lambda root: ("0123456789ab", False))
    result = mtabench("fwd", *CPU, "--scheduler", plain, "--out", "out.csv")
    refused(result, "does not run the same as this process", "git revision", "instead of 0123456789ab")
    assert contents(tmp_path) == {}


def test_a_cluster_without_a_worker_of_the_kind(mtabench, monkeypatch):
    monkeypatch.setattr(team, "COME_S", 0.5)
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, protocol="tcp://", host="127.0.0.1",
        dashboard_address="127.0.0.1:0", silence_logs=60,
    ) as cluster:  # fmt: skip
        refused(mtabench("fwd", *CPU, "--scheduler", cluster.scheduler_address), "no worker", "--resources CPU=1")


def place(number, device="NVIDIA H200", gpu=None):
    described = {"device": device, "mtabench": "1", "git_sha": "", "torch": "2", "triton": "3"}
    return facts.Facts(f"node{number} GPU 0", gpu or f"GPU-{number}", described, "0")


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ([place(1), place(2, "NVIDIA A100")], "have NVIDIA H200, NVIDIA A100, and a sweep measures on one of them"),
        ([place(1), place(2, gpu="GPU-1")], "share the GPU GPU-1"),
    ],
)
def test_workers_are_of_one_kind_and_each_has_a_gpu(monkeypatch, there, said):
    monkeypatch.setattr(facts, "facts_here", lambda device: there[0])
    gathered = team.Team(team.ClusterOptions(scheduler="tls://a:1"), "cuda", [], object())
    monkeypatch.setattr(team.Team, "_first", lambda self: dict(enumerate(there)))
    with pytest.raises(team.UsageError, match=said):
        gathered.meet()
