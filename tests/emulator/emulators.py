"""Fixtures in which kernels of multi-token attention, decode steps and the ladder run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_hopper import encode, tensor_map
from emulated_kernels import Emulator, launch_code

from mta_kernels.conv_attention.cuda_decode import backend, decode, hopper_plan, plan
from mta_kernels.conv_attention.hopper.source import FOLDER as HOPPER
from mta_kernels.multi_token_attention.decode_cuda import step
from mta_kernels.multi_token_attention.heads_cuda import heads
from mta_kernels.multi_token_attention.mix_cuda import logits, values
from mta_kernels.multi_token_attention.rows_cuda import rows
from mta_kernels.nvrtc.compiler import Source
from mta_ladder import cuda_conv, cuda_flash, cuda_unfused

H200 = 232448  # bytes of shared memory that a block may have
ONE_OR_TWO_CLUSTERS = "CLUSTER < 8 ? 2 * CLUSTER : CLUSTER"  # that run at once, in blocks
TENSOR_MAPS = ("TensorMap", "TensorMap")
MATRIX_KERNELS: dict[str, dict] = {name: {} for name in ("scores", "softmax_rows", "weighted_sum")}
# By the folder and the name of a source its kernels, each with options of `launch_code`.
KERNELS: dict[str, dict[str, dict[str, Any]]] = {
    "bands_cuda/convolve": {"convolve_rows": {}},
    "bands_cuda/gradients": {"convolution_gradients": {}},
    **{f"heads_cuda/{source}": {kernel: {}} for source, kernel in heads.KERNELS.items()},
    "rows_cuda/forward": {"mix_rows": {"at_once": ONE_OR_TWO_CLUSTERS}},
    "rows_cuda/backward": {"mix_rows_backward": {"at_once": ONE_OR_TWO_CLUSTERS}},
    "mix_cuda/logits": {
        "mix_logits": {"at_once": ONE_OR_TWO_CLUSTERS, "before": TENSOR_MAPS}, "finish_logits": {},
    },
    "mix_cuda/values": {"mix_values": {"at_once": ONE_OR_TWO_CLUSTERS, "before": TENSOR_MAPS}},
    **{f"decode_cuda/{name}": {f"mta_decode_{name}": {}} for name in ("keys", "values", "merge")},
    **{f"cuda_decode/{name}": {"cuda_decode": {}} for name in ("few_heads", "many_heads")},
    "cuda_decode/hopper_heads": {"cuda_decode": {"before": ("of_hopper_heads::Maps",)}},
    "cuda_decode/merge": {"cuda_decode_merge": {}},
    "mta_ladder/cuda_naive": MATRIX_KERNELS,
    "mta_ladder/cuda_tiled": MATRIX_KERNELS,
    "mta_ladder/cuda_flash": {"cuda_flash": {}},
    "cuda_conv/forward": {"conv_attention_forward": {}},
    "cuda_conv/backward_q": {"conv_attention_backward_q": {}},
    "cuda_conv/backward_kv": {"conv_attention_backward_kv": {}},
    "cuda_conv/decode": {"conv_attention_decode_split": {}, "conv_attention_decode_combine": {}},
}  # fmt: skip
KERNELS["heads_cuda/pre"]["merge_pieces"] = {}


class KernelsEmulator(Emulator):
    """Has the kernels of sources in a folder; `fields` may be changed in a test, as the seed may."""

    def __init__(self, folder: str, *headers: Path, **fields: Any) -> None:
        super().__init__()
        self._folder, self.folders = folder, headers
        self.__dict__ |= fields

    def runs(self, wanted: Source) -> bool:
        return wanted.path.parent.name == self._folder

    def program(self, wanted: Source) -> str:
        """Of a shape of the published approach all kernels: one library for the four sources."""
        is_whole = self._folder == "cuda_conv"
        stems = [name.partition("/")[2] for name in KERNELS if name.startswith("cuda_conv/")]
        code = "#include <tiles.cuh>\n" if is_whole else "#include <device.cuh>\n"
        for stem in stems if is_whole else [wanted.path.stem]:
            space = f"of_{stem}"
            before = "#include <mma.cuh>\n" if self._folder == "mta_ladder" else ""
            code += f"namespace {space} {{\n{before}#include <{stem}.cu>\n}}\n"
            kernels = KERNELS[f"{self._folder}/{stem}"]
            code += "".join(launch_code(space, name, **options) for name, options in kernels.items())
        return code


Patch = pytest.MonkeyPatch


@pytest.fixture
def emulated_bands(monkeypatch: Patch) -> Emulator:
    """`convolve` and `BandsGradient` take CPU tensors in this test."""
    return KernelsEmulator("bands_cuda").take_over(monkeypatch)


@pytest.fixture
def emulated_heads(monkeypatch: Patch) -> Emulator:
    """`HeadMixings`, `pre_heads` and `post_heads` take CPU tensors in this test."""
    monkeypatch.setattr(heads, "sm_count", lambda device: 3)  # persistent blocks with several tasks each
    return KernelsEmulator("heads_cuda", heads.bands.FOLDER).take_over(monkeypatch)


@pytest.fixture
def emulated_rows(monkeypatch: Patch) -> Emulator:
    """The row kernels run on CPU tensors in this test; fields are the GPU's limits and clusters at once."""
    found = KernelsEmulator("rows_cuda", capability=(9, 0), shared_memory=H200, clusters=3)

    def kernel(constants: rows.RowConstants, device: torch.device) -> Any:
        name = "mix_rows_backward" if constants.backward else "mix_rows"
        return found.load(found.machine_code(constants.source("sm_90a")), name, 0, device)

    monkeypatch.setattr(rows, "kernel", kernel)
    monkeypatch.setattr(rows, "capability", lambda device: found.capability)
    monkeypatch.setattr(rows, "shared_memory_limit", lambda device: found.shared_memory)
    monkeypatch.setattr(rows, "choose_plan", rows.choose_plan.__wrapped__)
    monkeypatch.setattr(rows, "clusters_at_once", lambda plan, device: found.clusters)
    return found.take_over(monkeypatch)


