"""Which query rows each chunk of stored scores is for."""

import itertools
from unittest.mock import Mock

import pytest

from mta_kernels import score_chunks
from mta_kernels.operation import Convolution, Operation
from mta_kernels.score_chunks import BLOCK, chunk_rows, halo_rows, own_rows, stored_scores

HEADS = 16


def operation(taps: tuple[int, int] | None, causal: bool) -> Operation:
    return Operation.of(taps, 64, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("before", [0, 3, 5000])
@pytest.mark.parametrize("query_rows", [1, 127, 300, 4096, 16384, 70000])
def test_chunks_have_every_row_once_and_no_more_scores_than_the_last_rows_may(query_rows, before, causal):
    convolved, keys = operation((6, 11), causal), query_rows + before
    halo = {"above": halo_rows(convolved), "below": halo_rows(convolved)}
    _, rows = chunk_rows(convolved, 1, HEADS, keys, 2, backward=True)
    found = own_rows(convolved, query_rows, keys, rows, **halo)
    assert [*itertools.chain(*found)] == [*range(query_rows)]
    most = (rows + sum(halo.values())) * -(-keys // BLOCK) * BLOCK
    assert all(stored_scores(convolved, query_rows, keys, own, **halo) <= most for own in found)
    assert all(len(own) % BLOCK == 0 for own in found[:-1])


def test_causal_chunks_are_fewer_and_have_about_equally_many_scores():
    convolved = operation((6, 11), True)
    found = own_rows(convolved, 16384, 16384, 2048, above=10, below=10)
    assert [len(own) for own in found] == [5248, 3328, 2560, 2176, 1792, 1280]
    scores = [stored_scores(convolved, 16384, 16384, own, above=10, below=10) for own in found]
    assert max(scores) < 0.9 * 2068 * 16384
    assert min(scores[:-1]) > 0.9 * max(scores)


@pytest.mark.parametrize(("causal", "rows"), [(False, 5000), (True, 4096)])
def test_chunks_have_like_rows_where_others_would_not_be_fewer(causal: bool, rows: int):
    found = own_rows(operation((6, 11), causal), rows, rows, 2048)
    assert found == tuple(range(first, min(first + 2048, rows)) for first in range(0, rows, 2048))


def test_thousands_of_chunks_are_found_in_a_few_steps_each(monkeypatch):
    """Of 16 rows each, as a million tokens and more have them: the host must not search every chunk's end anew."""
    counted = Mock(wraps=stored_scores)
    monkeypatch.setattr("mta_kernels.score_chunks.stored_scores", counted)
    found = own_rows(operation((6, 11), True), 2**16, 2**16, 16, above=10)
    assert len(found) > 1000
    assert counted.call_count < 2 * 2**16 // 16 + 100


def test_chunks_of_mixed_heads_alone_have_like_rows():
    assert [len(own) for own in own_rows(operation(None, True), 5000, 5000, 2048)] == [2048, 2048, 904]


@pytest.mark.parametrize(
    ("large", "backward", "rows"), [(False, True, 16), (True, True, 32), (False, False, 32), (True, False, 64)]
)
def test_rows_on_a_gpu_with_large_memory(
    monkeypatch: pytest.MonkeyPatch, large: bool, backward: bool, rows: int
) -> None:
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 4 * 16 * (2 * 2**14 * 2))
    taps = Convolution(2, 3, 1)
    both = Operation(taps, 1.0, post_conv=taps)
    assert score_chunks.chunk_rows(both, 1, 2, 2**14, 2, backward=backward, large=large) == (1, rows)
