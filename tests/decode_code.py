"""Compiles decode for a GPU that is not there; a process for `test_triton_compile.py`.

    python decode_code.py TARGET

Says of each kernel of the shares, by head dim, heads, KV heads and cache: copies by the copy engine, bytes spilled.
"""

from __future__ import annotations

import json
import sys

import torch

from mta_kernels.conv_attention import tile_sizes
from mta_kernels.conv_attention.triton.decode import conv_attention_decode
from mta_kernels.operation import Operation
from mtabench.static.absent_gpu import launches_compile, tensor
from mtabench.static.limits import limits_of
from mtabench.static.machine_code import spills_of


def main() -> None:
    limits = limits_of(sys.argv[1])
    found: list[tuple[int, int]] = []

    def compiled(kernel, result) -> None:
        (spills,) = spills_of(result.asm["ptx"], ("-lineinfo",)).values()
        found.append((result.asm["ptx"].count("cp.async.bulk.tensor"), spills.stores + spills.loads))

    lengths = tensor(1, dtype=torch.int32)
    longest: dict[tuple[int, int], int] = {}
    for entry in tile_sizes.read_entries(tile_sizes.shipped_file("NVIDIA H200"), "NVIDIA H200"):
        if entry.kernel.startswith("decode"):
            shape = entry.key.head_dim, entry.key.group
            longest[shape] = max(longest.get(shape, 0), entry.key.seq_len)
    done = []
    with launches_compile(limits, lambda name: "decode" in name, compiled):
        shapes = sorted(longest)
        for (head_dim, group), paged in [*((shape, False) for shape in shapes), (shapes[-1], True)]:
            keys = longest[head_dim, group]
            q = tensor(1, 8 * group, 6, head_dim, dtype=torch.bfloat16)
            weight = tensor(8 * group, 6, 11, dtype=torch.bfloat16)
            cache = (
                tensor(keys // 64, 8, 64, head_dim, dtype=q.dtype)
                if paged
                else tensor(1, 8, keys, head_dim, dtype=q.dtype)
            )
            table = tensor(1, keys // 64, dtype=torch.int32) if paged else None
            operation = Operation.of((6, 11), head_dim)
            conv_attention_decode(operation, q, cache, cache, weight, lengths=lengths, block_table=table)
            copies, spilled = found.pop()
            done.append({"head_dim": head_dim, "group": group, "paged": paged, "copies": copies, "spilled": spilled})
    print(json.dumps(done))


if __name__ == "__main__":
    main()
