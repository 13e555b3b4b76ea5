"""Does a convolution of scores of low rank learn what a full one learns? Both on the toy task and on text.

    PYTHONPATH=.:kernels python3 scripts/low_rank.py --out results/nvidia-h200/experiments/low-rank.csv

A head's weight of 6 x 11 taps is `sum_r u_r x v_r`, of 1, 2 or 3 terms, or is not split (rank 6); in a plain model
(rank 0) it stays the identity, which all others start as. The toy task is that of `train_toy.py` with queries of 3 to 5
letters, the text that of `train_text.py`. All models of a task train side by side: every rank, every rate of the
convolutions over that of other weights, every seed. Full weights are truncated to ranks 1 to 3 after the last step.
The number of steps is what there is time for. The file is written anew after each task.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from low_rank_task.chart import draw_chart
from low_rank_task.models import PLAIN, RANKS, Member, Task
from low_rank_task.training import MEASURED, train
from toy_task.sequences import BLOCK, VOCABULARY
from training_files import PLACE, write_results

from mtabench.environment import describe, resolve_device
from mtabench.errors import UsageError
from mtabench.problem.axes import parse_names

BYTES = 256


def toy(blocks: int, **sizes: Any) -> Task:
    """The toy task with so many blocks in a sequence."""
    return Task("toy", VOCABULARY, blocks * (BLOCK + 1) + 2 * BLOCK, BLOCK, **sizes)


def text(seq: int, **sizes: Any) -> Task:
    """The language model of `seq` bytes."""
    return Task("text", BYTES, seq + 1, seq, **sizes)


TASKS = {
    "cuda": (
        toy(12, width=128, heads=2, layers=3, batch=64, steps=6000, learning_rate=2e-3, held_out=4096),
        text(256, width=256, heads=4, layers=4, batch=16, steps=3000, learning_rate=1e-3, held_out=64),
    ),
    "cpu": (
        toy(2, width=16, heads=2, layers=2, batch=8, steps=8, learning_rate=2e-3, held_out=64),
        text(16, width=16, heads=2, layers=2, batch=4, steps=8, learning_rate=1e-3, held_out=16),
    ),
}
SHARES = {"toy": 0.65, "text": 1.0}  # of the time that is left when a task begins
QUERIES = {"toy": (3, 4, 5), "text": (0,)}
COLUMNS = ("task", *(field.name for field in fields(Member)), *MEASURED, *PLACE)


def main() -> int:
    """Train, print, and write the table and its chart if `--out` is given."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="toy,text", help="of toy,text; %(default)s if not given")
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind, with seeds from 0 on")
    parser.add_argument("--rates", default="1,3,10", help="learning rates of convolutions over that of other weights")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all; %(default)s if not given")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--out", type=Path, help="the CSV file to write; its charts go beside it")
    options = parser.parse_args()
    try:
        device, tasks, rates = checked(options)
    except UsageError as error:
        parser.error(str(error))
    facts, rows = describe(device), []
    for task in tasks:
        now = time.perf_counter()
        until = now + (began + options.limit - now) * (1 if task == tasks[-1] else SHARES[task.task])
        for row in train(task, members_of(task, options.seeds, rates), device, until):
            rows.append({"task": task.task} | row | {name: facts[name] for name in PLACE})
            if row["step"] == row["steps"] or (row["seed"] == 0 and row["rate"] in (0, rates[0])):
                shown = (f"{name} {row[name]:.4g}" for name in ("rank", "rate", "query", "seed", "step"))
                cut = f"  truncated to {row['truncated']}" if "truncated" in row else ""
                print(
                    f"{task.task}  {'  '.join(shown)}{cut}  loss {row['held_out_loss']:.4f}  "
                    f"wrong {row['error_rate']:.2%}  {row['seconds']:.0f} s", flush=True,
                )  # fmt: skip
        if options.out:
            write_results(options.out, COLUMNS, rows, draw_chart)
    return 0


def checked(options: argparse.Namespace) -> tuple[str, list[Task], list[float]]:
    """Device, tasks and rates of the options; raises UsageError for what cannot run."""
    device = resolve_device(options.device)
    known = {task.task: task for task in TASKS[device]}
    names = parse_names(options.tasks, "--tasks")
    for name in names:
        if name not in known:
            raise UsageError(f"there is no task {name!r}; expected some of {','.join(known)}")
    try:
        rates = [float(rate) for rate in options.rates.split(",")]
    except ValueError:
        raise UsageError(f"--rates is {options.rates!r}; expected numbers, as 1,3,10") from None
    if min(rates) <= 0 or options.seeds < 1:
        raise UsageError(f"--rates is {options.rates} and --seeds {options.seeds}; expected numbers above zero")
    if options.out and options.out.exists():
        raise UsageError(f"{options.out} already exists; give another --out")
    return device, [known[name] for name in names], rates


def members_of(task: Task, seeds: int, rates: list[float]) -> list[Member]:
    """The models of a task: every query, seed, rank and rate, one plain model a query and seed."""
    return [
        Member(query, seed, rank, rate)
        for query in QUERIES[task.task]
        for seed in range(seeds)
        for rank in RANKS
        for rate in ([0.0] if rank == PLAIN else rates)
    ]


if __name__ == "__main__":
    sys.exit(main())
