"""CUDA kernels that mix, normalise and mix again rows of stored scores, for sm_80 and later: see forward.cu."""

from mta_kernels.multi_token_attention.rows_cuda.rows import mix_rows, mix_rows_backward

__all__ = ["mix_rows", "mix_rows_backward"]
