"""Host time of a call: what a CPU needs to put a short attention on the GPU's queue, without waiting for it.

    PYTHONPATH=.:kernels python3 scripts/host_time.py --out results/nvidia-h200/host-time.csv

Needs an NVIDIA GPU. Medians over batches of calls; the queue is emptied between batches, so that no call waits for
room in it. conv_attention by each backend that runs here, and PyTorch's plain attention beside it: `fwd` is a forward,
with or without gradients, and `fwd+bwd` what an attention of a training step takes, whose backward is one of many.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import torch
from torch import Tensor
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
    for name, pass_, gradient, batch in batches(options.heads, options.seq, options.head_dim):
        times = host_times(batch, options.batches)
        row = {"impl": name, "pass": pass_, "gradient": gradient, "heads": options.heads, "seq": options.seq}
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


def batches(heads: int, seq: int, head_dim: int) -> Iterator[tuple[str, str, bool, Callable[[], None]]]:
    """Name, pass, whether there are gradients, and CALLS calls of each attention."""
    shape = {"dtype": torch.bfloat16, "head_dim": head_dim, "query_taps": 6, "key_taps": 11}
    attentions: dict[str, Callable[..., Tensor]] = {}
    for backend in ("hopper", "triton"):
        if reason := unsupported(backend, device="cuda", **shape):
            print(f"{backend} cannot run: {reason}", file=sys.stderr)
        else:
            attentions[backend] = partial(conv_attention, backend=backend)
    attentions["sdpa"] = plain
    for pass_, gradient in (("fwd", False), ("fwd", True), ("fwd+bwd", True)):
        inputs = [drawn(heads, seq, head_dim, gradient) for _ in range(CALLS)]
        for name, attention in attentions.items():
            yield name, pass_, gradient, partial(step if pass_ == "fwd+bwd" else forwards, attention, inputs)


def plain(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Plain attention, which has no weight."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def drawn(heads: int, seq: int, head_dim: int, gradient: bool) -> list[Tensor]:
    """q, k, v and the weight of a call."""
    size = 1, heads, seq, head_dim
    found = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    found.append(identity_weight(heads, 6, 11, device="cuda"))
    return [x.requires_grad_(gradient) for x in found]


def forwards(attention: Callable[..., Tensor], inputs: list[list[Tensor]]) -> None:
    """Forwards, one after another."""
    for some in inputs:
        attention(*some)


def step(attention: Callable[..., Tensor], inputs: list[list[Tensor]]) -> None:
    """Forwards, and one backward through all of them."""
    outs = [attention(*some) for some in inputs]
    leaves = [x for some in inputs for x in some]
    torch.autograd.grad(outs, leaves, [x.detach() for x in outs], allow_unused=True)


def host_times(batch: Callable[[], None], count: int) -> list[float]:
    """Microseconds a call in each of so many batches."""
    times = []
    for _ in range(count + 10):  # the first compile, and fill caches
        torch.cuda.synchronize()
        start = perf_counter_ns()
        batch()
        times.append((perf_counter_ns() - start) / CALLS / 1000)
    torch.cuda.synchronize()
    return times[10:]


if __name__ == "__main__":
    sys.exit(main())
