"""A stand-in for the package cuda-bench 0.3 on machines without a GPU: its calls as its stubs say, timed by the CPU.

Registered once and run once a process, as NVBench is; `registry` starts anew for each test. The results go through a
JSON file and binary samples as NVBench documents them (docs/json_output.md of its repository).
"""

import array
import json
import time
from pathlib import Path
from types import SimpleNamespace


class Benchmark:
    def __init__(self, function):
        self.function, self.settings, self.axes = function, {}, {}

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)

        def set_(*values):
            self.settings[(name, *values[:-1])] = values[-1]
            return self

        return set_

    def add_int64_axis(self, name, values):
        self.axes[name] = values
        return self


class State:
    def __init__(self, benchmark, value):
        self.benchmark, self.value, self.times, self.reason = benchmark, value, [], None

    def skip(self, reason):
        self.reason = reason

    def exec(self, function, *, timer):
        assert timer
        for _ in range(1 + self.benchmark.settings["set_criterion_param_int64", "target-samples"]):
            clock = Timer()
            function(SimpleNamespace(), clock)
            self.times.append(clock.seconds)
        del self.times[0]  # its warm-up


class Timer:
    def start(self):
        self.started = time.perf_counter()

    def stop(self):
        self.seconds = time.perf_counter() - self.started


class Registry:
    """What the module keeps for its process."""

    def __init__(self):
        self.benchmarks, self.was_run, self.arguments = [], False, []

    def register(self, function):
        if self.was_run:
            raise RuntimeError("Can not register more benchmarks after benchmark was run")
        self.benchmarks.append(Benchmark(function))
        return self.benchmarks[-1]

    def run_all_benchmarks(self, argv):
        if self.was_run:
            raise RuntimeError("Benchmarks were already executed")
        self.was_run, self.arguments = True, argv
        path = Path(argv[argv.index("--jsonbin") + 1])
        found = []
        for benchmark in self.benchmarks:
            ((axis, values),) = benchmark.axes.items()
            states = []
            for value in values:
                state = State(benchmark, value)
                benchmark.function(state)
                states.append(_written(path, len(states), axis, state))
            axes = [{"name": axis, "type": "int64", "flags": "", "values": [{"input_string": str(v)} for v in values]}]
            name = benchmark.settings[("set_name",)]
            found.append({"name": name, "devices": [0], "axes": axes, "states": states})
        path.write_text(json.dumps({"devices": [], "benchmarks": found}))


def _written(path, number, axis, state):
    summaries = []
    for tag, folder, values in (
        ("nv/json/bin:nv/cold/sample_times", "bin", state.times),
        ("nv/json/freqs-bin:nv/cold/sample_freqs", "freqs-bin", [1.5e9] * len(state.times)),
    ):
        file = Path(f"{path}-{folder}", f"{number}.bin")
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(array.array("f", values).tobytes())
        relative = str(file.relative_to(path.parent))
        data = [{"name": "filename", "type": "string", "value": relative}]
        data.append({"name": "size", "type": "int64", "value": str(len(values))})
        summaries += [{"tag": tag, "data": data}] if values else []
    return {
        "name": f"Device=0 {axis}={state.value}", "device": 0, "summaries": summaries,
        "axis_values": [{"name": axis, "type": "int64", "value": str(state.value)}],
        "is_skipped": state.reason is not None, "skip_reason": state.reason,
    }  # fmt: skip


class BenchmarkResult:
    """As much of the package's reader of those files as is used."""

    @staticmethod
    def from_json(path):
        path = Path(path)
        return {
            benchmark["name"]: [_read(path.parent, state) for state in benchmark["states"]]
            for benchmark in json.loads(path.read_text())["benchmarks"]
        }


def _read(folder, state):
    found = {}
    for summary in state["summaries"]:
        data = {entry["name"]: entry["value"] for entry in summary["data"]}
        values = array.array("f", (folder / data["filename"]).read_bytes())
        assert len(values) == int(data["size"])
        found[summary["tag"].partition(":")[0]] = values
    return SimpleNamespace(
        samples=found.get("nv/json/bin"), frequencies=found.get("nv/json/freqs-bin"), skip_reason=state["skip_reason"]
    )
