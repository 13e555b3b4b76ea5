"""A decode step of the whole multi-token attention, counted from kernels/mta_kernels/multi_token_attention.

One kernel reads K, and another V, each of which takes its time to start. A convolution before has its scores made into
logits by one more, and one after has what older rows add computed by one that reads their logits. CUDA kernels do with
the first two: that of V reads the older rows' logits, too, and either takes BAND_S more to convolve. Partial outputs of
all programs are added up at last. So a step is `(K + V) / bandwidth`, with two bytes a key and head written and read
between the kernels, `2 START_S`, `GAP_S` a kernel, `older rows x scores / EARLY` and `programs x MERGE_S`. Norm and
gate are one more kernel behind Triton's; CUDA's last one applies them.
"""

from __future__ import annotations

from dataclasses import replace

from mta_kernels.multi_token_attention.decode_cuda.plan import SHARED_BYTES, heads_unsupported
from mta_kernels.operation import Convolution
from mtabench.model import norm_gate
from mtabench.model.devices import Device
from mtabench.model.kernel import Kernel, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.inputs import DTYPES
from mtabench.problem.work import pairs

# Calibrated on results/nvidia-h200/experiments/mta-decode.csv: seconds until a kernel reads a cache as fast as it can,
# and after that; scores of older rows a second, of which the kernels beside it hide a third; seconds to add a program's
# partial output; and the keys of a program, of which there are so many at most. CUDA's have one an SM; their
# start is of mta-decode.csv and mta-550m-all.csv, too.
START_S, EARLY, MERGE_S = 3.8e-6, 4.5e11, 5.7e-9
CUDA_START_S, BAND_S = 2.2e-6, 1.5e-6
PROGRAM_KEYS, MOST_PROGRAMS = 128, 512
SUM_BYTES = 4  # of a float32


def kernels(case: Case, device: Device) -> list[Kernel]:
    """The launches: K is read for the logits, which are kept, and V for the output, with what the rows before add."""
    before, post = case.operation.pre_conv, case.operation.post_conv
    scores = pairs(case)
    _, keys = tensor_bytes(case)
    row, wide = scores * BYTES_PER_ELEMENT[case.dtype], scores * SUM_BYTES  # of every head
    older = post.query_taps - 1 if post else 0
    by_cuda = _by_cuda(case, device)

    def reads_cache(name: str, convolution: Convolution | None) -> Kernel:
        start = CUDA_START_S + (BAND_S if convolution else 0) if by_cuda else START_S
        return Kernel(name, macs=scores * case.head_dim, waves=1, wave_s=start)

    of_keys = reads_cache("convolved scores" if before and not by_cuda else "logits", before)
    found = [replace(of_keys, memory_bytes=keys + row)]
    if older and not by_cuda:
        found.append(Kernel("older rows", fmas=older * scores, fma_rate=EARLY, memory_bytes=older * row + wide))
    if before and not by_cuda:
        found.append(Kernel("logits", memory_bytes=2 * row))
    programs = min(device.sm_count if by_cuda else MOST_PROGRAMS, -(-case.seq // PROGRAM_KEYS))
    partial = case.batch * programs * case.heads * case.head_dim * SUM_BYTES
    values = keys + row + (older * row if by_cuda else wide if older else 0)
    return [
        *found,
        replace(reads_cache("values", post), exponentials=scores, memory_bytes=values),
        Kernel("merge", l2_bytes=2 * partial, waves=programs, wave_s=MERGE_S),
        *([] if by_cuda else norm_gate.kernels(case)),
    ]


def _by_cuda(case: Case, device: Device) -> bool:
    """Whether the CUDA kernels take a step."""
    if device.shared_memory < SHARED_BYTES:
        return False
    return heads_unsupported(case.operation, DTYPES[case.dtype], case.heads, case.kv_heads, case.head_dim) is None
