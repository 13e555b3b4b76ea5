"""Rows as traces of flashinfer-bench 0.1.2: a JSON object a line, with a workload and its evaluation.

https://bench.flashinfer.ai/docs/flashinfer-trace/trace describes the format. A trace names its definition and solution,
which are files of that data set; here their names say what a row says.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mtabench.problem.operations import PLAIN

Row = Mapping[str, str]

STATUSES = {
    "ok": "PASSED", "wrong": "INCORRECT_NUMERICAL", "oom": "RUNTIME_ERROR", "error": "RUNTIME_ERROR",
    "timeout": "TIMEOUT",
}  # fmt: skip
LIBRARIES = ("torch", "triton", "cuda", "driver", "mtabench")
REFERENCE = "eager"  # which is the definition, as a `Definition`'s reference is
UNKNOWN = "NaN"  # as that project writes it


def left_out(row: Row) -> bool:
    """Whether there is no trace of a row: nothing ran, its time is not to be believed, or it is of a whole model."""
    return row["status"] not in STATUSES or bool(row["layers"])


def flashinfer_trace(rows: Sequence[Row]) -> str:
    """The rows as traces, a line each."""
    return "".join(f"{json.dumps(_trace(row), allow_nan=False)}\n" for row in rows if not left_out(row))


def _trace(row: Row) -> dict[str, Any]:
    definition, splits = _definition(row), row["splits"]
    axes = {"batch_size": int(row["batch"]), "seq_len": int(row["seq"])}
    return {
        "definition": definition,
        "workload": {
            "axes": axes,
            "inputs": {name: {"type": "random"} for name in _inputs(row)},
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"mtabench/{definition}/{sorted(axes.items())}")),
        },
        "solution": f"mtabench_{_slug(row['impl'])}" + (f"_splits_{splits}" if splits else ""),
        "evaluation": _evaluation(row),
    }


def _evaluation(row: Row) -> dict[str, Any]:
    status = STATUSES[row["status"]]
    found: dict[str, Any] = {
        "status": status,
        "environment": {
            "hardware": row["device"].replace(" ", "_") or "unknown",
            "libs": {name: row[name] for name in LIBRARIES if row[name]},
        },
        "timestamp": row["started_utc"],
        "log": "\n".join(filter(None, (row["reason"], row["repro"]))),
    }
    if row["status"] in ("ok", "wrong"):
        # Theirs are the largest errors of any element; ours is that of the whole result, by its norm.
        known = {"relative_error_of_norm": float(row["rel_error"])} if row["rel_error"] else {}
        found["correctness"] = {"max_relative_error": UNKNOWN, "max_absolute_error": UNKNOWN, "extra": known}
    if row["status"] == "ok":  # 0 is that format's for unknown
        median = float(row["median_ms"] or 0)
        speedup = float(row["speedup"] or 0) if row["baseline"] == REFERENCE else 0.0
        found["performance"] = {
            "latency_ms": median, "reference_latency_ms": speedup * median, "speedup_factor": speedup
        }  # fmt: skip
    return found


def _definition(row: Row) -> str:
    """What is computed, with all that a `Definition` has as constants."""
    words = [row["op"], row["pass"], row["dtype"], f"h{row['heads']}", f"kv{row['kv_heads']}", f"d{row['head_dim']}"]
    if row["op"] != PLAIN:
        words += [f"{letter}{row[name]}x{row[f'{name[:-1]}k']}" for letter, name in TAPS.items() if row[name]]
        words += [f"{name}_{row[name]}" for name in ("mix", "norm", "gate", "page_size") if row[name]]
    return "_".join(map(_slug, words)) + ("_causal" if row["causal"] == "true" else "")


TAPS = {"c": "conv_q", "pc": "post_conv_q"}


def _inputs(row: Row) -> list[str]:
    mixers = {"weight": row["conv_q"], "post_weight": row["post_conv_q"], "mixing": row["mix"]}
    mixers |= {"norm_weight": row["norm"], "gate": row["gate"], "block_table": row["page_size"]}
    return [
        "q", "k", "v", *(name for name, present in mixers.items() if present and row["op"] != PLAIN),
        *["dout"] * (row["pass"] == "bwd"),
    ]  # fmt: skip


def _slug(text: str) -> str:
    return text.replace("-", "_").replace("+", "_")
