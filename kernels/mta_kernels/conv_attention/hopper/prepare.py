"""What forward and backward share: prepare.cu, which computes what they need besides their inputs, and launches."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_void_p
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.call_memory import keep
from mta_kernels.conv_attention.banded.backward_plan import NORM_PARTS, GradientPreparation
from mta_kernels.conv_attention.banded.structures import BandedConstants
from mta_kernels.conv_attention.hopper.source import hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import TensorMap, has_describable_strides
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import Rows, Weight, fields
from mta_kernels.operation import Operation

TAP_NUMBERS = 16 * 32


@dataclass(frozen=True)
class PrepareConstants(BandedConstants):
    """The constants of prepare.cu for a shape; neither a causal mask nor spans make a difference."""

    causal: bool = True
    spans: bool = False

    kernel_name, threads, shared_memory = "hopper_prepare", 256, 32

    @property
    def tap_bytes(self) -> int:
        """Bytes of T of one head."""
        return self.conv.query_taps * TAP_NUMBERS * 2

    def source(self, architecture: str = "sm_90a") -> Source:
        return hopper_source("prepare.cu", self.constants())


@dataclass(frozen=True)
class HopperTileConstants(BandedConstants):
    """The constants that forward.cu and backward.cu share for a shape; subclasses add the others."""

    @property
    def warpgroups(self) -> int:
        """Consumers a block."""
        return 2

    @property
    def stages(self) -> int:
        """Pipeline stages: a tile of keys each, and what else is needed of the tile before."""
        raise NotImplementedError

    @property
    def prepared(self) -> PrepareConstants:
        return PrepareConstants(self.dtype, self.head_dim, self.conv)

    @property
    def slabs(self) -> int:
        """Tiles of 64 columns that hold the head dim."""
        return -(-self.head_dim // 64)

    @property
    def threads(self) -> int:
        """Threads a block: its consumers and a producer."""
        return 128 * (self.warpgroups + 1)

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "WARPGROUPS": self.warpgroups, "STAGES": self.stages}


class HopperPreparation(GradientPreparation):
    """`struct Preparation` of prepare.cu."""

    _fields_ = (
        ("weight", Weight), *fields(c_void_p, "taps taps_back weight_scale logsumexp exact_rows"),
        ("scale_log2", c_float),
    )  # fmt: skip


def prepare_launch(prepared: PrepareConstants, preparation: HopperPreparation, device: int) -> driver.Launch:
    """The launch of prepare.cu, for the backward if `preparation.grad_out` is set. Other addresses may follow later."""
    backward = preparation.grad_out.start is not None
    parts = 1 + 2 * NORM_PARTS if backward else 1
    heads = preparation.heads * (preparation.batch if backward else 1)
    return kernel(prepared, device).prepared((heads, parts), preparation)


_launches: dict[tuple, Any] = {}


class HopperLaunches:
    """The launches of a pass for calls that differ only in addresses: everything else is computed once."""

    _maps: Any  # the tensor maps among a subclass's arguments

    def __init__(self, described: Sequence[Tensor], scratch: Mapping[str, int], aligned: int) -> None:
        """For inputs like `described`. Parts of the scratch have these bytes and begin at multiples of `aligned`."""
        self._has_describable_strides = all(map(has_describable_strides, described))
        # A template for `new_empty`: torch.empty with a shape and a device takes the host twice as long.
        self._bytes = empty(0, dtype=torch.uint8, device=described[0].device)
        self._starts: dict[str, int] = {}  # of the parts
        self._end = 0
        for name, size in scratch.items():
            self._starts[name] = self._end
            self._end += -(-size // aligned) * aligned
        self._lock = threading.Lock()  # until the driver has read the arguments
        self._known_maps: dict[tuple[int, ...], list[TensorMap]] = {}  # by the addresses of what they describe
        self._described: tuple[int, ...] = ()
        self._placed = 0

    @classmethod
    def of(cls, operation: Operation, *tensors: Tensor, packed: bool = False) -> Self:
        """The launches for tensors like these, remembered; `packed` is whether there are spans."""
        key = cls, operation, packed, tensors[0].device, *((x.shape, x.stride(), x.dtype) for x in tensors)
        found = _launches.get(key)
        make: Any = cls  # a subclass takes the tensors of its pass
        return keep(_launches, key, make(operation, *tensors, packed=packed)) if found is None else found

    def _sequence(self, arguments: Sequence[Any], rows: Sequence[Sequence[Rows]], *launches: driver.Launch) -> None:
        """Keep the launches, their `arguments` whose fields are parts of the scratch, and the `rows` of each input."""
        self._launch, self._rows = driver.LaunchSequence(*launches), rows
        places = ((x, name, start) for x in arguments for name, start in self._starts.items())
        self._places = [place for place in places if hasattr(*place[:2])]

    def _addresses(self, *inputs: Tensor) -> tuple[int, ...] | None:
        """Where the inputs begin; None if the copy engine cannot describe them."""
        starts = tuple([x.data_ptr() for x in inputs])
        return starts if self._has_describable_strides and not functools.reduce(operator.or_, starts) % 16 else None

    def _bind(self, scratch: int, starts: tuple[int, ...], maps: Callable[[], list[TensorMap]]) -> None:
        """Set the addresses of the scratch, and of the inputs, which `maps` describes for the copy engine."""
        if self._placed != scratch:
            for structure, name, start in self._places:
                setattr(structure, name, scratch + start)
            self._placed = scratch
        if self._described != starts:
            self._maps[:] = self._known_maps.get(starts) or keep(self._known_maps, starts, maps())
            for rows, start in zip(self._rows, starts, strict=False):
                for of in rows:
                    of.start = start
            self._described = starts
