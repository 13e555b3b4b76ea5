"""The longest group first; a group whose worker died goes elsewhere, and is given up after three deaths."""

import pytest

from mtabench.cluster.groups import MOST_DEATHS, Group, Groups, longest_first_seconds


def make(*seconds):
    return [Group(number, (), one) for number, one in enumerate(seconds)]


def both():
    return {"a", "b"}


def test_the_longest_goes_first():
    groups = Groups(make(3, 10, 1, 7))
    taken = []
    while group := groups.take("a", both):
        taken.append(group.seconds)
    assert taken == [10, 7, 3, 1]
    assert len(groups) == 0


def test_a_lost_group_goes_to_another_place_before_all_that_wait():
    groups = Groups(make(5, 4, 3))
    lost = groups.take("a", both)
    assert groups.lost(lost, "a", "killed") == ""
    assert groups.take("a", both).seconds == 4
    assert groups.take("b", both) is lost


def test_a_group_that_died_everywhere_goes_anywhere():
    groups = Groups(make(5))
    lost = groups.take("a", both)
    groups.lost(lost, "a", "killed")
    assert groups.take("a", both) is None
    assert groups.take("b", both) is lost
    groups.lost(lost, "b", "killed")
    assert groups.take("a", both) is lost


def test_a_group_is_given_to_another_twice_and_then_given_up_with_the_reasons():
    groups = Groups(make(5))
    for number in range(MOST_DEATHS):
        group = groups.take("a", lambda: {"a"})
        said = groups.lost(group, "a" if number else "b", "killed")
        assert bool(said) == (number == 2)
    assert said == "its worker died 3 times while measuring cells of this shape, on b: killed; on a: killed"
    assert len(groups) == 0


@pytest.mark.parametrize(("workers", "expected"), [(1, 21), (2, 11), (3, 10), (8, 10)])
def test_the_time_of_several_workers_is_that_of_the_one_that_ends_last(workers, expected):
    assert longest_first_seconds([4, 10, 3, 2, 2], workers) == expected
