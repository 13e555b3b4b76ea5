"""The kernel of kept logits against its definition in float64, in the emulator or on a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE
from mta_logits import Case, make_case

if DEVICE == "cpu":
    from emulated_mix import emulated_mix  # noqa: F401


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "head_dim"), [(16, 64, 64, 64), (10, 70, 150, 64), (3, 1, 1, 16), (16, 63, 200, 48)]
)
def test_a_chunk_matches_float64(emulated_mix, heads: int, rows: int, keys: int, head_dim: int) -> None:
    make_case(heads=heads, rows=rows, keys=keys, head_dim=head_dim).check()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_threads_order(emulated_mix, seed: int) -> None:
    """Later rows of a chunk, two sequences, grouped heads, tiles shared by several blocks."""
    emulated_mix.seed, emulated_mix.multiprocessors = seed, 5
    make_case(heads=4, rows=100, keys=270, batch=2, queries=250, first_row=128, kv_heads=2, head_dim=32).check()


def test_keys_that_all_rows_see(emulated_mix) -> None:
    make_case(heads=5, rows=70, keys=90, causal=False).check()
    make_case(heads=5, rows=70, keys=90, causal=False, mixed=False).check()


@pytest.mark.parametrize("late", [40, 100, 170])
@pytest.mark.parametrize("large", [60000.0, -60000.0, 300.0])
def test_logits_that_grow(emulated_mix, large: float, late: int) -> None:
    """References are raised where later keys have much larger logits; all blocks of a row end up with one."""
    case = make_case(heads=9, rows=64, keys=200, size=0.1)
    case.q[:, :3, :, 0] = large / 100
    case.k[:, :3, :, 0] = torch.where(torch.arange(200) >= late, 100.0, -100.0)
    case = Case(case.q, case.k, None, 1.0, 0, 64, True)
    case.check(workers=1)
    case.check(workers=4)


def test_equal_logits(emulated_mix) -> None:
    case = make_case(heads=2, rows=64, keys=200)
    case.q.zero_()
    case.check()


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (10, 128), (3, 96), (1, 80)])
def test_clusters_that_share_a_tile(emulated_mix, heads: int, head_dim: int) -> None:
    emulated_mix.multiprocessors, emulated_mix.seed = 4, heads
    make_case(heads=heads, rows=90, keys=150, head_dim=head_dim).check()
