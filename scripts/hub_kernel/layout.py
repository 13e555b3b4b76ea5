"""The folder that the hub serves: a build for each kind of device, with its metadata and the digests of its files."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from hub_kernel.sources import PACKAGE, as_hub_source

from mtabench import __version__

ROOT = Path(__file__).parents[2]
OURS = Path(__file__).parent
NAME = PACKAGE.replace("_", "-")  # which the hub's rules ask for
VARIANTS = ("cuda", "cpu")  # of builds in Python alone; CUDA sources are compiled where they run
LEFT_OUT = {"attention", "integrations", "common_kernels.py", "__init__.py"}  # of the package
LEFT_OUT_SUFFIXES = {".md", ".pyc", ".cubin"}
ADDED = {
    "__init__.py": OURS / "exports.py",
    "layers.py": OURS / "layers.py",
    f"{PACKAGE}/__init__.py": OURS / "old_place.py",
    "LICENSE": ROOT / "LICENSE",  # the hub hands out a build by itself
}


def build(out: Path) -> list[Path]:
    """Write the folder and return its builds. Raises ValueError for a source that cannot be one of a kernel."""
    sources = dict(kernel_sources())
    made = [_build_variant(out / "build" / f"torch-{kind}", kind, sources) for kind in VARIANTS]
    shutil.copyfile(OURS / "card.md", out / "README.md")
    return made


def kernel_sources() -> Iterator[tuple[str, bytes]]:
    """Place in a build and content of each file, in order, as it is in this repository."""
    package = ROOT / "kernels" / PACKAGE
    for path in sorted(package.rglob("*")):
        place = path.relative_to(package)
        if path.is_file() and place.parts[0] not in LEFT_OUT and path.suffix not in LEFT_OUT_SUFFIXES:
            yield place.as_posix(), path.read_bytes()
    for name, path in ADDED.items():
        yield name, path.read_bytes()


def identifier_of(kind: str, sources: dict[str, bytes]) -> str:
    """The name that a build is imported under and registers its operators in: another for other sources."""
    content = hashlib.sha256()
    for place, data in sources.items():
        content.update(f"{place}\0{len(data)}\0".encode() + data)
    return f"_{PACKAGE}_{kind}_{content.hexdigest()[:10]}"


def _build_variant(folder: Path, kind: str, sources: dict[str, bytes]) -> Path:
    """Write a build, in the layout of a variant of the `kernels` package."""
    identifier = identifier_of(kind, sources)
    files = {}
    for place, data in sources.items():
        if place.endswith(".py"):
            try:
                data = as_hub_source(data.decode(), place.count("/"), identifier).encode()
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files[place] = base64.b64encode(hashlib.sha256(data).digest()).decode()
    metadata = {
        "name": NAME,
        "id": identifier,
        "version": int(__version__.partition(".")[0]),
        "license": "mit",
        "python-depends": [],
        "backend": {"type": kind},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder
