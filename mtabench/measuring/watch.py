"""What looks at the calls of a cell while they are timed, always outside the windows."""

from collections.abc import Sequence
from typing import Any


class Watch:
    """This one does nothing."""

    def change(self) -> None:
        """Before a call: give the inputs other values, at the same addresses."""

    def change_gradient(self) -> None:
        """After the setup of a backward, which is its forward: give dout other values."""

    def look(self, results: Sequence[Any]) -> None:
        """Right behind the last window: keep one of these results, each of a call in it."""

    def end(self, judged: bool = False) -> None:
        """Let go of the result, and give the inputs the values of before all changes.

        Raises WrongResultError if a call changed them, or if the result is `judged` and wrong.
        """


UNWATCHED = Watch()
