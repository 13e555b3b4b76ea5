"""Rows as records of PyTorch's benchmark database, version v3 of its schema: a list with a record a metric.

https://github.com/pytorch/pytorch/wiki/PyTorch-OSS-benchmark-infra describes the format. What the database adds when a
file is uploaded, such as the repository and the job, is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtabench.results.columns import AXES
from mtabench.results.results_file import of_gpu
from mtabench.results.row_filter import value_of

Row = Mapping[str, str]

METRICS = {"latency": ("median_ms", "ms"), "tflops": ("useful_tflops", "TFLOP/s"), "bandwidth": ("gbytes_s", "GB/s"),
           "peak_memory": ("peak_memory_mb", "MB"), "speedup": ("speedup", "")}  # fmt: skip
MODES = {"bwd": "training", "train": "training"}  # the others are of inference
RUN = ("pass", "timer", "cache", "baseline", "started_utc", "run_id", "repro")
DEPENDENCIES = {"pytorch": "torch", "triton": "triton"}


def left_out(row: Row) -> bool:
    """Whether there is no record of a row: it has no time that can be believed."""
    return row["status"] != "ok"


def pytorch_benchmark(rows: Sequence[Row]) -> str:
    """The rows as records."""
    records = [record for row in rows if not left_out(row) for record in _records(row)]
    return json.dumps(records, indent=2, allow_nan=False) + "\n"


def _records(row: Row) -> Iterator[dict[str, Any]]:
    """A record for each metric that the row has."""
    common = {
        "benchmark": {
            "name": "mtabench",
            "mode": MODES.get(row["pass"], "inference"),
            "dtype": row["dtype"],
            "extra_info": {name: row[name] for name in RUN if row[name]},
        },
        "model": {
            "name": row["op"],
            "type": "attention kernel",
            "backend": row["impl"],
            "extra_info": {name: value for name in AXES if (value := value_of(row, name))},
        },
        "dependencies": {
            **{name: {"version": row[column]} for name, column in DEPENDENCIES.items() if row[column]},
            "mtabench": {"version": row["mtabench"], "sha": row["git_sha"]},
        },
        "runners": [_runner(row)],
    }
    for name, (column, unit) in METRICS.items():
        if row[column]:
            extra = {"unit": unit} if unit else {}
            if name == "latency":
                extra |= {"aggregation": "p50"} | {end: row[end] for end in ("ci95_low_ms", "ci95_high_ms")}
            yield {**common, "metric": {"name": name, "benchmark_values": [float(row[column])], "extra_info": extra}}


def _runner(row: Row) -> dict[str, Any]:
    """The machine."""
    extra = {name: row[name] for name in ("driver", "cuda", "worker") if row[name]}
    if not of_gpu(row):
        return {"cpu_info": row["device"], "extra_info": extra}
    return {"gpu_info": row["device"], "gpu_count": int(row["ranks"] or 1), "extra_info": extra}
