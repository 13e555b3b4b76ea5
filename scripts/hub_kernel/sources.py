"""A source of `mta_kernels` as a kernel of the hub: relative imports, and operators in a namespace of its own.

The hub's loader imports a kernel under its identifier, several versions of it in one process. So nothing may import
`mta_kernels` by name, and no operator may be `torch.ops.mta`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

PACKAGE, NAMESPACE = "mta_kernels", "mta"

Edit = tuple[int, int, bytes, bytes]  # line, first byte in it, what is there, what will be


def as_hub_source(source: str, depth: int, identifier: str) -> str:
    """`source` with imports of the package made relative and its operators named `identifier::...`.

    `depth` is the number of folders between the package and the file. Raises ValueError for an import that has no
    relative form: `import mta_kernels.x`.
    """
    lines = source.encode().splitlines(keepends=True)  # of bytes, which end lines as ast does: not at a form feed
    edits = [edit for node in ast.walk(ast.parse(source)) for edit in _edits(node, depth, identifier)]
    for line, start, old, new in sorted(edits, reverse=True):
        text = lines[line - 1]
        if text[start : start + len(old)] != old:
            raise ValueError(f"line {line} has {text[start:].decode()!r}; expected it to start with {old.decode()!r}")
        lines[line - 1] = text[:start] + new + text[start + len(old) :]
    return b"".join(lines).decode()


def _edits(node: ast.AST, depth: int, identifier: str) -> Iterator[Edit]:
    """What changes at a node."""
    match node:
        case ast.Import(names=names) if any(_is_ours(name.name) for name in names):
            raise ValueError(f"line {node.lineno} imports {PACKAGE} by name; write 'from {PACKAGE}... import' instead")
        case ast.ImportFrom(module=str(module), level=0) if _is_ours(module):
            relative = "." * (depth + 1) + module.removeprefix(PACKAGE).removeprefix(".")
            yield node.lineno, node.col_offset, f"from {module} ".encode(), f"from {relative} ".encode()
        case ast.Constant(value=str(text)) if text.startswith(f"{NAMESPACE}::"):
            old = f'"{NAMESPACE}::'.encode()
            yield node.lineno, node.col_offset, old, f'"{identifier}::'.encode()
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="ops"), attr=attribute) if (
            attribute == NAMESPACE
        ):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = node.end_col_offset - len(NAMESPACE)
            yield node.end_lineno, start, NAMESPACE.encode(), identifier.encode()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE
