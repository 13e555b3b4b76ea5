"""Forward at head dim 64: two rows a product (pairs.cu) and variants, forward.cu, cuDNN's plain attention, interleaved."""

import functools
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mta_kernels.conv_attention import conv_attention_reference
from mta_kernels.conv_attention.hopper import forward, source

ORIGINAL, BF16 = source.FOLDER, torch.bfloat16
NO_TURNS = [
    ("                wait_for_turn(warpgroup);\n", ""),
    ("                pass_turn(1 - warpgroup);\n", ""),
    ("        if (warpgroup == 1) pass_turn(0);\n", ""),
    ("wait_for_turn(warpgroup), pass_turn(1 - warpgroup);", ";"),
]
WAITS = [
    (
        "                wait_for_turn(warpgroup);\n",
        "                products_wait<0>();\n                wait_for_turn(warpgroup);\n",
    )
]
# Turns passed on when the products are issued, not when they have ended.
EARLY = [
    ("                pass_turn(1 - warpgroup);\n", ""),
    (
        "                products_wait<0>();\n                if (VALUES_WAIT && part == 0)",
        "                pass_turn(1 - warpgroup);\n                products_wait<0>();\n"
        "                if (VALUES_WAIT && part == 0)",
    ),
]
# Wrong results, for where the time goes.
NO_CONV = [("back < QUERY_TAPS; back++", "back < 2; back++")]
NO_STORES = [("store_matrices(store_at", "if (number < 0) store_matrices(store_at")]
NO_SOFTMAX = [
    (
        "                exponentiate();\n                if (__any",
        "                if (number < 2) exponentiate();\n                if (__any",
    )
]
VARIANTS = {
    "forward.cu": None,
    "pairs": [],
    "pairs, 2 stages": [],
    "no turns": NO_TURNS,
    "turns passed early": EARLY,
    "own rows ended before turn": WAITS,
    "WRONG one shifted pair of rows": NO_CONV,
    "WRONG no stores": NO_STORES,
    "WRONG no softmax": NO_SOFTMAX,
}


def make(batch, heads, length, taps=(6, 11), head_dim=64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=BF16) for _ in range(3))
    return q, k, v, torch.randn(heads, *taps, device="cuda", dtype=BF16) * 0.1


def launches(name, q, k, v, weight):
    """A variant's launches for such tensors, called once."""
    replaced = VARIANTS[name]
    forward.kernel.cache_clear()
    forward.PAIRED = replaced is not None
    stages = forward.Geometry.stages
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder, "hopper")
        if replaced:
            shutil.copytree(ORIGINAL, folder)
            text = (folder / "pairs.cu").read_text()
            for old, new in replaced:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (folder / "pairs.cu").write_text(text)
            source.FOLDER = folder
        if "2 stages" in name:
            forward.Geometry.stages = property(lambda self: 2)
        try:
            found = forward.Launches(q, k, v, weight, True, q.shape[3] ** -0.5, weight.shape[2] // 2, False)
            found(q, k, v, weight)
        finally:
            source.FOLDER, forward.PAIRED, forward.Geometry.stages = ORIGINAL, False, stages
    return found


def check():
    for length in (1, 64, 65, 200, 777, 1500):
        inputs = make(2, 3, length)
        want = conv_attention_reference(*(x.double() for x in inputs))
        for name in VARIANTS:
            if not name.startswith("WRONG"):
                got = launches(name, *inputs)
                errors = [((got(*inputs)[0].double() - want).norm() / want.norm()).item() for _ in range(3)]
                assert max(errors) < 0.006, (name, length, errors)
    print("correct")


def main():
    check()
    if "check" in sys.argv:
        return
    for batch, length in ((4, 4096), (1, 16384)):
        inputs = q, k, v, _ = make(batch, 16, length)
        calls = {}
        for name in VARIANTS:
            of = launches(name, *inputs)
            calls[name] = functools.partial(of, *inputs)
        want = calls["forward.cu"]()[0].double()
        for name, call in calls.items():
            error = ((call()[0].double() - want).norm() / want.norm()).item()
            assert error < 0.006 or name.startswith("WRONG"), (name, error)
        calls["cuDNN, plain"] = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True
        )
        times = {name: [] for name in calls}
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for _ in range(10):
                for name, call in calls.items():
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    call()
                    torch.cuda._sleep(2_000_000)
                    start.record()
                    for _ in range(6):
                        call()
                    end.record()
                    end.synchronize()
                    times[name].append(start.elapsed_time(end) / 6)
        dense = statistics.median(times["forward.cu"][1:])
        for name, found in times.items():
            median = statistics.median(found[1:])
            print(f"{batch} x 16 x {length}  {name:32} {median:7.3f} ms  {median / dense:.3f}")


if __name__ == "__main__":
    main()
