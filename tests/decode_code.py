"""Compiles decode for a GPU that is not there; a process for `test_triton_compile.py`.

    python decode_code.py TARGET

Says of each kernel of the shares, by head dim, heads, KV heads and cache: copies by the copy engine, bytes spilled.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch

from mta_kernels.conv_attention.triton.decode import conv_attention_decode
from mta_kernels.operation import Operation
from mta_kernels.plan import plan
from mtabench.static.compiling import compiled, compiles_for
from mtabench.static.limits import limits_of
from mtabench.static.machine_code import spills_of


def main() -> None:
    limits, tensor = limits_of(sys.argv[1]), partial(torch.empty, device="meta")
    lengths = tensor(1, dtype=torch.int32)
    done, keys = [], 65536
    with compiles_for(limits):
        for head_dim, group, paged in ((64, 1, False), (128, 1, False), (128, 4, False), (128, 4, True)):
            q = tensor(1, 8 * group, 6, head_dim, dtype=torch.bfloat16)
            weight = tensor(8 * group, 6, 11, dtype=torch.bfloat16)
            cache = (
                tensor(keys // 64, 8, 64, head_dim, dtype=q.dtype)
                if paged
                else tensor(1, 8, keys, head_dim, dtype=q.dtype)
            )
            table = tensor(1, keys // 64, dtype=torch.int32) if paged else None
            operation = Operation.of((6, 11), head_dim)
            options = {"lengths": lengths, "block_table": table}
            shares, _ = plan(limits.planned, conv_attention_decode, operation, q, cache, cache, weight, **options).calls
            ptx = compiled(shares).asm["ptx"]
            (spills,) = spills_of(ptx, ("-lineinfo",)).values()
            counts = {"copies": ptx.count("cp.async.bulk.tensor"), "spilled": spills.stores + spills.loads}
            done.append({"head_dim": head_dim, "group": group, "paged": paged, **counts})
    print(json.dumps(done))


if __name__ == "__main__":
    main()
