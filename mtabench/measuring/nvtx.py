"""Names of cells and phases for Nsight Systems: NVTX ranges on a GPU, nothing elsewhere."""

from contextlib import AbstractContextManager, nullcontext

import torch


def phase(device: str, name: str) -> AbstractContextManager[None]:
    """A range called `name` around what a GPU is given to do; on the CPU a context that does nothing."""
    return torch.cuda.nvtx.range(name) if device == "cuda" else nullcontext()
