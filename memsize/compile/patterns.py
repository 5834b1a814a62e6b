"""Inductor's patterns, of which only those are tried whose functions all occur in a graph.

Most are of attention that is written out: a graph whose attention is an operator has no softmax, and can match none.

Source: torch/_inductor/pattern_matcher.py (`PatternMatcherPass.apply`, `_TargetExpr`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch._inductor import pattern_matcher
from torch.fx import Graph, GraphModule

from memsize.processes.patches import assigned


def applied_where_likely(original: Callable[..., int], matcher: Any, module: GraphModule | Graph) -> int:
    """Apply the patterns of `matcher` to a graph, without those that name a function that does not occur in it."""
    graph = module.graph if isinstance(module, GraphModule) else module
    targets = {pattern_matcher.extract_target(node) for node in graph.nodes}
    likely = defaultdict(list)
    for root, entries in matcher.patterns.items():
        if root[1] in targets:
            likely[root] = [e for e in entries if not any(of.isdisjoint(targets) for of in _functions(e.pattern))]
    with assigned(matcher, "patterns", likely):
        return original(matcher, module)


@cache
def _functions(pattern: Any) -> frozenset[frozenset[Any]]:
    """The functions that a pattern calls, each with those that may stand for it."""
    return frozenset(_called(pattern))


def _called(pattern: Any) -> Iterator[frozenset[Any]]:
    if isinstance(pattern, pattern_matcher._TargetExpr):
        yield frozenset(pattern.fns)
    if isinstance(pattern, pattern_matcher._TargetArgsExpr):
        inner = pattern.flat_args_kwargs[0]
    elif isinstance(pattern, pattern_matcher.MultiOutputPattern):
        inner = pattern.outputs
    elif isinstance(pattern, pattern_matcher.ListOf):
        inner = (pattern.pattern,)
    elif isinstance(pattern, pattern_matcher.RepeatedExpr):
        inner = (pattern.inner_pattern,)
    else:
        inner = ()
    for part in inner:
        yield from _called(part)
