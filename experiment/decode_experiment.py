"""Where a decode step's time goes: calls a graph, rotations, launches, merging. Needs an H200.

python3 experiment/decode_experiment.py warm VARIANT HEAD_DIM     # compile, nothing else
python3 experiment/decode_experiment.py measure HEAD_DIM OUT.csv
"""

from __future__ import annotations

import csv
import sys
from statistics import median

import torch

from mta_kernels.conv_attention import conv_attention_decode_reference
from mta_kernels.conv_attention.triton import decode
from mtabench import implementations
from mtabench.measuring import samplers, timing
from mtabench.sweeps.case import Case
from mtabench.sweeps.inputs import make_inputs

SEQ = 65536
VARIANTS = {
    "now": {},
    "shares alone": {"alone": True},
    "no pdl": {"pdl": False},
    "chain early": {"chain": 1},
    "chain late": {"chain": 2},
    "merge, no pdl": {"merge": True, "pdl": False},
    "merge, chain early": {"merge": True, "chain": 1},
    "merge, chain late": {"merge": True, "chain": 2},
}
BASE = {"merge": False, "alone": False, "pdl": True, "chain": 0}


def cases(head_dim: int) -> dict[str, Case]:
    def case(impl: str, op: str, taps: tuple, splits: str | None) -> Case:
        return Case("decode", impl, op, "bf16", 1, 16, 16, SEQ, head_dim, *taps, True, splits, "cuda")

    return {
        "cudnn": case("sdpa-cudnn", "attention", (None, None), None),
        "triton": case("triton", "conv-attention", (6, 11), "auto"),
    }


def set_variant(name: str) -> None:
    decode.EXPERIMENT.clear()
    decode.EXPERIMENT.update(BASE | VARIANTS.get(name, {}))


def warm(name: str, head_dim: int) -> None:
    case = cases(head_dim)["triton"]
    set_variant(name)
    implementations.triton(case, make_inputs(case))()
    torch.cuda.synchronize()


def window(graph: torch.cuda.CUDAGraph, samples: int) -> list[float]:
    """us a replay."""
    events = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def fitted(points: dict[int, float]) -> tuple[float, float]:
    """Edges of a window and us a call: least squares of time = edges + calls * call, weighted by 1 / calls."""
    w = {c: 1 / c for c in points}
    s = sum(w.values())
    mx, my = sum(w[c] * c for c in points) / s, sum(w[c] * t for c, t in points.items()) / s
    slope = sum(w[c] * (c - mx) * (t - my) for c, t in points.items()) / sum(w[c] * (c - mx) ** 2 for c in points)
    return my - slope * mx, slope


def trace(name: str, graph: torch.cuda.CUDAGraph) -> None:
    """Kernels of a replay, their times and the gaps between."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
    found = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.device_type.name == "CUDA"
    )
    kernels = [(s, e, n) for s, e, n in found if "mem" not in n.lower()[:3]][len(found) // 2 :]
    names: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    before = None
    for s, e, n in kernels:
        names.setdefault(n[:38], []).append(e - s)
        if before is not None:
            gaps.setdefault(n[:38], []).append(s - before)
        before = e
    for n, times in names.items():
        gap = f"{median(gaps[n]):6.2f}" if n in gaps else "      "
        print(f"    {name:18} {n:38} x{len(times):3d} takes {median(times):7.2f} us, {gap} us after the one before")


def main() -> int:
    if sys.argv[1] == "warm":
        warm(sys.argv[2], int(sys.argv[3]))
        return 0
    head_dim, path = int(sys.argv[2]), sys.argv[3]
    both = cases(head_dim)
    ours = make_inputs(both["triton"])
    inputs = dict.fromkeys(both, ours)
    timing._energy = lambda *x: None
    copies = {name: [inputs[name], *inputs[name].copies(1)] for name in both}
    x = ours
    wanted = conv_attention_decode_reference(
        x.q.float(), x.k.float(), x.v.float(), x.weight.float(), lengths=x.lengths
    ).double()
    names = list(VARIANTS) if head_dim == 64 else [n for n in VARIANTS if n != "no pdl"]

    def closures(name: str, rotations: int = 2):
        impl = "cudnn" if name == "cudnn" else "triton"
        build = implementations.sdpa if name == "cudnn" else implementations.triton
        return [build(both[impl], y) for y in copies[impl][:rotations]]

    def captured(name: str, calls: int, rotations: int = 2) -> torch.cuda.CUDAGraph:
        set_variant(name)
        return samplers.capture(closures(name, rotations), calls // rotations)

    print(f"== D={head_dim}, {SEQ} keys, 16 heads: errors against float32, replays that differ")
    bits = []
    for name in names:
        if name == "shares alone":
            continue
        set_variant(name)
        call = closures(name)[0]
        first = call()
        error = ((first.double() - wanted).norm() / wanted.norm()).item()
        graph, outs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            outs = [call() for _ in range(4)]
        differing = 0
        for _ in range(50):
            for out in outs:
                out.zero_()
            graph.replay()
            differing += sum(not torch.equal(out, first) for out in outs)
        bits.append(f"{name} {error:.5f}/{differing}")
        del graph, outs
    print("   ", "; ".join(bits))

    rows = []
    found = []
    real = samplers.capture

    def noted(some, repeats=1):
        found.append(len(some) * repeats)
        return real(some, repeats)

    for label, seconds in (("as it is", samplers.SHORTEST_WINDOW_S), ("windows of 5 ms", 5e-3)):
        samplers.capture, samplers.SHORTEST_WINDOW_S = noted, seconds
        for variant in ("now", "merge, chain late"):
            found.clear()
            set_variant(variant)
            cells = {
                "cudnn": timing.timed(both["cudnn"], implementations.sdpa, inputs["cudnn"]),
                "triton": timing.timed(both["triton"], implementations.triton, inputs["triton"]),
            }
            measured = timing.measure(cells, "cuda", timing.Settings(time_limit_s=2.0))
            times = {n: median(t for r in m.rounds for t in r) * 1e3 for n, m in measured.items()}
            share = times["cudnn"] / times["triton"]
            print(
                f"    mtabench {label:16} {variant:18} cudnn {times['cudnn']:7.2f} triton {times['triton']:7.2f} us, "
                f"{share:.1%}; calls a graph {found[:2]}",
                flush=True,
            )
            rows += [("mtabench " + label, variant, n, c, t) for (n, t), c in zip(times.items(), found, strict=False)]
    samplers.capture, samplers.SHORTEST_WINDOW_S = real, 5e-4

    counts = (2, 4, 8, 20, 64)
    subjects = ["cudnn", *names]
    graphs = {
        (n, c, 2): captured(n, c)
        for n in subjects
        for c in (counts if n in ("cudnn", "now", "merge, chain late") else (4, 20))
    }
    graphs |= {(n, 20, 1): captured(n, 20, 1) for n in ("cudnn", "now")}
    samples: dict[tuple, list[float]] = {key: [] for key in graphs}
    for number in range(6):
        for key in list(graphs) if number % 2 else reversed(graphs):
            samples[key] += window(graphs[key], 8)
    replay = {key: median(x) for key, x in samples.items()}
    print(f"    {'us a call':20}" + "".join(f"{c:>9}" for c in counts) + "     edges  call(fit)  share at 20")
    for n in subjects:
        points = {c: replay[n, c, 2] for c in counts if (n, c, 2) in replay}
        edges, call = fitted(points)
        cells_ = "".join(f"{points[c] / c:9.2f}" if c in points else " " * 9 for c in counts)
        print(f"    {n:20}{cells_}{edges:10.2f}{call:11.2f}{replay['cudnn', 20, 2] / replay[n, 20, 2]:12.1%}")
        rows += [("graph", n, "", c, t / c) for c, t in points.items()]
    print("    one copy, 20 calls: " + ", ".join(f"{n} {replay[n, 20, 1] / 20:.2f}" for n in ("cudnn", "now")))
    for n in ("cudnn", "now", "merge, no pdl"):
        trace(n, graphs[n, 4, 2])
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("how", "variant", "impl", "calls", "us"))
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
