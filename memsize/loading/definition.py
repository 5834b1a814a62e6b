"""Where in its file a target is defined, from the file's text alone."""

from __future__ import annotations

import ast

from memsize.loading.target import Target


def line_of(target: Target) -> int:
    """The line of the class, function or variable that `target` names in its file; 1 where that cannot be told."""
    assert target.file is not None
    try:
        nodes: list[ast.stmt] = ast.parse(target.file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return 1
    found = 1
    for name in (target.name or "").split("."):
        node = next((each for each in nodes if name in _names(each)), None)
        if node is None:
            return found
        found, nodes = node.lineno, getattr(node, "body", [])
    return found


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for each in targets if isinstance(each, ast.Name)]
