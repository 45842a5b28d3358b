"""The part of a declaration file that says what is right, by its digest.

Records of measurements count as long as kernel and check are the same: a corrected reference makes all of
them void, while another knob value, rule or baseline leaves them alone.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from cutegen.digest import digest
from cutegen.errors import FamilyError

__all__ = ["checking_code"]

#: Decorators of functions that decide what is tried, launched or compared, not what is right.
_OTHER = frozenset({"rule", "derive", "integer", "workspace", "baseline", "flops", "bytes"})


@cache
def checking_code(path: Path) -> str:
    """Return a digest of the syntax tree of ``path``, less docstrings, the declaration, and other functions.

    Raises:
        FamilyError: The file cannot be read.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise FamilyError(f"{path} cannot be read: {error}") from error
    kept = [node for node in tree.body if not _is_other(node)]
    return digest("\n".join(ast.dump(node) for node in kept))


def _is_other(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return any(_last_name(decorator) in _OTHER for decorator in node.decorator_list)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return isinstance(node.value, ast.Call) and _last_name(node.value) in ("Kernel", "from_configs")
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
