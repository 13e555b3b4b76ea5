"""What is kept is bounded."""

from mta_kernels.call_memory import keep


def test_a_full_memory_is_emptied_before_it_takes_more() -> None:
    memory: dict[int, str] = {}
    assert [keep(memory, i, str(i), 3) for i in range(3)] == ["0", "1", "2"]
    assert memory == {0: "0", 1: "1", 2: "2"}
    assert keep(memory, 3, "3", 3) == "3"
    assert memory == {3: "3"}
