"""Sweeps on a Dask cluster that is there, by TLS as docs/cluster.md says or plain on this machine; what is refused."""

import asyncio
import contextlib
import os
import pickle
import time

import planted_workers
import pytest
from command_line import contents, make_runner, refused

pytest.importorskip("distributed")
import dask
from distributed import LocalCluster, Security

from mtabench import registry
from mtabench.cluster import dask_cluster, team, worker
from mtabench.cluster.facts import facts_here
from mtabench.results.results_file import read_results
from mtabench.results.rows import cell_row
from mtabench.sweeps.measuring_process import Outcome

pytestmark = pytest.mark.slow

SHAPE = ("--head-dim", "16", "--heads", "2", "--conv", "3x3", "--rounds", "2", "--no-plot", "--impl", "eager")
CPU = ("--device", "cpu", "--seq", "16,32", *SHAPE)


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_workers.implementations())
    monkeypatch.syspath_prepend(planted_workers.FOLDER / "planted_site")
    return make_runner(monkeypatch, capsys, tmp_path)


def cluster_here(**options):
    """A cluster in this process, or one of `processes`, with one worker, which says that it has a core and a GPU."""
    options = {"protocol": "tcp://", "processes": False, "resources": {"CPU": 1, "GPU": 1}} | options
    return LocalCluster(
        n_workers=1, threads_per_worker=1, host="127.0.0.1", memory_limit=None,
        dashboard_address="127.0.0.1:0", worker_dashboard_address="127.0.0.1:0", silence_logs=60, **options,
    )  # fmt: skip


@pytest.fixture
def plain():
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}), cluster_here() as cluster:
        yield cluster


def start(measurer):
    return facts_here(measurer.device)


def measure(measurer, packed, doing=None):
    request = pickle.loads(packed)
    return Outcome([cell_row(case, request.facts, "ok") for case in request.plan.cases])


@pytest.fixture
def quick(monkeypatch):
    """Measuring processes do not start: rows are made up."""
    for call in (start, measure):  # by their names, which Dask pickles
        monkeypatch.setattr(worker.Measurer, call.__name__, call)


@contextlib.contextmanager
def with_tls(files):
    """Within, Dask's configuration has the files of an authority, a certificate and its key."""
    names = ("ca-file", "client.cert", "client.key")
    settings = {f"distributed.comm.tls.{name}": path for name, path in zip(names, files, strict=True)}
    with dask.config.set(settings):
        yield


def certificate(folder):
    """The files of an authority, a certificate and its key."""
    made = Security.temporary()
    folder.mkdir()
    for name, text in (("ca", made.tls_ca_file), ("cert", made.tls_client_cert), ("key", made.tls_client_key)):
        (folder / f"{name}.pem").write_text(text)
    return [str(folder / f"{name}.pem") for name in ("ca", "cert", "key")]


def test_a_cluster_by_tls_measures_and_a_stranger_gets_nothing(mtabench, tmp_path, monkeypatch):
    """Also where an event loop runs already, as in a notebook."""
    files = certificate(tmp_path / "tls")
    names = ("ca_file", *(f"{role}_{part}" for role in ("scheduler", "worker", "client") for part in ("cert", "key")))
    tls = {f"tls_{name}": files[0 if name == "ca_file" else 1 + name.endswith("key")] for name in names}
    with cluster_here(protocol="tls://", security=Security(require_encryption=True, **tls)) as cluster:
        address = cluster.scheduler_address
        assert address.startswith("tls://")

        async def sweep():
            return mtabench("fwd", *CPU, "--scheduler", address, "--out", "out.csv")

        with with_tls(files):
            code, _, err = asyncio.run(sweep())
        assert (code, err) == (0, "")
        table = read_results(tmp_path / "out.csv")
        assert table["status"].tolist() == ["ok", "ok"]
        assert table["worker"].str.startswith(f"{os.uname().nodename} CPU ").all()
        (process,) = [process for run_id, process in worker.processes.values() if run_id == table["run_id"][0]]
        assert process._process is None  # the worker is let go
        monkeypatch.setattr(dask_cluster, "CONNECT_S", 1.0)
        with with_tls(certificate(tmp_path / "stranger")):
            refused(mtabench("fwd", *CPU, "--scheduler", address), "no scheduler of Dask answers", address)


@pytest.mark.usefixtures("quick")
def test_a_scheduler_that_is_gone_stops_the_sweep_and_what_was_measured_is_kept(
    mtabench, tmp_path, monkeypatch, plain, caplog
):
    def measure_until_16(measurer, packed, doing=None):
        if pickle.loads(packed).plan.cases[0].seq == 16:
            plain.loop.add_callback(plain.scheduler.close)
            time.sleep(2)
        return measure(measurer, packed)

    measure_until_16.__name__ = "measure"
    monkeypatch.setattr(worker.Measurer, "measure", measure_until_16)
    code, _, err = mtabench("fwd", *CPU, "--scheduler", plain.scheduler_address, "--out", "out.csv")
    assert (code, len(err.splitlines())) == (1, 1), err
    assert "the connection to Dask's scheduler was lost; what was measured is kept in out.csv" in err
    assert "distributed.client" not in {record.name for record in caplog.records}
    assert read_results(tmp_path / "out.csv")["seq"].tolist() == [32]


@pytest.mark.usefixtures("quick")
def test_a_worker_without_the_gpu_that_it_offers(mtabench, tmp_path, plain):
    result = mtabench("fwd", "--seq", "16", *SHAPE, "--scheduler", plain.scheduler_address, "--out", "out.csv")
    refused(result, "cannot measure", "PyTorch")
    assert contents(tmp_path) == {}


def test_a_cluster_without_a_worker_of_the_kind(mtabench, monkeypatch):
    monkeypatch.setattr(team, "COME_S", 0.5)
    with cluster_here(resources=None) as cluster:
        refused(mtabench("fwd", *CPU, "--scheduler", cluster.scheduler_address), "no worker", "CPU=1")
