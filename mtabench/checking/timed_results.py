"""Results of timed calls: inputs are others in each, at the same addresses, and some results are judged.

Which ones is drawn at random, and nothing in a window differs. So a call cannot know whether it is looked at.
"""

from collections.abc import Callable, Sequence
from random import SystemRandom

import torch
from torch import Tensor

from mtabench.checking.oracle import Oracle, each
from mtabench.checking.side_effects import InputsChangedError, check_in_time, check_plain, check_unchanged, look, marks
from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.timing import Watch
from mtabench.problem.inputs import INTEGERS, Inputs

RANDOM = SystemRandom()


class TimedResults(Watch):
    """Changes signs of columns of the inputs before each call, and judges the result that was kept last.

    Columns of q and k change alike, so scores stay as they are; those of the output follow v. Dout changes between
    forward and backward, so that a forward cannot know the gradients.
    """

    def __init__(self, inputs: Inputs, oracle: Oracle, draw_again: Callable[[], None]) -> None:
        """`draw_again` gives the inputs their values back after a call changed them."""
        self._inputs, self._oracle, self._draw_again = inputs, oracle, draw_again
        self._device, self._before = inputs.q.device, marks(inputs)
        self._generator = torch.Generator(self._device).manual_seed(RANDOM.getrandbits(62))
        bits = INTEGERS[inputs.q.element_size()]
        unchanged = torch.zeros(3, inputs.q.shape[-1], dtype=bits, device=self._device)
        self._flipped = dict(zip(("keys", "values", "dout"), unchanged, strict=True))
        self._values = unchanged[0]
        self._results: Sequence[Tensor] = []
        self._seen: Sequence[Tensor] = []

    def change(self) -> None:
        """See `Watch`."""
        self._before = marks(self._inputs, self._before)  # copies of caches may have been made since
        keys, self._values = self._drawn(2)
        self._flip(keys=keys, values=self._values)

    def change_gradient(self) -> None:
        """See `Watch`."""
        if self._inputs.dout is not None:
            self._flip(dout=self._values ^ self._drawn(1)[0, :1])

    def look(self, results: Sequence[Tensor | Sequence[Tensor]]) -> None:
        """See `Watch`."""
        self._results = each(RANDOM.choice(results))
        check_plain(self._results)
        self._seen = look(self._results)

    def end(self, judged: bool = False) -> None:
        """See `Watch`."""
        results, seen, self._results, self._seen = self._results, self._seen, [], []
        try:
            if judged and results:
                check = self._oracle.check(results, self._signs())
                check_in_time(self._device.type, seen, results, doubted=not check.ok)
                if not check.ok:
                    raise WrongResultError(f"right before it was timed, and a timed call is wrong: {check.reason}")
        finally:
            self._restore()

    def _restore(self) -> None:
        try:
            self._flip(**{name: bits.clone() for name, bits in self._flipped.items()})
            check_unchanged(self._before, self._inputs)
        except (InputsChangedError, RuntimeError) as error:  # they have another shape, perhaps
            self._draw_again()
            for bits in self._flipped.values():
                bits.zero_()
            raise InputsChangedError(f"right before it was timed; when timed {error}") from None

    def _drawn(self, count: int) -> Tensor:
        """Sign bits of columns, each there or not by chance: `[count, D]`."""
        size, dtype = (count, len(self._values)), self._values.dtype
        drawn = torch.randint(0, 2, size, generator=self._generator, dtype=dtype, device=self._device)
        return drawn.mul_(torch.iinfo(dtype).min)

    def _flip(self, **bits: Tensor) -> None:
        self._inputs.flip(**bits)
        for name, those in bits.items():
            self._flipped[name] ^= those

    def _signs(self) -> dict[str, Tensor]:
        """Of the columns of each result, or of all of it, what the changes so far made of them."""
        keys, values, dout = (1 - 2 * (bits < 0).int() for bits in self._flipped.values())
        if self._inputs.dout is None:
            return {"out": values}
        whole = (dout * values)[0]
        others = {f"d{name}": whole for name in self._inputs.mixers}
        return others | {"dq": whole * keys, "dk": whole * keys, "dv": dout, "dgate_weight": dout}
