"""Numbers of other libraries than Python that the public API is given."""

import numpy as np
import pytest
import torch

from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    conv_attention_decode,
    conv_attention_reference,
    identity_weight,
)
from mta_kernels.multi_token_attention import (
    DecodeState,
    MultiTokenAttention,
    multi_token_attention,
    multi_token_attention_decode,
    multi_token_attention_reference,
)

Q = torch.randn(1, 4, 8, 16)
QKV = (Q, Q[:, :2], Q[:, :2])
STEP = (Q[:, :, -3:], Q, Q)
MIX, TAPS, NORM, LENGTHS = torch.eye(4), torch.randn(4, 3, 3), torch.ones(16), torch.tensor([8])


def module(number):
    made = MultiTokenAttention(2 * number, 8 * number, pre_conv=(number, 3), post_mix=number, depth=number, gate=False)
    assert repr(made) == repr(MultiTokenAttention(4, 16, pre_conv=(2, 3), post_mix=2, depth=2, gate=False))
    return made(*QKV)


CALLS = {
    "head_chunk": lambda number: conv_attention(*QKV, TAPS, head_chunk=number),
    "head_chunk of the reference": lambda number: conv_attention_reference(*QKV, TAPS, head_chunk=number),
    "head_chunk of the module": lambda number: ConvAttention(4, 3, 3, head_chunk=number)(*QKV),
    "heads and taps": lambda number: identity_weight(number, number, number),
    "rows": lambda number: multi_token_attention_reference(*QKV, pre_mix=MIX, rows=(number, 3 * number)),
    "rows of conv attention": lambda number: conv_attention_reference(*QKV, TAPS, rows=(number, 3 * number)),
    "depth": lambda number: multi_token_attention(*QKV, pre_mix=MIX, norm_weight=NORM, depth=number),
    "depth of the reference": lambda number: multi_token_attention_reference(*QKV, norm_weight=NORM, depth=number),
    "seed": lambda number: multi_token_attention(*QKV, dropout=0.5, seed=number),
    "seed of the reference": lambda number: multi_token_attention_reference(*QKV, dropout=0.5, seed=number),
    "splits": lambda number: conv_attention_decode(*STEP, TAPS, lengths=LENGTHS, backend="triton", splits=number),
    "splits and depth of a step": lambda number: multi_token_attention_decode(
        *STEP, pre_mix=MIX, norm_weight=NORM, depth=number, lengths=LENGTHS, backend="triton", splits=number
    ),
    "sizes of a state": lambda number: DecodeState.empty(*[number] * 4, dtype=torch.float32).logits,
    "module": module,
    "layer": lambda number: MultiTokenAttention.preset("mta-300m", layer=number, device="meta").mta_kernel.shape,
}


@pytest.mark.parametrize("name", CALLS)
def test_whole_numbers_of_numpy(name):
    want = CALLS[name](2)
    for number in (np.int64(2), np.uint8(2)):
        got = CALLS[name](number)
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


@pytest.mark.parametrize("number", [np.float64(2), np.True_, torch.tensor(2), 2.0], ids=repr)
def test_what_is_no_whole_number_is_refused(number):
    calls = [name for name in CALLS if not (isinstance(number, torch.Tensor) and name.startswith("seed"))]
    for name in calls:
        with pytest.raises(ValueError, match=r"expected|has the layers 0 to"):
            CALLS[name](number)


@pytest.mark.parametrize("function", [multi_token_attention, multi_token_attention_reference])
def test_shares_and_epsilons_of_numpy_and_whole_ones(function):
    def call(dropout, norm_eps):
        return function(*QKV, norm_weight=NORM, gate_weight=NORM[None], norm_eps=norm_eps, dropout=dropout, seed=3)

    assert torch.equal(call(np.float32(0.5), np.float32(0.25)), call(0.5, 0.25))
    assert torch.equal(call(0, 10**20), call(0.0, 1e20))
    assert torch.equal(function(*QKV, pre_mix=MIX, causal=np.False_), function(*QKV, pre_mix=MIX, causal=False))
    for refused in (True, np.True_, torch.tensor(0.5)):
        with pytest.raises(ValueError, match="dropout is"):
            call(refused, 0.25)
        with pytest.raises(ValueError, match="norm_eps is"):
            call(0.5, refused)
