"""What the Triton decode plans: tiles that fit, and how many programs share a cache."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from mta_kernels.conv_attention.triton.decode_plan import (
    DecodeConfig,
    choose_splits,
    column_steps,
    decode_candidates,
    newest_last,
)


@pytest.mark.parametrize("shared_memory", [232448, 166912, 101376])
def test_configs_fit_every_gpu(shared_memory: int) -> None:
    for key_taps in range(1, 32):
        for group in (1, 2, 3, 4, 8, 32):
            for block_d, size in ((16, 2), (64, 2), (128, 2), (256, 2), (64, 4), (256, 4)):
                shape = {"key_taps": key_taps, "block_d": block_d, "element_size": size}
                options = {"group": group, "shared_memory": shared_memory}
                bulk = decode_candidates(bulk=True, **options, **shape) if size == 2 else ()
                for config in (*decode_candidates(**options, **shape), *bulk):
                    assert config.shared_memory(**shape) <= shared_memory
                    # A window's columns lie within two tiles.
                    assert config.block_n // config.pack >= column_steps(key_taps, config.pack)


def test_choose_splits() -> None:
    """By what fits a multiprocessor, of which there are 132."""
    assert choose_splits(16, 65536, 1, 132, 1, 3) == 14  # the fewest that read as fast as memory can: 5 on 3 SMs
    assert choose_splits(16, 256, 1, 132, 1, 3) == 4  # never less than 64 keys each
    assert choose_splits(128, 16384, 1, 132, 1, 3) == 3  # five on three cannot be: 384 programs, three an SM
    assert choose_splits(128, 16384, 1, 132, 1, 4) == 4  # 512, four an SM
    assert choose_splits(8, 65536, 4, 132, 2, 4) == 33  # 16 programs a split, 528: four an SM
    assert choose_splits(8, 4096, 4, 132, 2, 4) == 24  # of few keys, three
    assert choose_splits(8, 65536, 8, 132, 4, 2) == 16
    assert choose_splits(1, 1 << 20, 1, 132, 1, 4) == 128
    assert choose_splits(16, 8192, 1, 84, 1, 1) == 5  # an SM that holds one program has no five on three
    assert choose_splits(384, 20000, 1, 132, 1, 3) == 1  # three an SM
    assert choose_splits(256, 20000, 1, 132, 1, 3) == 3
    assert choose_splits(4096, 4096, 1, 132, 1, 4) == 1
    for sequences, length, group in ((8, 4096, 1), (21, 1000, 4), (128, 131072, 8), (1, 1, 1), (264, 70, 1)):
        assert 1 <= choose_splits(sequences, length, group, 132, 1, 4) <= min(128, max(1, length // 64))


def test_programs_that_fit_an_sm() -> None:
    """As many as an H200 ran at a time: beyond, times jump."""
    hopper = {"key_taps": 11, "element_size": 2, "shared_memory": 232448}
    assert DecodeConfig(64, 2, 1, 2, 3).programs_per_sm(block_d=128, **hopper) == 3
    assert DecodeConfig(64, 2, 1, 2, 3).programs_per_sm(block_d=64, **hopper) == 4
    assert DecodeConfig(128, 2, 4, 4, 2).programs_per_sm(block_d=64, **hopper) == 2
    assert DecodeConfig(128, 2, 1, 8, 4).programs_per_sm(block_d=256, **hopper) == 1


def test_programs_of_the_newest_keys_come_first_or_last() -> None:
    assert not newest_last(16, 14, 1, 132)  # about five programs on three SMs, those of the newest keys in between
    assert newest_last(16, 16, 1, 132)  # two on each
    assert newest_last(16, 4, 1, 132)
    assert newest_last(8, 24, 4, 132)
