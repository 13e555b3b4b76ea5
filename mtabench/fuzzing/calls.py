"""A case's call through the public functions, in the way that the case says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention import ConvAttention, conv_attention, conv_attention_decode
from mtabench.fuzzing.inputs import Inputs
from mtabench.fuzzing.layouts import Placed
from mtabench.fuzzing.mta_calls import MtaOperation, call_mta, chunk_rows
from mtabench.fuzzing.poison import fresh_memory_is_nan
from mtabench.problem.inputs import DTYPES

BACKENDS = {"eager": "reference"}  # where a backend's name differs from that of the implementation
Results = dict[str, Tensor]


class Operation(NamedTuple):
    """What is called: the public functions, or what a test has in their place."""

    attention: Callable[..., Tensor] = conv_attention
    decode: Callable[..., Tensor] = conv_attention_decode
    mta: MtaOperation = MtaOperation()


PUBLIC = Operation()


class Call:
    """The arguments of a case in memory, and what calls the operation with them."""

    def __init__(
        self, inputs: Inputs, operation: Operation = PUBLIC, values: Mapping[str, Tensor] | None = None
    ) -> None:
        """With other `values` than the inputs', by name, where they are given."""
        self.case, self._operation = inputs.case, operation
        self.placed = {
            name: Placed(self._as_given(name, x), inputs.layouts[name])
            for name, x in (inputs.values | dict(values or {})).items()
        }
        self._leaves: dict[str, Tensor] = {}
        for name, placed in self.placed.items():
            wanted = name in self.case.wanted or (name == "q_history" and "q" in self.case.wanted)
            self._leaves[name] = placed.x.detach().requires_grad_(wanted)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The arguments by name."""
        return self._leaves

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Other values at the same addresses."""
        for name, x in values.items():
            self.placed[name].put(self._as_given(name, x))

    def run(self, gradients: bool = True) -> Results:
        """Call it, with NaN wherever nothing was written; results are detached, and gradients are those wanted.

        Without `gradients` a plain call leaves out its backward.
        """
        with fresh_memory_is_nan():
            if self.case.way == "graph":
                return self._replayed()
            if self.case.way == "stream":
                return self._beside()
            if self.case.way == "again":
                with self._other_numbers():
                    self.run_plainly()
            return self.run_plainly(gradients)

    def keep(self) -> None:
        """Note what the arguments hold, for `changed`."""
        for placed in self.placed.values():
            placed.keep()

    def changed(self) -> list[str]:
        """Names of arguments in whose memory anything was written since `keep`."""
        flags = torch.stack([placed.changed() for placed in self.placed.values()])
        return [name for name, changed in zip(self.placed, flags.tolist(), strict=True) if changed]

    def _as_given(self, name: str, values: Tensor) -> Tensor:
        """Under autocast the caller has float32."""
        if self.case.way == "autocast" and name in ("q", "k", "v", "q_history", "weight"):
            return values.float()
        return values

    def run_plainly(self, gradients: bool = True) -> Results:
        """Call it in memory as it is."""
        case, leaves = self.case, self._leaves
        autocast = torch.autocast(case.device, DTYPES[case.dtype]) if case.way == "autocast" else nullcontext()
        with torch.set_grad_enabled(bool(case.wanted)), chunk_rows(case):
            with autocast:
                out = self._out()
            found = {"out": out.detach()}
            if case.wanted and gradients:
                names = [name for name, leaf in leaves.items() if leaf.requires_grad]
                # A history that is longer than the convolution looks back may not be used at all.
                wanted = [leaves[name] for name in names]
                of_wanted = torch.autograd.grad(out, wanted, leaves["grad_out"], materialize_grads=True)
                found |= {f"d{name}": x for name, x in zip(names, of_wanted, strict=True)}
        return found

    def _out(self) -> Tensor:
        case, x, backend = self.case, self._leaves, BACKENDS.get(self.case.backend, self.case.backend)
        if case.parts is not None:
            return call_mta(case, x, self._operation.mta, backend)
        options: dict[str, Any] = {"scale": case.scale, "pad_key": case.pad_key, "backend": backend}
        if case.pass_ == "decode":
            options |= {"lengths": x["lengths"], "splits": case.splits}
            if "block_table" in x:
                options["block_table"] = x["block_table"]
            return self._operation.decode(x["q"], x["k"], x["v"], x["weight"], **options)
        options |= {"causal": case.causal, "head_chunk": case.head_chunk}
        optional: dict[str, Any] = {name: x[name] for name in ("q_history", "cu_seqlens") if name in x}
        if case.way == "module":
            taps = case.query_taps, case.key_taps
            module = ConvAttention(case.heads, *taps, **options, dtype=x["weight"].dtype, device=case.device)
            return torch.func.functional_call(module, {"weight": x["weight"]}, (x["q"], x["k"], x["v"]), optional)
        return self._operation.attention(x["q"], x["k"], x["v"], x["weight"], **options, **optional)

    def _beside(self) -> Results:
        """On a stream that is not the default one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = self.run_plainly()
        torch.cuda.current_stream().wait_stream(stream)
        for x in found.values():
            x.record_stream(torch.cuda.current_stream())
        return found

    def _replayed(self) -> Results:
        """Captured with other numbers in q, k and v, which the replay must not see."""
        graph = torch.cuda.CUDAGraph()
        with self._other_numbers():
            self._beside()  # compiles and warms up
            with torch.cuda.graph(graph):
                found = self.run_plainly()
        for x in found.values():
            x.fill_(float("nan"))
        graph.replay()
        return {name: x.clone() for name, x in found.items()}

    @contextmanager
    def _other_numbers(self) -> Iterator[None]:
        """Within it q, k and v hold others at their addresses."""
        own = {name: self.placed[name].x.clone() for name in ("q", "k", "v")}
        for name, x in own.items():
            self.placed[name].put(x * -0.5)
        try:
            yield
        finally:
            for name, x in own.items():
                self.placed[name].put(x)
