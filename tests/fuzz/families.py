"""The families of kernels that are fuzzed, and a hash of the sources of each."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels/mta_kernels"
FOLDERS = {"conv-attention": ("conv_attention",), "mta": ("conv_attention", "multi_token_attention")}
SHARED = ("nvrtc", "*.py")  # in every family
# What no case of any family runs, or none of a decode, or of all rows.
NEVER, NOT_IN_DECODE, NOT_IN_ALL_ROWS = "context_parallel", "backward", "decode"
IN_ALL = "backend.py"  # which names the kernels of all passes
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def family(op: str, pass_: str) -> str:
    """The name of the family of an operation's pass: "mta", "mta decode" and so on."""
    return f"{op} decode" if pass_ == "decode" else op


@functools.cache
def source_hashes(kernels: Path = KERNELS) -> dict[str, str]:
    """Of each family twelve hexadecimal digits, which change with its sources, but for comments and blank space."""
    found = {}
    for op, folders in FOLDERS.items():
        for pass_ in ("bwd", "decode"):
            left_out = NOT_IN_DECODE if pass_ == "decode" else NOT_IN_ALL_ROWS
            paths = {path for name in (*folders, *SHARED) for path in kernels.glob(name)}
            files = {file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])}
            digest = hashlib.sha256()
            for file in sorted(files):
                name = file.relative_to(kernels).as_posix()
                is_of_it = NEVER not in name and (left_out not in name or file.name in IN_ALL)
                if file.suffix in (".py", ".cu", ".cuh") and is_of_it:
                    digest.update(f"{name}\0{_code(file)}\0".encode())
            found[family(op, pass_)] = digest.hexdigest()[:12]
    return found


def _code(file: Path) -> str:
    """What a compiler reads of a file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return " ".join(COMMENT.sub("", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return ast.dump(tree)
