"""Causes of memory growth in a program's own code: variables that keep them alive, and loops that wait for a number.

Variables are those of the user's own functions that are running, and of their script. The contents of objects, lists
and dicts are searched too, and whole graphs that hang from a tensor: growing memory often comes from ``total += loss``.
A replay buffer, a list of tuples or of objects, holds what is in all of them.

A loop such as ``while loss.item() > 0.1`` would never end, since the number is never computed. A line inside a
``while`` that reads such a number again and again is taken for one; a ``for`` ends by itself.
"""

from __future__ import annotations

import ast
import inspect
from argparse import ArgumentParser
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from memsize.processes.patches import assigned, calling
from memsize.processes.user_code import line_of, parsed, users_frames, variables
from memsize.records.program import Holder
from memsize.torch_internals.meta import is_meta

_MOST: Final = 20_000
"""How many objects are looked at."""
_ITEMS: Final = 5_000
"""How many of a long list's items, the last ones: what grows is appended."""
_ADDS: Final = ("append", "appendleft", "add", "extend", "insert", "update", "setdefault")
_COLLECTIONS: Final = (list, tuple, set, frozenset, deque, dict)
_PLAIN: Final = (str, bytes, int, float, complex, type(None))
_CODE: Final = (ModuleType, type, FunctionType, Optimizer, *_PLAIN)
"""What holds no results of the program, or has a reason to."""


class Held(NamedTuple):
    """A variable, and the indexes of the storages that it keeps alive."""

    holder: Holder
    storages: frozenset[int]


class _Place(NamedTuple):
    """A value by the name that the program has for it, and the lines among which its name means that."""

    name: str
    value: Any
    file: str
    first: int
    last: int


IndexOf = Callable[[torch.Tensor], int]


def holders(index_of: IndexOf) -> tuple[Held, ...]:
    """The variables that hold tensors, as the running code sees them; `index_of` gives the index of a storage."""
    saved_by_node: dict[Any, set[int]] = {}
    variables_of_tensors: list[Held] = []
    places: list[_Place] = []
    for frame in users_frames():
        code = frame.f_code
        last = max((line for _, _, line in code.co_lines() if line), default=0)
        lines = code.co_filename, code.co_firstlineno, last
        places += (_Place(name, value, *lines) for name, value in variables(frame))
    for variable, tensors in _holding(places):
        storages = frozenset().union(*(_storages(tensor, index_of, saved_by_node) for tensor in tensors))
        with_graphs = any(tensor.grad_fn is not None for tensor in tensors)
        holder = Holder(variable.name, _grown_at(variable), len(tensors), with_graphs)
        variables_of_tensors.append(Held(holder, storages))
    return tuple(variables_of_tensors)


def _holding(places: Iterable[_Place]) -> Iterator[tuple[_Place, list[torch.Tensor]]]:
    """The places that hold tensors on the GPU, or graphs of some, with those in them and in their collections."""
    seen: set[int] = set()
    todo = deque(places)
    while todo and len(seen) < _MOST:
        variable = todo.popleft()
        value = variable.value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                yield variable, [value]
        elif isinstance(value, _COLLECTIONS):
            tensors, objects = _contents(value)
            if tensors:
                yield variable, tensors
            todo.extend(variable._replace(value=item) for item in objects)
        else:
            source = _source(cast(Any, type(value)))
            todo.extend(_Place(f"{variable.name}.{name}", item, *source) for name, item in _own(value))


