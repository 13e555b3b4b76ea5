"""Sweeps in this process with planted implementations, for their tests."""

from dataclasses import replace

from mtabench import registry
from mtabench.environment import describe
from mtabench.measuring.ceilings import Ceilings, keep_ceilings
from mtabench.measuring.timing import Settings
from mtabench.prediction import plans
from mtabench.results.results_file import read_results
from mtabench.results.writer import Writer
from mtabench.sweeps import sweep
from mtabench.sweeps.plan import Options, make_plan

MADE_UP = Ceilings(10.0, 0.1, 12.0)
QUICK = Settings(min_rounds=2, max_rounds=2, samples_per_round=3)
TIME_COLUMNS = [
    "rounds", "samples", "median_ms", "p10_ms", "p90_ms", "ci95_low_ms", "ci95_high_ms", "speedup",
    "useful_tflops", "executed_tflops", "gbytes_s", "fraction_of_roofline",
]  # fmt: skip


class Watcher:
    def __init__(self):
        self.rows = []

    def doing(self, text):
        pass

    def ended(self, row):
        self.rows.append(row)


def without_warm_up(monkeypatch):
    """Little time is spent on warming up, none on the device's ceilings; gives the function that does measure them."""
    monkeypatch.setattr(sweep.timing, "WARM_UP_SECONDS", 0.05)
    measure = sweep.measure_ceilings
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device, dtype: MADE_UP)
    return measure


def made_up_ceilings(folder):
    """Sweeps of other processes that write into this folder measure none."""
    keep_ceilings(folder / "ceilings.json", describe("cpu"), {"fp32": MADE_UP})


def make_plant(monkeypatch):
    """Adds an implementation of conv attention to the registry, made of eager's closure by a function."""

    def add(name, change, passes=("fwd", "bwd", "decode"), splits=False):
        def build(case, inputs):
            closure = registry.find("eager").build(case, inputs)
            return change(case, closure)

        changes = {"passes": passes, "devices": ("cpu",), "build": build, "splits": splits, "pages": False}
        planted = replace(registry.find("eager"), name=name, **changes)
        monkeypatch.setattr(registry, "IMPLEMENTATIONS", (*registry.IMPLEMENTATIONS, planted))
        monkeypatch.setattr(plans, "splits_of", lambda case: 7)

    return add


def raising(error, at=None):
    """An implementation that raises when called, at one sequence length or at all."""

    def change(case, closure):
        def call():
            if at in (None, case.seq):
                raise error
            return closure()

        return call

    return change


def run(path, impl, resume=False, settings=QUICK, pass_="fwd", **options):
    shape = {"seq": "16,32", "head_dim": "16", "heads": "2", "conv": "3x3", "dtype": "fp32", "device": "cpu"}
    plan = make_plan(Options(pass_, impl=impl, **(shape | options)))
    watcher = Watcher()
    with Writer(path, resume=resume) as writer:
        statuses = sweep.run(plan, writer, settings, watcher)
    assert sum(statuses.values()) == len(watcher.rows)
    return plan, watcher


def statuses(path):
    table = read_results(path)
    return {(row.impl, int(row.seq)): row.status for row in table.itertuples()}
