"""The families of kernels that are fuzzed, and a hash of the sources of each."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels/mta_kernels"
FOLDERS = {"conv-attention": ("conv_attention",), "mta": ("conv_attention", "multi_token_attention")}
IN_ALL = "backend.py"  # which names the kernels of all passes, be it in a folder of one
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def family(op: str, pass_: str) -> str:
    """The name of the family of an operation's pass: "mta", "mta decode" and so on."""
    return f"{op} decode" if pass_ == "decode" else op


@functools.cache
def source_hashes(kernels: Path = KERNELS) -> dict[str, str]:
    """Of each family twelve hexadecimal digits, which change with its sources, but for comments and blank space."""
    code = {
        file.relative_to(kernels).as_posix(): _code(file)
        for file in sorted(kernels.rglob("*"))
        if file.suffix in (".py", ".cu", ".cuh")
    }
    found = {}
    for op, folders in FOLDERS.items():
        for pass_, left_out in (("bwd", "decode"), ("decode", "backward")):
            digest = hashlib.sha256()
            for name, text in code.items():
                folder, _, rest = name.partition("/")
                is_in = not rest or folder in (*folders, "nvrtc")
                if is_in and (left_out not in name or name.endswith(IN_ALL)):
                    digest.update(f"{name}\0{text}\0".encode())
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
    return _dump(tree)


def _dump(node: object) -> str:
    """As `ast.dump`, whose text is another in each version of Python."""
    if isinstance(node, ast.AST):
        found = [(name, x) for name, x in ast.iter_fields(node) if x is not None and x != []]
        return f"{type(node).__name__}({', '.join(f'{name}={_dump(x)}' for name, x in found)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)
