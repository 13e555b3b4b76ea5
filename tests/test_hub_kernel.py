"""scripts/build_hub_kernel.py: Hugging Face's `kernels` loads what it builds, which computes what mta_kernels does."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import build_hub_kernel
import pytest
import torch
import torch.nn.functional as F
from hub_kernel import layout, sources

pytest.importorskip("kernels._rust", reason="the package kernels of Hugging Face")
from kernels._rust import Digest, DigestAlgorithm
from torch import Tensor, nn

import kernels
from mta_kernels.multi_token_attention import MultiTokenAttention, multi_token_attention_reference

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "mta-kernels"
    layout.build(out)
    return out


@pytest.fixture(scope="module")
def loaded(built) -> ModuleType:
    return kernels.get_local_kernel(built, backend="cpu")


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_metadata_and_digests_are_those_that_the_hub_asks_for(built, kind):
    variant = built / f"build/torch-{kind}"
    metadata = kernels.Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.license, metadata.python_depends) == ("mta-kernels", "mit", [])
    assert metadata.id.isidentifier()
    assert str(metadata.backend.backend_type).lower() == kind
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert (built / "README.md").read_text().startswith("---\nlicense: mit\n")
    kernel = "conv_attention/hopper/forward.cu"
    for copied, original in (("LICENSE", ROOT / "LICENSE"), (kernel, ROOT / "kernels/mta_kernels" / kernel)):
        assert (variant / copied).read_bytes() == original.read_bytes()


def test_nothing_imports_the_package_or_registers_operators_by_its_name(built):
    files = sorted(built.rglob("*.py"))
    assert len(files) > 150
    for path in files:
        found = re.findall(r'^ *(?:from|import) mta_kernels.*|"mta::|torch\.ops\.mta\b', path.read_text(), re.MULTILINE)
        assert found == [], path


def test_headers_that_sources_include_are_there(built):
    build = built / "build/torch-cuda"
    sources = [path for path in build.rglob("*.cu*") if path.suffix in (".cu", ".cuh")]
    names = {path.name for path in sources} | {"cstdint", "wgmma.cuh"}  # of NVRTC, and written by a kernel's plan
    included = {name for path in sources for name in re.findall(r'#include ["<](.+)[">]', path.read_text())}
    assert {"mma.cuh", "elements.cuh", "common.cuh"} < included
    assert included - names == set()


def test_every_module_can_be_imported(loaded):
    folder = Path(str(loaded.__file__)).parent
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[-1] != "__init__":
            importlib.import_module(".".join((loaded.__name__, *parts)))


def test_its_operators_are_its_own(loaded):
    assert loaded.conv_attention.__module__.startswith(loaded.__name__ + ".")
    own = getattr(torch.ops, loaded.__name__)
    assert own.conv_attention.default.name() == f"{loaded.__name__}::conv_attention"
    inputs = tensors(4)
    dropped = [f(*inputs, dropout=0.5, seed=3) for f in (loaded.multi_token_attention, multi_token_attention_reference)]
    torch.testing.assert_close(*dropped)


def test_its_triton_kernels_run_in_the_interpreter(loaded):
    q, k, v = (x.float().requires_grad_() for x in tensors(2, 16))
    weight = torch.randn(2, 3, 5, generator=torch.manual_seed(2), requires_grad=True)
    results = []
    for backend in ("triton", "reference"):
        out = loaded.conv_attention(q, k, v, weight, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v, weight])])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_the_old_place_gives_the_same_names(loaded):
    place = Path(str(loaded.__file__)).parent / "mta_kernels/__init__.py"
    spec = importlib.util.spec_from_file_location("old_place_of_the_kernel", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__all__ == loaded.__all__
    assert module.conv_attention is loaded.conv_attention


def tensors(heads: int, head_dim: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    return [torch.randn(2, heads, 9, head_dim, dtype=torch.float64, generator=generator) for _ in range(3)]


def examples(built: Path) -> list[str]:
    """The Python code of docs/hub.md, for the folder of this test and a CPU."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/hub.md").read_text(), re.DOTALL)
    for there, here in (("dist/mta-kernels", str(built)), ('"cuda"', '"cpu"'), ("1024", "32")):
        blocks = [block.replace(there, here) for block in blocks]
    return blocks


