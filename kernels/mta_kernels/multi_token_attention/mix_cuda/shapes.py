"""What both kernels of the forward of mixed heads take, and the headers that both include."""

from __future__ import annotations

from pathlib import Path

import torch

from mta_kernels.conv_attention.hopper import source as hopper
from mta_kernels.multi_token_attention.rows_cuda import plan as rows_plan
from mta_kernels.nvrtc.compiler import headers_in

FOLDER = Path(__file__).parent
MOST_HEADS, MOST_HEAD_DIM = 16, 128


def shape_unsupported(dtype: torch.dtype, heads: int, head_dim: int) -> str | None:
    """Why no Hopper GPU could, or None."""
    if dtype != torch.bfloat16:
        return f"dtype {dtype} is not bfloat16"
    if heads > MOST_HEADS:
        return f"{heads} heads are more than {MOST_HEADS}"
    if head_dim % 16 or not 16 <= head_dim <= MOST_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 16 up to {MOST_HEAD_DIM}"
    return None


def headers(products: list[hopper.Product], *names: str) -> dict[str, str]:
    """Headers of a kernel that uses these products: those beside it of these names, and what both kernels include."""
    found = {"wgmma.cuh": hopper.wgmma_header(products)}
    for folder, of_folder in (
        (FOLDER, ("mix_instructions.cuh", *names)),
        (rows_plan.FOLDER, ("matrix.cuh", "rows_instructions.cuh")),
        (hopper.FOLDER, ("device.cuh",)),
    ):
        found |= headers_in(folder, of_folder)
    return found
