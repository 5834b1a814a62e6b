"""A name says what the thing is, a docstring begins with a verb or a noun: offences may only become fewer."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import memsize

PACKAGE = Path(memsize.__file__).parent

WORDS = frozenset("found each given told held made kept asked known place say".split())
"""They say how a value was come by, and neither its type nor its role."""

FREE_RELATIVE = re.compile(r"(What|Those|That which|Which|Whether it|The one that|The ones that|How much|So many)\b")
"""How a docstring begins that has a clause where a noun belongs."""

# The most that each folder may have: lower a number when yours falls, never raise one. A folder not listed has none.
IDENTIFIERS = {
    "api": 2,
    "cli": 2,
    "records": 12,
}
DOCSTRINGS: dict[str, int] = {}


def _bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def _vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    yield from ((line, name) for name, line in set(_bound(tree)) if name.strip("_") in WORDS)


def _relative_clauses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if FREE_RELATIVE.match(text):
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def test_no_folder_has_more_vague_words_than_it_had() -> None:
    lines: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE), ast.parse(path.read_text("utf-8"))
        for kind, offences in (("names", _vague_names(tree)), ("docstrings", _relative_clauses(tree))):
            lines[kind, name.parts[0]] += [f"memsize/{name}:{line} {text}" for line, text in sorted(offences)]
    bounds = {"names": IDENTIFIERS, "docstrings": DOCSTRINGS}
    assert not {place: found for place, found in lines.items() if len(found) > bounds[place[0]].get(place[1], 0)}
