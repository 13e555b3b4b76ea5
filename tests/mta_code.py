"""Prints what the Triton stages of multi-token attention take of a GPU that is not there; one process a GPU.

python mta_code.py TARGET [decode | shared]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import replace
from functools import partial

import torch

from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.decode.triton import newest_row
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of
from mta_kernels.multi_token_attention.triton.backward import mixed_attention_backward
from mta_kernels.multi_token_attention.triton.chunks import chunks
from mta_kernels.multi_token_attention.triton.forward import mixed_attention_forward
from mta_kernels.multi_token_attention.triton.rows import mix_rows
from mta_kernels.plan import plan
from mtabench.static import machine_code
from mtabench.static.compiling import compiled, compiles_for
from mtabench.static.limits import limits_of
from mtabench.static.machine_code import tool, usage_of

tensor = partial(torch.empty, device="meta")


def disassembly_of(cubin):
    """The SASS of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return machine_code.run(tool("nvdisasm"), "-c", file.name)


def run(
    head_dim: int, *, convolved: bool, heads: int = 16, keys: int = 512, dtype: torch.dtype = torch.bfloat16
) -> None:
    q, k, v, grad_out = (tensor(1, heads, keys, head_dim, dtype=dtype) for _ in range(4))
    taps = tensor(heads, 6, 11, dtype=dtype) if convolved else None
    mix = tensor(heads, heads, dtype=dtype)
    mixers = Mixers(taps, mix, taps, mix)
    operation = operation_of(mixers, head_dim, causal=True, scale=None, pad_key="both")
    mixed_attention_forward(operation, q, k, v, mixers)
    logsumexp = tensor(1, heads, keys, dtype=torch.float32)
    mixed_attention_backward(operation, q, k, v, mixers, logsumexp, grad_out)
    if convolved:  # behind CUDA's kernels, which sum most rows
        (chunk,) = chunks(operation, keys, keys, keys, None, signature=0)
        scores, corrections = tensor(1, heads, keys, keys, dtype=dtype), tensor(2, 1, heads, keys, dtype=torch.float32)
        sums = tensor(1, heads, keys, keys // 128, dtype=torch.float32), 128
        mix_rows(scores, mix, None, logsumexp, chunk=chunk, out=scores, corrections=corrections, sums=sums)


def run_decode(
    head_dim: int, pre: bool, mixed: bool, post_query_taps: int, heads: int = 16, key_taps: int = 11, *,
    dtype: torch.dtype, kv_heads: int | None = None,
) -> None:  # fmt: skip
    """A step with convolutions before, or after of so many query taps; 0 stands for none."""
    keys = 4096
    q = tensor(1, heads, 6, head_dim, dtype=dtype)
    cache = tensor(1, kv_heads or heads // 4, keys, head_dim, dtype=dtype)
    mix = tensor(heads, heads, dtype=dtype) if mixed else None
    taps = tensor(heads, 6, 11, dtype=dtype) if pre else None
    after = tensor(heads, post_query_taps, key_taps, dtype=dtype) if post_query_taps else None
    mixers = Mixers(taps, mix, after, mix)
    operation = operation_of(mixers, head_dim, causal=True, scale=None, pad_key="both")
    lengths, state = tensor(1, dtype=torch.int32), None
    if post_query_taps > 1:
        logits = tensor(1, heads, post_query_taps, keys, dtype=dtype)
        state = DecodeState(logits, tensor(1, heads, post_query_taps, dtype=torch.float32), lengths)
    newest_row(operation, q, cache, cache, mixers, NormGate(), lengths, state, None)


def late_reads(code: str) -> int:
    """Reads of a pipelined loop's shared memory that come after the copy of a later tile, which may be over it."""
    found, copied = 0, False
    for line in code.splitlines():
        if "scf.for" in line or "ttg.async_wait" in line:
            copied = False
        elif "ttg.async_copy_global_to_local" in line:
            copied = True
        elif copied and "ttg.local_load" in line and "mutable" in line:
            found += 1
    return found


def lost_carries(listing: str) -> int:
    """Products whose upper half, less a number, is a counter of 64 bits: ptxas loses its carry where that is zero."""
    return len(re.findall(r"IMAD\.HI\.U32 R\d+, P\d", listing))


def main() -> None:
    limits = limits_of(sys.argv[1])
    gpu = replace(limits.planned, has_nvrtc=False)
    found: dict[str, dict] = {}  # by the machine code's hash

    def compile_calls(run, head_dim: int, *args, **options) -> None:
        for call in plan(gpu, run, head_dim, *args, **options).calls:
            if call.language != "triton":
                continue
            result = compiled(call)
            if isinstance(result, Exception):
                raise result
            if result.hash in found:
                continue
            (usage,) = usage_of(result.asm["cubin"], limits.number).values()
            found[result.hash] = {
                "kernel": call.name, "dtype": str(dtype), "head_dim": head_dim, "heads": heads,
                "stack": usage.stack, "shared": result.metadata.shared, "limit": limits.shared_per_block,
                "lost_carries": lost_carries(disassembly_of(result.asm["cubin"])) if "shared" in sys.argv else 0,
                "wgmma": result.asm["ptx"].count("wgmma.mma_async"), "late_reads": late_reads(result.asm["ttgir"]),
            }  # fmt: skip

    with compiles_for(limits):
        dtype, heads = torch.bfloat16, 16
        if "shared" in sys.argv:
            heads = 56
            compile_calls(run_decode, 248, False, False, 0, heads, dtype=dtype, kv_heads=2)
            print(json.dumps([*found.values()]))
            return
        if "decode" in sys.argv:
            for head_dim, *parts in (
                (64, True, True, 6), (64, True, False, 0), (64, True, True, 1), (64, False, True, 6),
                (128, False, True, 0), (256, True, True, 6), (128, False, True, 6, 64), (64, False, True, 16, 32, 31),
            ):  # fmt: skip
                heads = parts[3] if len(parts) > 3 else 16
                compile_calls(run_decode, head_dim, *parts, dtype=dtype)
            print(json.dumps([*found.values()]))
            return
        for head_dim, convolved in ((64, True), (256, False)):
            compile_calls(run, head_dim, convolved=convolved)
        if limits.number != 90:  # whose blocks have the most shared memory
            head_dim, heads, dtype = 64, 4, torch.float32
            compile_calls(run, head_dim, convolved=True, heads=heads, dtype=dtype)
    print(json.dumps([*found.values()]))


if __name__ == "__main__":
    main()
