"""What can be measured: a file an implementation or family, each of which says all about it in its `ENTRIES`.

`mtabench.registry` lists this folder, but for names with an underscore in front: a new file is all that a new
implementation needs. A file loads neither torch nor kernels before one of its functions is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mtabench.problem.case import MODES, Case

if TYPE_CHECKING:
    from torch import Tensor

Closure = Callable[[], "Tensor"]


class Style(NamedTuple):
    """How an implementation looks in every chart and on every page; `dark_colour` is for dark pages.

    What looks so `alone` is grey, as a yardstick, in charts that have conv attention too.
    """

    colour: str
    dark_colour: str
    marker: str
    dashes: Any
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """A way to compute attention; one that computes several operations has an entry of its name for each,
    and one more for whole models.

    `order` is its place in lists, legends and tables; the default is last, and names decide between equals. `build`
    makes a closure that computes the output from a case and its inputs. `why_not` says why it cannot run a case here,
    or None. `interpreted` says the same of a check on a CPU, where an interpreter runs GPU kernels. `splits` says
    whether a decode takes a number of splits, `pages` whether it can read keys in pages. A sweep measures what is
    `by_name` only if --impl names it; `groups` are names of --impl that stand for several. A `yardstick` is another
    project's: no commit of this one changes its time.

    `work` says how its executed FLOPs are counted, and what it stores. "dense": every score, masked or not. "tiled":
    the scores that count. "staged": blocks of them, a chunk of rows at a time. "expanded": as tiled, with queries and
    keys `min(cq, ck)` times as long. "banded": as tiled, and a banded product a tap. "overlapped": as tiled, and the
    margins that tiles share. An estimate takes its `flops`, FLOP/s, where the rate of its work does not fit.

    What is `planned` runs its kernels through `mta_kernels`, whose plans say which they are on any GPU.

    `no_expanded_dout` says why its backward is not checked with dout of one row expanded over all, if it is not.

    What `compiles` takes seconds before its first call of a shape. What is `slow_to_compile` is verified at one shape
    and dtype. Its closure is called `within` a context.
    """

    name: str
    op: str
    passes: tuple[str, ...]
    devices: tuple[str, ...]
    work: str
    summary: str
    build: Callable[[Case, Any], Any]
    why_not: Callable[[Case], str | None]
    order: int = 1000
    note: str = ""
    by_name: bool = False
    yardstick: bool = False
    groups: tuple[str, ...] = ()
    interpreted: Callable[[Case], str | None] | None = None
    splits: bool = False
    pages: bool = False
    style: Style | None = None
    compiles: bool = False
    slow_to_compile: bool = False
    no_expanded_dout: str = ""
    flops: float | None = None
    planned: bool = False
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def key(self) -> tuple[str, str, bool]:
        """The key that distinguishes entries."""
        return self.name, self.op, self.of_models

    @property
    def of_models(self) -> bool:
        """Whether it is a way to run a whole model, whose `build` takes a case and a `transformer.shared.Shared`."""
        return self.passes[0] in MODES
