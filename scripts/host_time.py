"""Host time of a call: what a CPU needs to put a short forward on the GPU's queue, without waiting for it.

    PYTHONPATH=.:kernels python3 scripts/host_time.py --out results/nvidia-h200/host-time.csv

Needs an NVIDIA GPU. Medians over batches of calls; the queue is emptied between batches, so that no call waits for
room in it. conv_attention by each backend that runs here, and PyTorch's plain attention beside it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import torch
from torch.nn.functional import scaled_dot_product_attention

from mta_kernels.conv_attention import conv_attention, identity_weight, unsupported
from mtabench import environment

CALLS = 20  # a batch: far fewer than the driver's queue holds


def main() -> int:
    """Measure, print, and write the table if `--out` is given; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--out", type=Path, help="the CSV file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("host_time.py needs an NVIDIA GPU", file=sys.stderr)
        return 2
    if options.out and options.out.exists():
        parser.error(f"{options.out} already exists; give another --out")
    rows = []
    for name, gradient, call in calls(options.heads, options.seq, options.head_dim):
        times = host_times(call, options.batches)
        row = {"impl": name, "gradient": gradient, "heads": options.heads, "seq": options.seq}
        row |= {"head_dim": options.head_dim, "median_us": f"{median(times):.2f}", "least_us": f"{min(times):.2f}"}
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row | {"batches": options.batches, "calls": CALLS})
    if options.out:
        facts = environment.describe("cuda")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | facts for row in rows)
    return 0


def calls(heads: int, seq: int, head_dim: int) -> list[tuple[str, bool, Callable[[], object]]]:
    """Name, whether a backward may follow, and the forward itself."""
    found: list[tuple[str, bool, Callable[[], object]]] = []
    for gradient in (False, True):
        q, k, v = (
            torch.randn(1, heads, seq, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=gradient)
            for _ in range(3)
        )
        weight = identity_weight(heads, 6, 11, dtype=torch.bfloat16, device="cuda").requires_grad_(gradient)
        shape = {"dtype": q.dtype, "head_dim": head_dim, "query_taps": 6, "key_taps": 11}
        for backend in ("hopper", "triton"):
            if reason := unsupported(backend, device=q.device, **shape):
                print(f"{backend} cannot run: {reason}", file=sys.stderr)
            else:
                found.append((backend, gradient, lambda x=(q, k, v, weight), y=backend: conv_attention(*x, backend=y)))
        found.append(("sdpa", gradient, lambda x=(q, k, v): scaled_dot_product_attention(*x, is_causal=True)))
    return found


def host_times(call: Callable[[], object], batches: int) -> list[float]:
    """Microseconds a call in each batch."""
    times = []
    for _ in range(batches + 10):  # the first compile, and fill caches
        torch.cuda.synchronize()
        start = perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((perf_counter_ns() - start) / CALLS / 1000)
    torch.cuda.synchronize()
    return times[10:]


if __name__ == "__main__":
    sys.exit(main())
