"""The kernel backends of conv attention."""

from __future__ import annotations

from mta_kernels.backend import Backends
from mta_kernels.conv_attention.cuda_decode.backend import CUDA
from mta_kernels.conv_attention.hopper.backend import HOPPER
from mta_kernels.conv_attention.triton.backend import TRITON

CONV_ATTENTION = Backends((TRITON, HOPPER, CUDA))
BACKENDS = CONV_ATTENTION.names
