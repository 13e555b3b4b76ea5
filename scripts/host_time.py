"""Host time of a call: what a CPU needs to put a short attention on the GPU's queue, without waiting for it.

    PYTHONPATH=.:kernels python3 scripts/host_time.py --out results/nvidia-h200/host-time.csv

Needs an NVIDIA GPU. Medians over batches of calls; the queue is emptied between batches, so that no call waits for room
in it. The calls of a batch are layers of a model: the output of each is the queries of the next. `fwd` is a forward,
with or without gradients; `fwd+bwd` is what a layer takes of a training step, whose backward is one for all layers.
PyTorch runs a GPU's backwards in a thread of their own, which takes longer than the forwards' thread would. `fwd+bwd,
one thread` is without it (`torch.autograd.set_multithreading_enabled`).

Layers are conv_attention by each backend that runs here, and multi-token attention with mixed heads and with all parts.
Two more are references: PyTorch's plain attention, and an `autograd.Function` of the same tensors that does nothing.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mta_kernels.conv_attention import conv_attention, identity_weight, unsupported
from mta_kernels.multi_token_attention import MultiTokenAttention
from mtabench import environment

CALLS = 12  # a batch: their launches are fewer than the driver's queue holds


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


Layer = Sequence[Any]
Attention = Callable[..., Tensor]
PASSES = (("fwd", False), ("fwd", True), ("fwd+bwd", True), ("fwd+bwd, one thread", True))


def batches(heads: int, seq: int, head_dim: int) -> Iterator[tuple[str, str, bool, Callable[[], None]]]:
    """Name, pass, whether there are gradients, and CALLS layers of each attention."""
    for name, attention, layer in attentions(heads, seq, head_dim):
        for pass_, gradient in PASSES:
            q = drawn(heads, seq, head_dim).requires_grad_(gradient)
            layers = [layer(gradient) for _ in range(CALLS)]
            run = forwards if pass_ == "fwd" else step
            batch = partial(run, attention, q, layers)
            yield name, pass_, gradient, in_one_thread(batch) if pass_.endswith("one thread") else batch


def attentions(heads: int, seq: int, head_dim: int) -> Iterator[tuple[str, Attention, Callable[[bool], Layer]]]:
    """Name, attention, and what makes a layer, all that it takes but its queries, with or without gradients."""

    def of_tensors(gradient: bool) -> Layer:
        found = [drawn(heads, seq, head_dim) for _ in range(2)]
        found.append(identity_weight(heads, 6, 11, device="cuda"))
        return [x.requires_grad_(gradient) for x in found]

    def of_module(parts: dict[str, Any], gradient: bool) -> Layer:
        module = MultiTokenAttention(heads, head_dim, **parts, device="cuda").requires_grad_(gradient)
        return [*(drawn(heads, seq, head_dim).requires_grad_(gradient) for _ in range(2)), module]

    shape = {"dtype": torch.bfloat16, "head_dim": head_dim, "query_taps": 6, "key_taps": 11}
    for backend in ("hopper", "cuda", "triton"):
        if reason := unsupported(backend, device="cuda", **shape):
            print(f"{backend} cannot run: {reason}", file=sys.stderr)
        else:
            yield backend, partial(conv_attention, backend=backend), of_tensors
    yield "mta, mixed heads", of_a_module, partial(of_module, {"pre_conv": None, "post_conv": None})
    yield "mta, all parts", of_a_module, partial(of_module, {})
    yield "sdpa", plain, of_tensors
    yield "nothing", nothing, of_tensors


def of_a_module(q: Tensor, k: Tensor, v: Tensor, module: torch.nn.Module) -> Tensor:
    """Multi-token attention, whose mixers are a module's."""
    return module(q, k, v)


def plain(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Plain attention, which has no weight."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def nothing(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """The queries, by way of a Function that knows all four."""
    return Nothing.apply(q, k, v, weight)


class Nothing(torch.autograd.Function):
    """Saves its inputs, and computes neither an output nor gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in ctx.saved_tensors)


def drawn(heads: int, seq: int, head_dim: int) -> Tensor:
    """Queries, keys or values."""
    return torch.randn(1, heads, seq, head_dim, dtype=torch.bfloat16, device="cuda")


def forwards(attention: Attention, q: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The output of the last layer."""
    for layer in layers:
        q = attention(q, *layer)
    return q


def step(attention: Attention, q: Tensor, layers: Sequence[Layer]) -> None:
    """Forwards, and one backward through all layers."""
    out = forwards(attention, q, layers)
    given = [x for layer in layers for x in layer]
    leaves = [x for x in given if isinstance(x, Tensor)]
    leaves += [x for module in given if isinstance(module, torch.nn.Module) for x in module.parameters()]
    torch.autograd.grad(out, [q, *leaves], out.detach(), allow_unused=True)


def in_one_thread(batch: Callable[[], None]) -> Callable[[], None]:
    """The batch, without PyTorch's thread for backwards on a GPU."""

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            batch()

    return run


def host_times(batch: Callable[[], Any], count: int) -> list[float]:
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
