"""Compile Triton kernels for a GPU that is not there, through the host code that would launch them.

Run as `python offline.py CAPABILITY SHARED_MEMORY CASES` (without TRITON_INTERPRET): prints a JSON line a kernel.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _AbsentGpu:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextlib.contextmanager
def launches_only_compile(capability: int) -> Iterator[list[tuple[str, object]]]:
    """Within it, `kernel[grid](...)` compiles for `capability` (80, 90) and appends (name, compiled kernel)."""
    compiled: list[tuple[str, object]] = []

    def launch(kernel: JITFunction, grid):
        def compile_it(*args, **kwargs) -> defaultdict:
            compiled.append((kernel.__name__, kernel.warmup(*args, grid=grid, **kwargs)))
            return defaultdict(lambda: lambda *args: None)  # what is launched once more, does nothing

        return compile_it

    original = JITFunction.__getitem__
    driver.set_active(_AbsentGpu(capability))
    JITFunction.__getitem__ = launch
    try:
        yield compiled
    finally:
        JITFunction.__getitem__ = original
        driver._active = None  # reset_active() would look for a real GPU


def resources(compiled) -> dict[str, int]:
    """Registers and spilled bytes a thread, and bytes of shared memory a program, of a compiled kernel."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout

    def number(name: str) -> int:
        match = re.search(rf"{name}:(\d+)", text)
        assert match, text
        return int(match.group(1))

    return {"registers": number("REG"), "spilled": number("STACK"), "shared": compiled.metadata.shared}


def main(capability: int, shared_memory: int, cases: list[dict]) -> None:
    from mta_kernels.conv_attention.triton import backward, decode, forward

    forward.INTERPRETED_CAPABILITY = (capability // 10, capability % 10)
    forward.INTERPRETED_SHARED_MEMORY = shared_memory  # all kernels ask `forward` for it
    for case in cases:
        dtype = getattr(torch, case["dtype"])
        q = torch.ones(1, 2, 256, case["head_dim"], dtype=dtype)
        weight = torch.ones(2, *case["taps"], dtype=dtype)
        options = {"causal": case["causal"], "scale": 1.0, "pad": case["pad"]}
        with launches_only_compile(capability) as compiled:
            out, logsumexp = forward.conv_attention_forward(q, q, q, weight, **options)
            backward.conv_attention_backward(q, q, q, weight, out, logsumexp, q, **options)
            # 128 splits: enough for more than one step of the loop that merges them.
            decode.conv_attention_decode_triton(
                q[:, :, : case["taps"][0]], q, q, weight, lengths=torch.ones(1, dtype=torch.int32), splits=128
            )
        for name, kernel in compiled:
            print(json.dumps({"case": case, "kernel": name, **resources(kernel)}), flush=True)


if __name__ == "__main__":  # a process of its own: the interpreter flag is read at import
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
