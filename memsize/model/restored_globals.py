"""State that a model's code keeps outside of the model, put back: attributes of its classes, and globals it names.

A forward that keeps a mask in a global for its next call keeps one on `meta` here. The user's own next call would find
it there, and so would the run of the next scenario.

Put back are the objects that names mean, and what dicts, lists, sets and queues hold. Known limits: objects deeper
inside, caches of `functools`, attributes of other modules, and all that installed packages keep of themselves.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memsize.processes.patches import MISSING, assign
from memsize.processes.user_code import is_users
from memsize.torch_internals.pytree import paths_of

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def restored_globals(model: nn.Module) -> Iterator[None]:
    """Put the user's classes among those of `model`, and the globals that their methods name, back at the end."""
    kinds = {kind for used in set(map(type, paths_of(model))) for kind in used.__mro__}
    classes = [kind for kind in kinds if any(map(_is_users, vars(kind).values()))]
    functions = [value for cls in classes for value in vars(cls).values() if isinstance(value, types.FunctionType)]
    attributes = [(cls, _contents(vars(cls), vars(cls))) for cls in classes]
    variables = [(table, _contents(table, names)) for table, names in _named(functions)]
    try:
        yield
    finally:
        for cls, before in attributes:
            _put_back(cls, before)
        for table, before in variables:
            _put_back(table, before)


Contents = dict[str, tuple[Any, Any]]
"""By name: an object, and a copy of what it holds (None where it is no container)."""


def _is_users(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and (
        value.__globals__.get("__name__") == "__main__" or is_users(value.__code__.co_filename)
    )


def _named(functions: Iterable[types.FunctionType]) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """The globals of the functions' modules, and the names used by these and by the user's functions they call."""
    tables: dict[int, tuple[dict[str, Any], set[str]]] = {}
    waiting, met = list(functions), set[int]()
    while waiting:
        function = waiting.pop()
        if id(function) in met or not _is_users(function):
            continue
        met.add(id(function))
        table = function.__globals__
        names = set(_names(function.__code__))
        tables.setdefault(id(table), (table, set()))[1].update(names)
        waiting += [table[name] for name in names if isinstance(table.get(name), types.FunctionType)]
    return iter(tables.values())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _contents(table: Any, names: Iterable[str]) -> Contents:
    values = {name: table.get(name, MISSING) for name in names if not name.startswith("__")}
    return {name: (value, value.copy() if type(value) in _CONTAINERS else None) for name, value in values.items()}


def _put_back(owner: Any, before: Contents) -> None:
    is_class = isinstance(owner, type)
    table: Any = vars(owner) if is_class else owner
    for name in [name for name in table if name not in before and not name.startswith("__")] if is_class else []:
        assign(owner, name, MISSING)
    for name, (value, contents) in before.items():
        if table.get(name, MISSING) is not value:
            if is_class:
                assign(owner, name, value)
            elif value is MISSING:
                del owner[name]
            else:
                owner[name] = value
        if contents is not None and not _same(value, contents):
            value.clear()
            (value.update if isinstance(value, (dict, set)) else value.extend)(contents)


def _same(value: Any, contents: Any) -> bool:
    """Whether a container holds the very objects that it held, compared by identity: tensors are not compared."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in contents.items())
    return all(a is b for a, b in zip(value, contents, strict=True))