@kernels.use_kernel_forward_from_hub("MultiTokenAttention")
class EagerMixed(MultiTokenAttention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        return multi_token_attention_reference(q, k, v, **self.mixers(), depth=self.depth)


def results(module: nn.Module) -> list[Tensor]:
    """A module's output and the gradients of its parameters."""
    out = module(*tensors(4))
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


def kernelized(module: nn.Module, name: str, built: Path, loaded: ModuleType) -> None:
    """Put a layer of the kernel into a module, in training and without a way round it."""
    repository: Any = kernels.LocalLayerRepository(built, layer_name=name)
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({name: {"cpu": repository}}):
        kernels.kernelize(module, mode=mode, device="cpu", use_fallback=False)
    assert module.forward.__func__ is getattr(loaded.layers, name).forward


def test_the_page_loads_the_kernel_and_runs_it(built, capsys):
    names: dict[str, Any] = {}
    exec(examples(built)[0], names)
    plain = F.scaled_dot_product_attention(names["q"], names["k"], names["v"], is_causal=True)
    torch.testing.assert_close(names["out"], plain, atol=0.02, rtol=0.02)
    assert "reference" in capsys.readouterr().out


def test_a_layer_does_what_the_eager_module_of_the_page_did(built, loaded):
    names: dict[str, Any] = {}
    exec(examples(built)[1], names)
    module = names["MyAttention"](4, 3, 4).double()
    before = results(module)
    kernelized(module, "ConvAttention", built, loaded)
    torch.testing.assert_close(results(module), before)


def test_a_layer_does_what_the_reference_did(built, loaded):
    torch.manual_seed(1)
    module = EagerMixed(4, 6, pre_conv=(3, 5), post_conv=(2, 3), post_mix=2, depth=3, dtype=torch.float64)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    before = results(module)
    kernelized(module, "MultiTokenAttention", built, loaded)
    torch.testing.assert_close(results(module), before)


SOURCE = '''"""`mta::x` é of `from mta_kernels import y`."""
from mta_kernels import operation
\f
def f():
    from mta_kernels.nvrtc.driver import (
        launch,
    )
    é = "é"; torch.library.define("mta::x", "() -> ()"); return torch.ops.mta.x.default, "a mta::x", mta_kernels_x
'''
CHANGES = {
    "\nfrom mta_kernels import": "\nfrom ... import", "from mta_kernels.nvrtc": "from ...nvrtc",
    'define("mta::': 'define("_id::', "ops.mta.": "ops._id.",
}  # fmt: skip


def test_imports_and_operators_change_and_no_more():
    expected = SOURCE
    for ours, theirs in CHANGES.items():
        assert SOURCE.count(ours) == 1
        expected = expected.replace(ours, theirs)
    assert sources.as_hub_source(SOURCE, 2, "_id") == expected
    assert sources.as_hub_source("from mta_kernels.a import b\n", 0, "_id") == "from .a import b\n"
    assert sources.as_hub_source("from mta_kernels_other import b\n", 0, "_id") == "from mta_kernels_other import b\n"


@pytest.mark.parametrize("source", ["import mta_kernels", "import mta_kernels.nvrtc as n", "x = 'mta::y'"])
def test_a_source_without_a_form_for_the_hub_is_refused(source):
    with pytest.raises(ValueError, match=r"^line 1 "):
        sources.as_hub_source(source, 0, "_id")


def test_other_sources_have_another_identifier():
    sources = dict(layout.kernel_sources())
    first = layout.identifier_of("cpu", sources)
    assert layout.identifier_of("cpu", sources) == first
    assert layout.identifier_of("cpu", sources | {"operation.py": b"x = 1\n"}) != first


def test_the_command_builds_and_replaces_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["build_hub_kernel.py", "--out", str(tmp_path / "out")])
    assert build_hub_kernel.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / f"out/build/torch-{kind}") for kind in ("cuda", "cpu")
    ]
    with pytest.raises(SystemExit) as ended:
        build_hub_kernel.main()
    assert ended.value.code == 2
    assert f"{tmp_path / 'out'} already exists; give another --out" in capsys.readouterr().err
