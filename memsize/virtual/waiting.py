"""Loops that wait for a number which only a GPU computes: ``while loss.item() > 0.1`` would never end here.

A line that reads such a number again and again, inside a ``while``, is taken for one. A ``for`` ends by itself.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Final

from memsize.processes.user_code import line_of, parsed

MOST_READS: Final = 1000
"""How often a line inside a ``while`` may read a number that is assumed."""
_Line = tuple[str, int]


class Waits:
    """Counts what each line of the program reads; `line` is the one that waits for a number, once it is known."""

    def __init__(self) -> None:
        self.line: str | None = None
        self._reads: Counter[_Line] = Counter()

    def seen(self, place: _Line) -> bool:
        """Count that the program's line at `place` has read a number; whether it waits for one."""
        self._reads[place] += 1
        if self._reads[place] == MOST_READS and _in_while(*place):
            self.line = line_of(*place)
        return self.line is not None


def _in_while(file: str, line: int) -> bool:
    """Whether the innermost loop around `line` is a ``while``."""
    tree = parsed(file)
    loops = [
        node
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, (ast.While, ast.For, ast.AsyncFor)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return isinstance(max(loops, key=lambda node: node.lineno, default=None), ast.While)
