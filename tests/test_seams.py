"""Tests import what users import, and eight modules of the package that stay where they are: its seams.

A test that reaches for anything else has to follow each rename of it. What reaches further belongs into the modules
that tests share (tests/records.py, tests/models.py, …), which this does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PUBLIC = ("memsize", "memsize.cli", "memsize.hf", "memsize.lightning")
SEAMS = (
    "memsize.documents",
    "memsize.documents.sections",
    "memsize.errors",
    "memsize.records.answer",
    "memsize.records.trace",
    "memsize.render",
    "memsize.tracing.run",
    "memsize.units",
)
MOST = 4
"""How many other modules tests may import: lower it when it falls, never raise it."""


ROOT = Path(__file__).parent.parent


def _imports(path: Path) -> Iterator[str]:
    """The modules that a file imports. ``from memsize.x import y`` is one of `memsize.x.y` where that is a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if _is_module(name) else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_tests_reach_no_further_into_the_package_than_they_did() -> None:
    imported = {module for path in Path(__file__).parent.glob("test_*.py") for module in _imports(path)}
    internal = {module for module in imported if module.partition(".")[0] == "memsize"}
    others = sorted(internal - {*PUBLIC, *SEAMS})
    assert len(SEAMS) <= 8
    assert len(others) <= MOST, others
