"""Groups go out to workers that may be lost, come late or be others: every cell gets one row."""

import pickle
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
from written_runs import ENVIRONMENT

from mtabench.cluster import team
from mtabench.cluster.team import Team
from mtabench.errors import MtabenchError, UsageError
from mtabench.measuring.timing import Settings
from mtabench.results.results_file import read_results
from mtabench.results.rows import cell_row
from mtabench.results.writer import Writer
from mtabench.sweeps.measuring_process import Outcome
from mtabench.sweeps.plan import Options, make_plan

HERE = {"mtabench": "0.1.0", "git_sha": "", "sources": "1"} | ENVIRONMENT


def worker(number, **changes):
    return HERE | {"worker": f"node{number} GPU 0", "gpu": f"GPU-{number}"} | changes


def ended(value):
    future = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class PlantedWorkers:
    """Make rows up at once, but for those that die at their first group; `measured` says who measured what."""

    device_name = ""

    def __init__(self, facts, dying=()):
        self.facts, self.dying, self.measured = dict(facts), set(dying), []
        self.is_lost = False

    def there(self):
        if self.is_lost:
            raise ConnectionError("the connection was lost")
        return set(self.facts)

    def start(self, name):
        return ended(self.facts[name])

    def measure(self, name, packed, doing):
        request = pickle.loads(packed)
        doing("measuring")
        self.measured.append((name, request.plan.cases[0].seq))
        if name in self.dying or name not in self.facts:
            self.facts.pop(name, None)
            return Future()  # the sweep cancels it
        return ended(Outcome([cell_row(case, request.facts, "ok") for case in request.plan.cases]))


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setattr(team, "facts_here", lambda device: dict(HERE))
    monkeypatch.setattr(team, "LOOK_AGAIN_S", 0.01)


def sweep(path, workers, later=None, seq="16..320:+16"):
    """The table of a sweep by workers that are there and others that come later, and its messages."""
    plan = make_plan(Options("fwd", seq=seq, conv="3x3,5x5", impl="eager", head_dim="64"), "cpu")
    watcher, made = Mock(), Team(workers, "0123456789ab")
    made.meet()
    workers.facts |= later or {}
    with Writer(path) as writer:
        made.run(plan, writer, Settings(), watcher)
    assert watcher.ended.call_count == len(plan.cases)
    return read_results(path), [call.args[0] for call in watcher.said.call_args_list]


def test_many_workers_share_the_groups_the_longest_first(tmp_path):
    workers = PlantedWorkers({number: worker(number) for number in range(8)})
    table, messages = sweep(tmp_path / "out.csv", workers)
    assert (len(table), messages) == (40, [])
    assert not table.duplicated(["seq", "conv_q"]).any()
    assert [seq for _, seq in workers.measured] == list(range(320, 0, -16))
    assert {name for name, _ in workers.measured} == set(range(8))
    assert (table.groupby("seq")["worker"].nunique() == 1).all()


def test_the_group_of_a_lost_worker_is_measured_last_by_another(tmp_path):
    workers = PlantedWorkers({1: worker(1), 2: worker(2)}, dying=[2])
    table, messages = sweep(tmp_path / "out.csv", workers)
    assert set(table["worker"]) == {"node1 GPU 0"}
    assert messages == ["node2 GPU 0 lost a group (its worker was lost): it is measured again"]
    (lost,) = [seq for name, seq in workers.measured if name == 2]
    assert workers.measured[-1] == (1, lost)


def test_a_group_that_kills_its_workers_is_given_up_with_the_reasons(tmp_path):
    workers = PlantedWorkers({1: worker(1), 2: worker(2), 3: worker(3)}, dying=[1, 2, 3])
    table, said = sweep(tmp_path / "out.csv", workers, {}, seq="16")
    assert (len(said), set(table["status"])) == (team.MOST_DEATHS, {"error"})
    (reason,) = set(table["reason"])
    assert reason.startswith("its worker died 3 times while measuring cells of this shape, on node")
    assert all(f"on node{number} GPU 0: its worker was lost" in reason for number in (1, 2, 3))


def test_workers_that_come_later_must_be_like_the_first(tmp_path):
    late = {
        "two": worker(2), "three": worker(3, device="NVIDIA A100"), "four": worker(4, torch="1.0"),
        "other": worker(1), "five": MtabenchError("no GPU"), "six": ValueError("what"),
    }  # fmt: skip
    table, messages = sweep(tmp_path / "out.csv", PlantedWorkers({"one": worker(1)}), late)
    assert set(table["worker"]) == {"node1 GPU 0", "node2 GPU 0"}
    assert sorted(messages) == [
        "worker five is left out: no GPU",
        "worker node1 GPU 0 is left out: its GPU GPU-1 is another worker's",
        f"worker node3 GPU 0 is left out: it has device NVIDIA A100 instead of {HERE['device']}",
        f"worker node4 GPU 0 is left out: it has torch 1.0 instead of {HERE['torch']}",
        "worker six is left out: ValueError: what",
    ]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (worker(2, device="NVIDIA A100"), "device .* instead of .* --gpus 0,2"),
        (worker(2, gpu="GPU-1"), "its GPU GPU-1 is another worker's"),
        (worker(2, sources="2"), "sources 2 instead of 1; workers need the versions of this process"),
        (MtabenchError("no GPU"), "the worker 2 cannot measure: no GPU"),
    ],
)
def test_the_first_workers_are_of_one_kind_and_each_has_a_gpu(second, message):
    with pytest.raises(UsageError, match=message):
        Team(PlantedWorkers({1: worker(1), 2: second}), "a").meet()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_lost": True}, "the connection was lost"),
        ({"facts": {}}, "no worker was left for 0.1 s"),
    ],
)
def test_a_sweep_without_scheduler_or_workers_ends_and_keeps_what_was_measured(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(team, "NO_WORKER_S", 0.1)
    workers = PlantedWorkers({1: worker(1)})
    made = Team(workers, "a")
    made.meet()
    plan = make_plan(Options("fwd", seq="16", impl="eager", head_dim="64"), "cpu")
    for name, value in change.items():
        setattr(workers, name, value)
    kept = rf"{message}; what was measured is kept in .*out\.csv"
    with Writer(tmp_path / "out.csv") as writer, pytest.raises(MtabenchError, match=kept):
        made.run(plan, writer, Settings(), Mock())
