"""What CPython forgets to take back when ``Tensor.__getitem__`` was replaced for a while.

A class whose `__getitem__` is Python code counts as a sequence, by a slot of its type. Deleting the attribute again
leaves that slot set, for the class and those derived from it, and then ``torch.tensor([loss, loss])`` takes each number
for a list and asks for its length. There is no way back from Python, so the slots are put back where they lie in
memory: `PyTypeObject.tp_as_sequence` and `PySequenceMethods.sq_item`, whose places have been the same in every CPython
so far (Include/cpython/object.h); builds without the global lock have a larger header and are left alone.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Iterator, Sequence

_WORD = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = 13 * _WORD
"""Of a type: after the object's header of three words and ten other fields."""
_ITEM = 3 * _WORD
"""Of its sequence methods: after length, concat and repeat."""

Slot = tuple[int, int | None]
"""Where a slot lies, and what it held."""


def item_slots(owner: type) -> Sequence[Slot]:
    """The slots that tell `owner` and the classes derived from it for sequences, as they are now."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return ()
    return [(address, _at(address).value) for kind in _family(owner) if (address := _address(kind))]


def put_back(slots: Sequence[Slot]) -> None:
    """Let each slot hold again what it held."""
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
