"""Attributes of other libraries that are replaced for a while. No other module assigns to what is not memsize's own.

Replacing `Tensor.__getitem__` leaves a trace. A class whose `__getitem__` is Python code counts as a sequence, by a
slot of its type. Deleting the attribute again leaves that slot set, for the class and its subclasses, and then
``torch.tensor([loss, loss])`` takes each number for a list and asks for its length. Python has no way to undo this, so
the slots are written back in memory: `PyTypeObject.tp_as_sequence` and `PySequenceMethods.sq_item`, whose offsets have
been the same in every CPython so far (Include/cpython/object.h). Builds without the global lock have a larger header
and are left alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import chain, dropwhile
from types import MappingProxyType, ModuleType
from typing import Any, Final

MISSING: Final = object()
"""The value of an attribute that its owner inherits or lacks: assigning it deletes the attribute."""


Patch = tuple[Any, str, Any]
"""The module or class that owns an attribute, the attribute's name, and its new value."""


@dataclass(eq=False, slots=True)
class AppliedPatch:
    """A patch in place: the group that applied it, its owner and name, and the value to restore."""

    group: object
    owner: Any
    name: str
    before: Any

    def __str__(self) -> str:
        owner = self.owner
        kind = owner if isinstance(owner, type) else type(owner)
        path = owner.__name__ if isinstance(owner, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
        return f"{path}.{self.name}"


class Patches:
    """The attributes that are replaced right now, oldest first. Printing it shows one attribute per line."""

    def __init__(self) -> None:
        self._applied: list[AppliedPatch] = []

    def __iter__(self) -> Iterator[AppliedPatch]:
        return iter(self._applied)

    def __len__(self) -> int:
        return len(self._applied)

    def __repr__(self) -> str:
        return "\n".join(map(str, self._applied)) or "nothing is replaced"

    def apply(self, group: object, patches: Iterable[Patch]) -> None:
        """Put `patches` in place; `restore(group)` undoes them."""
        for owner, name, value in patches:
            before = vars(owner).get(name, MISSING)
            assign(owner, name, value)
            self._applied.append(AppliedPatch(group, owner, name, before))

    def restore(self, group: object) -> None:
        """Restore the attributes that `group` has replaced, the last one first."""
        last_first = self.of(group)[::-1]
        self._applied = [applied for applied in self._applied if applied.group is not group]
        for applied in last_first:
            assign(applied.owner, applied.name, applied.before)

    def of(self, group: object) -> list[AppliedPatch]:
        """Return the patches that `group` has in place."""
        return [applied for applied in self._applied if applied.group is group]

    @contextmanager
    def applied(self, patches: Iterable[Patch]) -> Iterator[None]:
        """Apply patches, and restore the attributes at the end, also after an error."""
        group = object()
        try:
            self.apply(group, patches)
            yield
        finally:
            self.restore(group)


LatePatches = Callable[[Any], Iterable[Patch]]
"""The patches of a module, which is passed once it is imported."""


def merged(*groups: Mapping[str, LatePatches]) -> dict[str, LatePatches]:
    """The patches of all groups, where several may have some of one module."""
    names = dict.fromkeys(name for group in groups for name in group)
    return {name: partial(_of_all, [group[name] for group in groups if name in group]) for name in names}


def _of_all(groups: Iterable[LatePatches], module: ModuleType) -> Iterator[Patch]:
    return chain.from_iterable(patches(module) for patches in groups)


class SuspendablePatches:
    """Patches that can be suspended while a module is imported. Those of modules `later` follow after their import."""

    def __init__(
        self, table: Patches, patches: Iterable[Patch], later: Mapping[str, LatePatches] = MappingProxyType({})
    ) -> None:
        self._table = table
        self._patches = [*patches]
        self._later = dict(later)
        self._is_applied = False

    def apply(self) -> None:
        """Apply the patches, with those of modules imported since the last time."""
        for name in [name for name in self._later if _is_imported(name)]:
            self._patches += self._later.pop(name)(sys.modules[name])
        self._is_applied = True
        self._table.apply(self, self._patches)

    def awaits(self, name: str) -> bool:
        """Whether there are patches for a module that has not been imported so far."""
        return name in self._later

    def imported(self, module: ModuleType) -> None:
        """Take the patches of a module that has just been executed, and apply them unless all are suspended."""
        patches = [*self._later.pop(module.__name__)(module)]
        self._patches += patches
        if self._is_applied:
            self._table.apply(self, patches)

    def restore(self) -> None:
        self._is_applied = False
        self._table.restore(self)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the originals while open. Has no effect inside itself."""
        was_applied = self._is_applied
        self.restore()
        try:
            yield
        finally:
            if was_applied:
                self.apply()


def _is_imported(name: str) -> bool:
    """Whether a module is there as a whole: another one may be imported while it is executed."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def calling(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Return a replacement of `original`, which may be a method, that calls `function` with it before the arguments."""

    @wraps(original)
    def called(*args: Any, **options: Any) -> Any:
        return function(original, *args, **options)

    return called


def wrapping(owner: Any, name: str, function: Callable[..., Any], *arguments: Any) -> Patch:
    """Patch a function or a method to call `function` with `arguments`, the original, and then its own arguments."""
    return owner, name, calling(partial(function, *arguments) if arguments else function, getattr(owner, name))


def assign(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it for `MISSING`, without turning a class into a sequence."""
    # The addresses and contents of the slots by which CPython takes the class and its subclasses for sequences.
    slots = [(slot, _at(slot).value) for slot in _item_slots(owner)] if name == "__getitem__" else []
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
    for slot, contents in slots:
        _at(slot).value = contents


@contextmanager
def assigned(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute while open: a setting of the process that a block of code needs."""
    before = getattr(owner, name)
    assign(owner, name, value)
    try:
        yield
    finally:
        assign(owner, name, before)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: every run then records the same events, as storages die with their users, and
    what reads a large file, all of which is kept, takes a third less time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# -- CPython's slots --------------------------------------------------------------------------------------------------

_WORD = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = 13 * _WORD
"""Offset in a type object: after the header of three words and ten other fields."""
_ITEM = 3 * _WORD
"""Offset in the sequence methods: after length, concat and repeat."""


def _item_slots(owner: type) -> Iterator[int]:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return
    seen, waiting = set(), [owner]
    while waiting:
        kind = waiting.pop()
        if kind not in seen:
            seen.add(kind)
            waiting += type.__subclasses__(kind)
            methods = _at(id(kind) + _AS_SEQUENCE).value
            if methods:
                yield methods + _ITEM


def _at(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(address)


Execute = Callable[[ModuleType], None]


class ImportHook(MetaPathFinder):
    """At the head of `sys.meta_path`: runs `execute` in place of the execution, which it is passed, of modules it is
    `about`; not when code only asks whether a module is installed.
    """

    def __init__(self, about: Callable[[str], bool], execute: Callable[[Execute, ModuleType], None]) -> None:
        self._about = about
        self._execute = execute

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self._about(name):
            return None
        _, *others = dropwhile(lambda finder: finder is not self, [*sys.meta_path])
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec
