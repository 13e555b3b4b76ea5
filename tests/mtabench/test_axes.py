"""The range grammar: what it expands to, and that everything else is refused in one sentence."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtabench.errors import UsageError
from mtabench.problem.axes import (
    PRESETS,
    find_preset,
    parse_convs,
    parse_ints,
    parse_names,
    parse_splits,
    short,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("512,1k,4K", [512, 1024, 4096]),
        ("1m", [1024 * 1024]),
        ("1k..16k", [1024, 2048, 4096, 8192, 16384]),
        ("1k..5k", [1024, 2048, 4096, 5120]),  # an end that doubling misses is added
        ("1k..4k:+1k", [1024, 2048, 3072, 4096]),
        ("1..6:+2", [1, 3, 5, 6]),
        ("1k..64k:x4", [1024, 4096, 16384, 65536]),
        ("1k..64k:X4", [1024, 4096, 16384, 65536]),
        ("7..7", [7]),
        (" 1k , 2k..4k ", [1024, 2048, 4096]),
        ("2,1,2", [2, 1]),  # in the order given, each once
    ],
)
def test_ranges_expand_as_documented(text, expected):
    assert parse_ints(text, "--seq") == expected


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ",", "1k,,2k", "1k..", "..4k", "4k..1k", "1k..4k:", "1k..4k:x1", "1k..4k:+0", "1k..4k:-1k",
        "1k...4k", "1..2..3", "0", "-1", "1.5", "1e3", "k", "1kk", "1g", "one", "1 k", "1k;2k", "0..4", "1..1m:+1",
        "\uff11\uff12",
    ],
)  # fmt: skip
def test_everything_else_is_one_sentence_that_names_the_option(text):
    with pytest.raises(UsageError) as caught:
        parse_ints(text, "--seq")
    assert "--seq" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(["", ":x3", ":+5000", ":x2"]))
def test_a_range_has_both_ends_and_ascends(one, other, step):
    first, last = sorted((one, other))
    values = parse_ints(f"{first}..{last}{step}", "--seq")
    assert (values[0], values[-1]) == (first, last)
    assert all(a < b for a, b in pairwise(values))


@given(st.lists(st.integers(1, 2**30), min_size=1, max_size=20, unique=True))
def test_what_short_writes_is_read_back(values):
    assert parse_ints(",".join(short(value) for value in values), "--seq") == values


@given(st.text(max_size=20))
def test_any_text_gives_positive_integers_or_a_usage_error(text):
    try:
        values = parse_ints(text, "--seq")
    except UsageError:
        return
    assert values
    assert all(isinstance(value, int) and value >= 1 for value in values)


def test_convolutions():
    assert parse_convs("6x11,3X3,7,7x7") == [(6, 11), (3, 3), (7, 7)]
    assert parse_convs("1x1,16x31") == [(1, 1), (16, 31)]
    assert parse_convs("6\N{MULTIPLICATION SIGN}11, 3 x 2") == [(6, 11), (3, 2)]
    assert parse_ints("1k..16k:\N{MULTIPLICATION SIGN}4", "--seq") == [1024, 4096, 16384]


@pytest.mark.parametrize("text", ["", "6x", "x11", "6x11x2", "6*11", "0x3", "3x0", "17x3", "3x32", "17", "6x11,", "a"])
def test_convolutions_out_of_range_or_malformed(text):
    with pytest.raises(UsageError, match="--conv"):
        parse_convs(text)


def test_splits():
    assert parse_splits("auto") == ["auto"]
    assert parse_splits("auto,1..64") == ["auto", 1, 2, 4, 8, 16, 32, 64]
    assert parse_splits("1..128:x4, AUTO,4,auto") == [1, 4, 16, 64, 128, "auto"]
    for text in ("", "automatic", "auto,,1", "auto,0", "8..1", "many"):
        with pytest.raises(UsageError, match="--splits"):
            parse_splits(text)


@pytest.mark.parametrize("text", ["129", "1..256", "auto,1k", "64..1m"])
def test_more_splits_than_the_kernel_takes_are_refused(text):
    with pytest.raises(UsageError, match=r"--splits .* is out of range; expected auto, or numbers from 1 to 128"):
        parse_splits(text)


@pytest.mark.parametrize("text", ["1025m", "2" + "0" * 12, "9" * 40, "1k..999999m"])
def test_numbers_that_no_machine_has_room_for_are_refused(text):
    with pytest.raises(UsageError, match=r"--seq \d+m? is out of range; expected at most 1024m"):
        parse_ints(text, "--seq")
    assert parse_ints("1024m", "--seq") == [2**30]


def test_names():
    assert parse_names("eager, triton,eager", "--impl") == ["eager", "triton"]
    paths = ["new=./a,b/c,d/mine.py:attention", "/x,y/z.py:attention", "./z.py"]
    assert parse_names(f"eager,{','.join(paths)},triton", "--impl") == ["eager", *paths, "triton"]
    with pytest.raises(UsageError, match="--impl"):
        parse_names("eager,,triton", "--impl")


def test_presets_are_those_of_the_paper():
    shapes = {name: (preset.heads, preset.head_dim) for name, preset in PRESETS.items()}
    assert shapes == {"mta-300m": (16, 64), "mta-550m": (10, 128), "mta-830m": (16, 96), "mta-1b": (16, 128)}
    assert {(preset.conv, preset.seq) for preset in PRESETS.values()} == {((6, 11), 2048)}
    with pytest.raises(UsageError, match="mta-300m"):
        find_preset("mta-7b")
