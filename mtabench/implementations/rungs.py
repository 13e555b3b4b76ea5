"""The ladder's rungs: plain attention from three loops in C to the packages of FlashAttention's authors."""

from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import attention_by_rung, rung_why_not, triton_untimed
from mtabench.problem.case import Case


def flex_why_not(case: Case) -> str | None:
    """Why FlexAttention cannot run this case, or None."""
    if case.pass_ == "bwd" and case.device == "cpu":
        return "FlexAttention has no backward on a CPU"
    return rung_why_not(case)


def triton_why_not(case: Case) -> str | None:
    """Why a rung in Triton cannot be timed, or None."""
    return triton_untimed(case) or rung_why_not(case)


_rung = partial(
    Implementation, op="attention", groups=("ladder",), by_name=True, build=attention_by_rung, why_not=rung_why_not
)
_c = partial(_rung, passes=("fwd",), devices=("cpu",))
_gpu = partial(_rung, passes=("fwd",), devices=("cuda",), compiles=True)
_cuda = partial(_gpu, planned=True)
_triton = partial(_gpu, why_not=triton_why_not, interpreted=rung_why_not, planned=True)
_flash_attn = partial(_rung, passes=("fwd", "bwd"), devices=("cuda",), work="tiled", yardstick=True)

ENTRIES = (
    _c(
        order=110, name="c-loops", work="dense",
        summary="plain attention: three loops in C; stores the N x N scores of a head",
        style=Style("#8A4B08", "#D8A05B", "o", (0, (1.2, 1.2)), alone=True), flops=2.5e9,
    ),
    _c(
        order=120, name="c-tiled", work="tiled",
        summary="plain attention: C in tiles that fit the caches, all cores and their vector units",
        style=Style("#8A4B08", "#D8A05B", "s", "-", alone=True),
    ),
    _cuda(
        order=130, name="cuda-naive", work="dense",
        summary="plain attention: three CUDA kernels, a thread an element; stores the N x N scores",
        style=Style("#117733", "#3CC46B", "o", (0, (1.2, 1.2)), alone=True),
        flops=1e12,  # a guess, as the others
    ),
    _cuda(
        order=140, name="cuda-tiled", work="tiled",
        summary="plain attention: the same by tiles in shared memory; stores the N x N scores",
        style=Style("#117733", "#3CC46B", "s", (0, (4, 1.6)), alone=True), flops=1e13,
    ),
    _cuda(
        order=150, name="cuda-flash", work="tiled",
        summary="plain attention: one fused CUDA kernel, tensor cores, online softmax",
        style=Style("#117733", "#3CC46B", "^", "-", alone=True),
    ),
    _triton(
        order=160, name="triton-pointer", work="dense",
        summary="plain attention: fused in Triton, pointers and masks over the packed layout",
        style=Style("#7B3FA0", "#C58CF0", "o", (0, (1.2, 1.2)), alone=True),
        flops=1.5e14,  # a guess, as for triton-descriptor
    ),
    _triton(
        order=170, name="triton-descriptor", work="dense",
        summary="plain attention: fused in Triton, tensor descriptors, keys stored transposed",
        style=Style("#7B3FA0", "#C58CF0", "s", (0, (4, 1.6)), alone=True), flops=1.5e14,
    ),
    _triton(
        order=180, name="triton-fmha", work="tiled",
        summary="plain attention: fused in Triton as it is run: exp2, skipped tiles, grouped heads",
        style=Style("#7B3FA0", "#C58CF0", "^", "-", alone=True),
    ),
    _gpu(
        order=190, name="cutile-fmha", work="tiled",
        summary="plain attention: the same in NVIDIA's cuTile for Python",
        style=Style("#0E7C86", "#35C4CF", "^", "-", alone=True),
    ),
    _rung(
        order=230, name="flex", passes=("fwd", "bwd"), devices=("cuda", "cpu"), work="tiled",
        summary="plain attention: PyTorch's FlexAttention, written by torch.compile",
        why_not=flex_why_not, yardstick=True,
        style=Style("#B8558F", "#E58FC2", "D", (0, (4, 1.6)), alone=True), compiles=True, slow_to_compile=True,
    ),
    _flash_attn(
        order=240, name="flash-attn",
        summary="plain attention: FlashAttention-2, the package of its authors",
        style=Style("#0072B2", "#4FA3FF", "v", (0, (4, 1.6)), alone=True),
    ),
    _flash_attn(
        order=250, name="flash-attn-3",
        summary="plain attention: FlashAttention-3, the package of its authors",
        style=Style("#0072B2", "#4FA3FF", "X", (0, (1.2, 1.2)), alone=True),
    ),
    _flash_attn(
        order=255, name="flash-attn-4",
        summary="plain attention: FlashAttention-4, the package of its authors",
        style=Style("#0072B2", "#4FA3FF", "P", (0, (4, 1.2, 1.2, 1.2)), alone=True),
    ),
)  # fmt: skip
