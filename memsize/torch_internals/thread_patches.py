"""Patches of PyTorch that only threads inside a run notice: others get the originals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from memsize.processes.patches import Patch
from memsize.processes.simulation import Simulation, current, open_simulation, running

Function = Callable[..., Any]
"""A function of PyTorch, or its replacement."""


class Override(NamedTuple):
    """A function of PyTorch, by the module or class that holds it, and a function from the original to its replacement.

    The original may also be a plain value; its replacement then has to find out itself which thread is asking.
    """

    owner: Any
    name: str
    replace: Callable[[Function], Function]


class ThreadPatches:
    """Overrides that are in place while a simulation is inside `active`, and that only threads for which `applies()`
    holds notice: by default those that run in the simulation.

    `choose` lists the overrides whenever a region is entered, since more modules may have been imported by then. It
    must return equal overrides each time, so that each replacement is made and installed only once.
    """

    def __init__(self, choose: Callable[[], Iterable[Override]], applies: Callable[[], bool] | None = None) -> None:
        self._choose = choose
        self._applies = applies or self.is_inside
        self._replacements: dict[Override, tuple[Function, Function]] = {}
        """The last original of each, and its replacement: making them takes longer than installing them."""

    def is_inside(self) -> bool:
        """Whether this thread runs in a simulation in which these patches are in place."""
        simulation = current()
        return simulation is not None and simulation.regions[self] > 0

    @contextmanager
    def active(self) -> Iterator[Simulation]:
        """Put the patches in place; may be entered again inside itself. Other threads wait for their turn."""
        with open_simulation() as simulation:
            simulation.regions[self] += 1
            try:
                self.renew()
                yield simulation
            finally:
                simulation.regions[self] -= 1
                if not simulation.regions[self]:
                    simulation.patches.restore(self)

    def renew(self) -> None:
        """Put the patches in place whose modules were imported since the region was entered."""
        simulation = running()
        if simulation is None or not simulation.regions[self]:
            return
        in_place = {(id(patch.owner), patch.name) for patch in simulation.patches.of(self)}
        missing = [override for override in self._choose() if (id(override.owner), override.name) not in in_place]
        simulation.patches.apply(self, map(self._patch, missing))

    def _patch(self, override: Override) -> Patch:
        owner, name, replace = override
        original = getattr(owner, name)
        known_original, replacement = self._replacements.get(override, (None, None))
        if known_original is not original or replacement is None:
            replacement = replace(original)
            if callable(original):
                replacement = self._for_threads_inside(original, replacement)
            self._replacements[override] = original, replacement
        return owner, name, replacement

    def _for_threads_inside(self, original: Function, replacement: Function) -> Function:
        applies = self._applies

        @functools.wraps(original)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (replacement if applies() else original)(*args, **kwargs)

        return chosen
