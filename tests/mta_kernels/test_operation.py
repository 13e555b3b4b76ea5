"""The spec of the operation: its arguments, its properties, and that equal ones are one key."""

from __future__ import annotations

import numpy as np
import pytest

from mta_kernels.operation import Convolution, Operation


def test_what_a_call_is_told_becomes_numbers() -> None:
    assert Operation.of((6, 11), 64) == Operation(Convolution(6, 11, 5), 0.125, causal=True)
    assert Operation.of((3, 4), 64, causal=False, scale=2, pad_key="left") == Operation(
        Convolution(3, 4, 3), 2.0, False
    )
    assert len({Operation.of((6, 11), 64), Operation.of((6, 11), 64), Operation.of((6, 11), 64, scale=0.3)}) == 2
    assert Operation.of((6, 11), 64, causal=np.bool_(False)).causal is False  # so that equal operations are one key
    with pytest.raises(ValueError, match="pad_key is 'middle'"):
        Operation.of((6, 11), 64, pad_key="middle")


def test_the_band_is_where_taps_reach_past_the_query_s_row() -> None:
    assert Operation.of((6, 11), 64).band == 5 + 5
    assert Operation.of((6, 11), 64, pad_key="left").band == 5
    assert Operation.of((1, 1), 64).band == Operation.of((6, 11), 64, causal=False).band == 0
