"""A process that torchrun started: whether it is another rank than the first, and its part if so."""

from __future__ import annotations

from mtabench.ranks.place import find_place


def follow_torchrun(ranks: int, device: str) -> bool:
    """Whether torchrun started this process as another rank than the first: then it has done its part by now."""
    place = find_place(ranks)
    if place.rank == 0:
        return False
    from mtabench.ranks.follower import follow
    from mtabench.ranks.meeting import TORCHRUN, Meeting

    follow(Meeting(place.rank, ranks, device, TORCHRUN))
    return True
