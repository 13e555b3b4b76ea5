"""What both kernels of the forward of mixed heads take, and their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mta_kernels.conv_attention.hopper import source as hopper
from mta_kernels.multi_token_attention.rows_cuda import rows
from mta_kernels.nvrtc.compiler import Source, headers_in

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


def source(name: str, constants: dict[str, Any], product: hopper.Product) -> Source:
    """The source of a kernel that uses this product, for sm_90a."""
    headers = headers_in(hopper.FOLDER, rows.FOLDER, FOLDER) | {"wgmma.cuh": hopper.wgmma_header([product])}
    return Source(FOLDER / name, "sm_90a", constants, headers)