def _contents(collection: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors in a collection, in those inside it and in the attributes of its items, and all other items."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    todo, met = deque([collection]), {id(collection)}
    while todo and len(met) < _MOST:
        inner = todo.popleft()
        items = list(inner.values() if isinstance(inner, dict) else inner)[-_ITEMS:]
        for item in items:
            if isinstance(item, _PLAIN) or id(item) in met:
                continue
            met.add(id(item))
            if isinstance(item, torch.Tensor):
                tensors.append(item)
            elif isinstance(item, _COLLECTIONS):
                todo.append(item)
            else:
                others.append(item)
                tensors += (value for _, value in _own(item) if isinstance(value, torch.Tensor))
    return [tensor for tensor in tensors if is_meta(tensor) or tensor.grad_fn is not None], others


def _own(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object of the program's own, by name."""
    if isinstance(value, _CODE):
        return []
    slots = getattr(type(value), "__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    stored = ("_parameters", "_buffers") if isinstance(value, nn.Module) else ()
    return [(name, item) for name, item in list(own.items()) if name not in stored]


@cache
def _source(kind: Any) -> tuple[str, int, int]:
    with suppress(OSError, TypeError):
        lines, first = inspect.getsourcelines(kind)
        return inspect.getfile(kind), first, first + len(lines)
    return "", 0, 0


def _storages(tensor: torch.Tensor, index_of: IndexOf, saved_by_node: dict[Any, set[int]]) -> set[int]:
    """Return the storages that `tensor` keeps alive: its own, and those that its graph has saved for backward."""
    storages = {index_of(tensor)}
    todo, met = [tensor.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if node not in saved_by_node:
            saved_by_node[node] = {index_of(saved) for saved in _saved(node)}
        storages |= saved_by_node[node]
        todo.extend(following for following, _ in node.next_functions)
    return storages - {-1}


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that `node` has saved; none once a backward has let them go."""
    kind: Any = type(node)
    for name in _saved_names(kind):
        with suppress(RuntimeError):
            value = getattr(node, name)
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


# -- the line that adds to it -----------------------------------------------------------------------------------------


def _grown_at(variable: _Place) -> str | None:
    """The line that adds to the variable: ``losses.append(loss)``, ``total += loss``, ``seen[step] = x``."""
    tree = parsed(variable.file)
    name = variable.name.rpartition(".")[2]
    adding = (
        node.lineno
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, (ast.expr, ast.stmt))
        and any(name == getattr(target, "id", getattr(target, "attr", None)) for target in _added_to(node))
    )
    line = min((line for line in adding if variable.first <= line <= variable.last), default=None)
    return None if line is None else line_of(variable.file, line)


def _added_to(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.AugAssign(target=target):
            yield _collection(target)
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _ADDS:
            yield _collection(value)
        case ast.Assign(targets=targets, value=value):
            yield from (_collection(target) for target in targets if isinstance(target, ast.Subscript))
            read = (node for node in ast.walk(value) if isinstance(node, (ast.Name, ast.Attribute)))
            names = set(map(ast.unparse, read))
            yield from (target for target in targets if ast.unparse(target) in names)


def _collection(target: ast.expr) -> ast.expr:
    """The variable that ``seen["train"][step]`` is in."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target


# -- loops that wait --------------------------------------------------------------------------------------------------

MOST_READS: Final = 1000
"""How often a line inside a ``while`` may read a number that is assumed."""
_Line = tuple[str, int]


class Waits:
    """Counts what each line of the program reads; `line` is the one that waits for a number, once it is known."""

    def __init__(self) -> None:
        self.line: str | None = None
        self._reads: Counter[_Line] = Counter()

    def seen(self, line: _Line) -> bool:
        """Count that the program's line at `line` has read a number; whether it waits for one."""
        self._reads[line] += 1
        if self._reads[line] == MOST_READS:
            file, number = line
            tree = parsed(file)
            loops = [
                node
                for node in (ast.walk(tree) if tree else ())
                if isinstance(node, (ast.While, ast.For, ast.AsyncFor))
                and node.lineno <= number <= (node.end_lineno or 0)
            ]
            if isinstance(max(loops, key=lambda node: node.lineno, default=None), ast.While):
                self.line = line_of(file, number)
        return self.line is not None


@contextmanager
def whole_number_defaults() -> Iterator[dict[str, int]]:
    """Collect the options with a whole number above 0 that parsers leave at their defaults, by their longest name."""
    defaults: dict[str, int] = {}

    def parse(original: Any, parser: ArgumentParser, *arguments: Any, **keywords: Any) -> Any:
        values, rest = original(parser, *arguments, **keywords)
        for action in parser._actions:
            value = getattr(values, action.dest, None)
            if action.option_strings and action.nargs is None and type(value) is int and value == action.default > 0:
                defaults[max(action.option_strings, key=len)] = value
        return values, rest

    with assigned(ArgumentParser, "parse_known_args", calling(parse, ArgumentParser.parse_known_args)):
        yield defaults
