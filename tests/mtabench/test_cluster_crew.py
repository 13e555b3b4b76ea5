"""Groups go out to workers that may be lost, come late or be others: every cell gets one row."""

import pickle
import threading
from unittest.mock import Mock

import pytest
from written_runs import ENVIRONMENT

from mtabench.cluster.crew import Crew, WorkerLostError
from mtabench.cluster.facts import Facts
from mtabench.cluster.groups import MOST_DEATHS, Group, Groups
from mtabench.cluster.sweep import CrewSweep
from mtabench.errors import MtabenchError
from mtabench.measuring.timing import Settings
from mtabench.results.results_file import read_results
from mtabench.results.rows import cell_row
from mtabench.results.writer import Writer
from mtabench.sweeps.measuring_process import Outcome
from mtabench.sweeps.plan import Options, make_plan

HERE = {"mtabench": "0.1.0", "git_sha": "", "torch": "2", "triton": "3"} | ENVIRONMENT


class Worker:
    """Makes rows up at once; `dies` at its first group, or cannot `start`."""

    def __init__(self, number, dies=False, start=None, **changes):
        self.name, self.is_there, self.groups = f"node{number}", True, 0
        self._facts = Facts(f"node{number} GPU 0", f"GPU-{number}", HERE | changes, "")
        self._dies, self._start = dies, start

    def start(self):
        if self._start is not None:
            raise self._start
        return self._facts

    def measure(self, packed, doing):
        request = pickle.loads(packed)
        doing("measuring")
        if self._dies:
            self.is_there = False
            raise WorkerLostError
        self.groups += 1
        return Outcome([cell_row(case, request.facts, "ok") for case in request.plan.cases])

    def stop(self):
        self.is_there = False


def sweep(path, first, later=(), seq="16..320:+16"):
    """The table of a sweep by workers that are there and others that come later, and what it said.

    The threads that it started end, while those of an earlier test may still be ending.
    """
    before = set(threading.enumerate())
    plan = make_plan(Options("fwd", seq=seq, conv="3x3,5x5", impl="eager", head_dim="64"), "cuda")
    arriving = iter([later])
    crew, watcher = Crew(lambda: next(arriving, ())), Mock()
    with Writer(path) as writer:
        CrewSweep(
            crew, {worker: worker.start() for worker in first}, plan, writer, Settings(), watcher, "0123456789ab"
        ).run()
    started = set(threading.enumerate()) - before
    crew.stop()
    for thread in started:
        thread.join(20)
    assert started
    assert not any(thread.is_alive() for thread in started)
    assert watcher.ended.call_count == len(plan.cases)
    return read_results(path), [call.args[0] for call in watcher.said.call_args_list]


def test_many_workers_share_the_groups(tmp_path):
    workers = [Worker(number) for number in range(8)]
    table, said = sweep(tmp_path / "out.csv", workers)
    assert (len(table), said) == (40, [])
    assert not table.duplicated(["seq", "conv_q"]).any()
    assert sum(worker.groups for worker in workers) == 20
    assert (table.groupby("seq")["worker"].nunique() == 1).all()


def test_the_group_of_a_lost_worker_is_measured_by_another(tmp_path):
    table, said = sweep(tmp_path / "out.csv", [Worker(1), Worker(2, dies=True)])
    assert set(table["worker"]) == {"node1 GPU 0"}
    assert said == ["node2 GPU 0 lost a group (its worker was lost): it is measured again"]


def test_workers_that_come_later_must_be_like_the_first(tmp_path):
    late = [
        Worker(2), Worker(3, device="NVIDIA A100"), Worker(4, torch="1.0"), Worker(1),
        Worker(5, start=MtabenchError("no GPU")), Worker(6, start=ValueError("what")),
    ]  # fmt: skip
    table, said = sweep(tmp_path / "out.csv", [Worker(1)], late)
    assert set(table["worker"]) == {"node1 GPU 0", "node2 GPU 0"}
    first = HERE["device"]
    assert sorted(said) == [
        "worker node1 GPU 0 is left out: its GPU GPU-1 is another worker's",
        f"worker node3 GPU 0 is left out: it has NVIDIA A100, and this sweep runs on {first}",
        f"worker node4 GPU 0 is left out: it has torch 1.0 instead of {HERE['torch']}",
        "worker node5 is left out: no GPU",
        "worker node6 is left out: ValueError: what",
    ]


def test_a_crew_whose_scheduler_is_gone_ends_the_sweep(tmp_path):
    crew = Crew(Mock(side_effect=ConnectionError("the connection was lost")))
    plan = make_plan(Options("fwd", seq="16", impl="eager", head_dim="64"), "cuda")
    with Writer(tmp_path / "out.csv") as writer:
        made = CrewSweep(crew, {(one := Worker(1)): one.start()}, plan, writer, Settings(), Mock(), "a")
        with pytest.raises(MtabenchError, match=r"the connection was lost; what was measured is kept in .*out\.csv"):
            made.run()


def make(*seconds):
    return [Group(number, (), one) for number, one in enumerate(seconds)]


def test_the_longest_goes_first_and_a_lost_one_last_until_it_is_given_up_with_the_reasons():
    groups = Groups(make(3, 10, 1))
    lost = groups.take()
    assert groups.lost(lost, "b", "killed") == ""
    assert [groups.take().seconds for _ in range(3)] == [3, 1, 10]
    said = [groups.lost(lost, "a", "killed") for _ in range(MOST_DEATHS - 1)]
    assert said == ["", "its worker died 3 times while measuring cells of this shape, on b: killed; on a: killed"]
