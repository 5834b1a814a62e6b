"""Patches of PyTorch: functions and names that are replaced for a while, and for some threads only.

Replacing `Tensor.__getitem__` leaves a trace. A class whose `__getitem__` is Python code counts as a sequence, by a
slot of its type. Deleting the attribute again leaves that slot set, for the class and those derived from it, and then
``torch.tensor([loss, loss])`` takes each number for a list and asks for its length. There is no way back from Python,
so the slots are put back where they lie in memory: `PyTypeObject.tp_as_sequence` and `PySequenceMethods.sq_item`, whose
places have been the same in every CPython so far (Include/cpython/object.h); builds without the global lock have a
larger header and are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memsize.processes.process_lock import turn_taken

_WORD = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = 13 * _WORD
"""Offset in a type object: after the header of three words and ten other fields."""
_ITEM = 3 * _WORD
"""Offset in the sequence methods: after length, concat and repeat."""

Slot = tuple[int, int | None]
"""The address of a slot, and what it held."""


def item_slots(owner: type) -> Sequence[Slot]:
    """The slots by which CPython takes `owner` and its subclasses for sequences, with their present contents."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return ()
    return [(address, _at(address).value) for kind in _family(owner) if (address := _address(kind))]


def restore(slots: Sequence[Slot]) -> None:
    """Put back into each slot what it held."""
    for address, held in slots:
        _at(address).value = held


def _family(owner: type) -> Iterator[type]:
    seen, waiting = set(), [owner]
    while waiting:
        kind = waiting.pop()
        if kind not in seen:
            seen.add(kind)
            yield kind
            waiting += type.__subclasses__(kind)


def _address(kind: type) -> int:
    methods = _at(id(kind) + _AS_SEQUENCE).value
    return methods + _ITEM if methods else 0


def _at(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(address)


Function = Callable[..., Any]
"""A function of PyTorch, or its replacement."""

_NOTHING = object()


class Patch(NamedTuple):
    """A function of PyTorch, by the module or class that holds it, and a function from the original to its replacement.

    The original may also be a plain value; its replacement then has to find out itself which thread is asking.
    """

    owner: Any
    name: str
    replace: Callable[[Function], Function]


class PatchSet:
    """Patches that are in place while a thread is inside, and that only threads for which `applies()` holds notice.

    `choose` lists the patches whenever a thread enters, since more modules may have been imported by then. It must
    return equal patches each time, so that each replacement is made and installed only once.
    """

    def __init__(self, choose: Callable[[], Iterable[Patch]], applies: Callable[[], bool]) -> None:
        self._choose = choose
        self._applies = applies
        self._made: dict[Patch, tuple[Function, Function]] = {}
        self._before: dict[Patch, Any] = {}
        self._depth = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Put the patches in place; may be entered again inside itself. Other threads wait for their turn."""
        with turn_taken():
            self._depth += 1
            try:
                self.renew()
                yield
            finally:
                self._depth -= 1
                while not self._depth and self._before:
                    (owner, name, _), value = self._before.popitem()
                    _set(owner, name, value)

    def renew(self) -> None:
        """Put the patches in place whose modules were imported since a thread entered."""
        for patch in self._choose() if self._depth else ():
            if patch not in self._before:
                self._put(patch)

    def _put(self, patch: Patch) -> None:
        owner, name, replace = patch
        original = getattr(owner, name)
        made_of, made = self._made.get(patch, (None, None))
        if made_of is not original or made is None:
            made = replace(original)
            if callable(original):
                made = self._for_threads_inside(original, made)
            self._made[patch] = original, made
        self._before[patch] = vars(owner).get(name, _NOTHING)
        _set(owner, name, made)

    def _for_threads_inside(self, original: Function, replacement: Function) -> Function:
        applies = self._applies

        @functools.wraps(original)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (replacement if applies() else original)(*args, **kwargs)

        return chosen


def _set(owner: Any, name: str, value: Any) -> None:
    """Set the attribute, or delete it for `_NOTHING`, without turning the class into a sequence."""
    slots = item_slots(owner) if name == "__getitem__" else ()
    if value is _NOTHING:
        delattr(owner, name)  # it was inherited
    else:
        setattr(owner, name, value)
    restore(slots)
