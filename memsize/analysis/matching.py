"""Match the layers of two models: layers that stayed, were renamed, moved or changed.

The trees of modules are gone through from the top. The children of two modules that are the same are paired by the
first of these that holds, each time in the order of the models:

1. the same name, type and shapes of everything stored inside
2. the same type and shapes: renamed
3. the same name and type: something inside changed
4. the same name, unless that is a place in a list
5. the same type and about as many elements: renamed and resized, the most alike first
6. the same name

What is left was removed or added, unless a part of it that stores something stands elsewhere with the same type and
shapes: that was moved. A dtype is no part of this, so that a model and its converted copy are the same layer by layer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

from memsize.records.trace import Layer, StoredTensor, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A layer with the tensors that are its own, the layers below it, and its place in the model.

    `alike` is equal for nodes of the same type and shapes, with everything below them. `elements` is what these store.
    """

    layer: Layer
    tensors: tuple[StoredTensor, ...]
    children: tuple[Node, ...]
    position: int
    alike: int
    elements: int

    @property
    def name(self) -> str:
        """The last step of its path."""
        return self.layer.path.rpartition(".")[2]

    def walk(self) -> Iterator[Node]:
        """The node and all below it, in the order of the model."""
        yield self
        for child in self.children:
            yield from child.walk()


class Pair(NamedTuple):
    """One layer in both models; None where it is only in the other."""

    before: Node | None
    after: Node | None


Key = Callable[[Node], Hashable | None]
"""What two nodes must have in common; None is nothing."""

_SURE: Sequence[Key] = (
    lambda node: (node.name, node.alike),
    lambda node: node.alike,
    lambda node: (node.name, node.layer.type),
    lambda node: None if node.name.isdecimal() else node.name,
)
_SIMILAR: Final = 0.5
"""The least part of the larger layer's elements that the smaller has, where they are taken for one that was resized."""


@dataclass(slots=True)
class _Pairs:
    of: dict[Node, Node] = field(default_factory=dict)

    def descend(self, olds: Sequence[Node], news: Sequence[Node]) -> None:
        rest, free = list(olds), list(news)
        for key in _SURE:
            rest, free = self._by(key, rest, free)
        pairs = []
        for old, new in product(rest, free):
            if old.layer.type == new.layer.type:
                less, most = sorted((old.elements, new.elements))
                pairs.append((less / most if most else 1.0, old, new))
        taken: set[Node] = set()
        for similarity, old, new in sorted(pairs, key=lambda pair: -pair[0]):
            if similarity >= _SIMILAR and taken.isdisjoint((old, new)):
                taken |= {old, new}
                self.of[old] = new
                self.descend(old.children, new.children)
        rest, free = [node for node in rest if node not in taken], [node for node in free if node not in taken]
        self._by(lambda node: node.name, rest, free)

    def _by(self, key: Key, olds: list[Node], news: list[Node]) -> tuple[list[Node], list[Node]]:
        waiting: dict[Hashable, deque[Node]] = defaultdict(deque)
        for node in news:
            waiting[key(node)].append(node)
        rest, taken = [], set()
        for node in olds:
            value = key(node)
            if value is None or not waiting[value]:
                rest.append(node)
                continue
            other = waiting[value].popleft()
            taken.add(other)
            self.of[node] = other
            self.descend(node.children, other.children)
        return rest, [node for node in news if node not in taken]

    def move(self, olds: Iterable[Node], news: Iterable[Node]) -> None:
        """Pair what is left of both models where it stores the same, the largest parts first."""
        taken = set(self.of.values())
        waiting: dict[int, deque[Node]] = defaultdict(deque)
        for node in news:
            if node.elements and node not in taken:
                waiting[node.alike].append(node)
        for node in olds:
            if node in self.of or not node.elements:
                continue
            while waiting[node.alike]:
                other = waiting[node.alike].popleft()
                if taken.isdisjoint(other.walk()) and self.of.keys().isdisjoint(node.walk()):
                    both = tuple(zip(node.walk(), other.walk(), strict=True))
                    self.of.update(both)
                    taken.update(node for _, node in both)
                    break


def matched(before: Trace, after: Trace) -> tuple[Pair, ...]:
    """Every layer of both models once, in the order of the second; those that it lacks follow what they followed."""
    kinds: dict[Hashable, int] = {}
    typed = all(layer.type for trace in (before, after) for layer in trace.layers)  # a file's layers have no types
    olds, news = _forest(before, kinds, typed), _forest(after, kinds, typed)
    pairs = _Pairs()
    pairs.descend(olds, news)
    first, second = ([node for root in forest for node in root.walk()] for forest in (olds, news))
    pairs.move(first, second)
    back = {new: old for old, new in pairs.of.items()}
    removed: dict[Node | None, list[Node]] = defaultdict(list)
    last: Node | None = None
    for node in first:
        if node in pairs.of:
            last = pairs.of[node]
        else:
            removed[last].append(node)
    order = [Pair(node, None) for node in removed[None]]
    for node in second:
        order += [Pair(back.get(node), node), *(Pair(gone, None) for gone in removed[node])]
    return tuple(order)


def _forest(trace: Trace, kinds: dict[Hashable, int], typed: bool) -> tuple[Node, ...]:
    """The root modules of a trace with all that is below them. `kinds` numbers what is alike."""
    below: dict[str, list[int]] = defaultdict(list)
    paths = {layer.path for layer in trace.layers}
    tops: list[int] = []
    for position, layer in enumerate(trace.layers):
        parent = layer.path.rpartition(".")[0]
        while parent and parent not in paths:
            parent = parent.rpartition(".")[0]
        (below[parent] if layer.path and parent in paths else tops).append(position)
    tensors_of: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in trace.tensors:
        tensors_of[tensor.layer].append(tensor)

    def node(position: int) -> Node:
        layer = trace.layers[position]
        tensors, children = tuple(tensors_of[layer.path]), tuple(map(node, below[layer.path]))
        own = tuple(sorted((local_name(tensor), tensor.spec.shape) for tensor in tensors))
        kind = layer.type if typed else "", own, tuple((child.name, child.alike) for child in children)
        elements = sum(tensor.elements for tensor in tensors) + sum(child.elements for child in children)
        return Node(layer, tensors, children, position, kinds.setdefault(kind, len(kinds)), elements)

    return tuple(map(node, tops))


def local_name(tensor: StoredTensor) -> str:
    return tensor.name.removeprefix(f"{tensor.layer}.")
