"""What something else stands in for in PyTorch, for a while and for some threads only: functions, and names."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from memsize.semantics.slots import item_slots, put_back

Function = Callable[..., Any]
"""A function of PyTorch, or what stands in for it."""

_NOTHING = object()


class Substitution(NamedTuple):
    """A function of PyTorch, by the module or class that holds it, and what makes its stand-in out of the original.

    It may also be a value: then its stand-in finds out itself which thread it answers.
    """

    owner: Any
    name: str
    stand_in: Callable[[Function], Function]


class Substitutions:
    """Stand-ins that are in place while any thread is inside, and answer only the threads for which `applies()` holds.

    `choose` names them when they are first needed; each is made once.
    """

    def __init__(self, choose: Callable[[], tuple[Substitution, ...]], applies: Callable[[], bool]) -> None:
        self._choose = choose
        self._applies = applies
        self._chosen: tuple[Substitution, ...] = ()
        self._made: dict[Substitution, tuple[Function, Function]] = {}
        self._before: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()
        self._inside = 0

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """The stand-ins are in place; the originals are back when the last thread leaves."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Put the stand-ins in place, unless another thread has."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._chosen = self._chosen or self._choose()
                for substitution in self._chosen:
                    self._put(substitution)

    def leave(self) -> None:
        """Put the originals back, if no other thread is inside."""
        with self._lock:
            self._inside -= 1
            while not self._inside and self._before:
                self._set(*self._before.pop())

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set, or for `_NOTHING` delete, without making a sequence of the class."""
        slots = item_slots(owner) if name == "__getitem__" else ()
        if value is _NOTHING:
            delattr(owner, name)  # it was inherited
        else:
            setattr(owner, name, value)
        put_back(slots)

    def _put(self, substitution: Substitution) -> None:
        owner, name, stand_in = substitution
        original = getattr(owner, name)
        made_of, made = self._made.get(substitution, (None, None))
        if made_of is not original or made is None:
            made = stand_in(original)
            if callable(original):
                made = self._answering(original, made)
            self._made[substitution] = original, made
        self._before.append((owner, name, vars(owner).get(name, _NOTHING)))
        self._set(owner, name, made)

    def _answering(self, original: Function, stand_in: Function) -> Function:
        applies = self._applies

        @functools.wraps(original)
        def answered(*args: Any, **kwargs: Any) -> Any:
            return (stand_in if applies() else original)(*args, **kwargs)

        return answered
