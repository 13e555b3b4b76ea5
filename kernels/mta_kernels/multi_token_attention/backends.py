"""The kernel backends of the whole multi-token attention."""

from __future__ import annotations

from mta_kernels.backend import Backends
from mta_kernels.multi_token_attention.triton.backend import TRITON

MULTI_TOKEN_ATTENTION = Backends((TRITON,))  # a backend is one import above and its name here
BACKENDS = MULTI_TOKEN_ATTENTION.names