@pytest.fixture
def emulated_mix(monkeypatch: Patch) -> Emulator:
    """`keep_logits` and `mix_values` take CPU tensors in this test; a field are multiprocessors."""
    found = KernelsEmulator("mix_cuda", rows.FOLDER, HOPPER, multiprocessors=3)
    for module in (logits, values):
        monkeypatch.setattr(module, "_launches", {})
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(
        logits, "clusters_at_once", lambda constants, device: max(1, found.multiprocessors // constants.cluster)
    )
    return found.take_over(monkeypatch)


@pytest.fixture
def emulated_mta_decode(monkeypatch: Patch) -> Iterator[Emulator]:
    """Decode steps that the CUDA kernels take run on CPU tensors in this test; a field are multiprocessors."""
    found = KernelsEmulator("decode_cuda", plan.FOLDER, multiprocessors=5)
    monkeypatch.setattr(step, "unsupported", step.shape_unsupported)
    monkeypatch.setattr(step, "sm_count", lambda device: found.multiprocessors)
    step._kernels.cache_clear()
    yield found.take_over(monkeypatch)
    assert found.launched
    assert found.launched % 3 == 0


@pytest.fixture
def emulated_decode(monkeypatch: Patch) -> Iterator[Emulator]:
    """`backend="cuda"` decodes on CPU tensors in this test, whose programs leave the counts of arrivals at zero.

    Fields are multiprocessors, shared memory, and whether it is a Hopper GPU.
    """
    found = KernelsEmulator("cuda_decode", multiprocessors=5, shared_memory=H200, hopper=False)
    counts = torch.zeros(256, dtype=torch.int32)
    for module in (plan, hopper_plan):
        monkeypatch.setattr(module, "shared_memory_limit", lambda device: found.shared_memory)
        monkeypatch.setattr(module, "sm_count", lambda device: found.multiprocessors)
    monkeypatch.setattr(hopper_plan, "capability", lambda device: (9, 0) if found.hopper else (8, 0))
    monkeypatch.setattr(hopper_plan, "encode", encode)
    monkeypatch.setattr(hopper_plan, "_maps", {})
    monkeypatch.setattr(decode, "choose_plan", plan.choose_plan.__wrapped__)
    monkeypatch.setattr(decode, "choose_hopper_plan", hopper_plan.choose_hopper_plan.__wrapped__)
    monkeypatch.setattr(decode, "arrivals", lambda count, device: counts)
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    yield found.take_over(monkeypatch)
    assert (counts == 0).all()


@pytest.fixture
def emulated_attention(monkeypatch: Patch) -> Emulator:
    """The CUDA rungs run on CPU tensors in this test, for `attention` too."""
    for module in (cuda_flash, cuda_unfused):
        for name in ("device_unsupported", "missing_package"):
            monkeypatch.setattr(module, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return KernelsEmulator("mta_ladder").take_over(monkeypatch)


@pytest.fixture
def emulated_cuda(monkeypatch: Patch) -> Emulator:
    """`cuda_conv` runs on CPU tensors in this test."""
    monkeypatch.setattr(cuda_conv.shape, "device_unsupported", lambda device: None)
    monkeypatch.setattr(cuda_conv.shape, "missing_package", lambda *_: None)
    monkeypatch.setattr(cuda_conv.decode, "choose_splits", lambda *_: 3)
    return KernelsEmulator("cuda_conv").take_over(monkeypatch)
