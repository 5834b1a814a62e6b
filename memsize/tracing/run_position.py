"""Where in a run an op happens: its step, phase and layer.

A forward op belongs to the module that is running. A backward op belongs to the module whose forward created its
autograd node: nodes are numbered in order of creation, so the numbers between a module's start and end are its own.
Whether a backward is running comes from autograd's engine itself, so it also holds when the user's own loop started it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from memsize.processes.ctrl_c import raise_waiting

_graph_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_next_number = torch._C._autograd._get_sequence_nr
_NO_NUMBER = 2**63
"""Accumulation nodes have the highest numbers, so that the engine runs them first; they belong to no forward."""


class Interrupted(NamedTuple):
    """Where an exception came from, by its `id`: the phase without its step, and the layer."""

    error: int
    phase: str
    layer: int


class RunPosition:
    """The location of the op that is running.

    `layer` indexes the run's layers (-1: outside every module), `phase` indexes `phases`; `step` is 0 before the first
    step.
    """

    def __init__(self) -> None:
        self.layer = -1
        self.step = 0
        self.phases = ["setup"]
        self.phase = 0
        self.interrupted: Interrupted | None = None
        self.pinned: int | None = None
        """The layer of ops while compiled code runs, which is one op for autograd."""
        self.recomputes = False
        """Whether a backward has run a module again."""
        self._depth = 0
        self._outside: tuple[int, int, int] | None = None
        self._numbers = [0]
        self._owners = [-1]

    @property
    def backward(self) -> bool:
        return _graph_task() != -1

    @property
    def inside(self) -> bool:
        """Whether a module or a backward is running: a module called now is part of it."""
        if self.backward:
            return True
        self._settle()
        return self.layer >= 0

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Open a phase of the current step, named as in the record (``"forward 2"``); the outer one resumes after."""
        self._settle()
        outer, self.phase = self.phase, self.index(name)
        try:
            yield
        except BaseException as error:
            if self.interrupted is None or self.interrupted.error != id(error):
                self.interrupted = Interrupted(id(error), self.phases[self.phase].partition(" ")[0], self.layer)
            raise
        finally:
            self._settle()
            self.phase = outer

    def index(self, name: str) -> int:
        """The phase `name` of the current step."""
        label = f"{name} {self.step}" if self.step else name
        if label not in self.phases:
            self.phases.append(label)
        return self.phases.index(label)

    def of_this_step(self) -> dict[int, int]:
        """For each phase of the step before, the one of that name in the current step; all others are themselves."""
        before = f" {self.step - 1}"
        names = {index: label.removesuffix(before) for index, label in enumerate(self.phases) if label.endswith(before)}
        same = {index: index for index in range(len(self.phases))}
        return same | {index: self.index(name) for index, name in names.items()}

    def enter(self, layer: int) -> int:
        """A module starts; returns the layer that was running, for `leave`."""
        if self._outside is not None:
            self._settle()
        outer, self.layer = self.layer, layer
        self._depth += 1
        self._own(layer)
        return outer

    def leave(self, outer: int) -> None:
        """The module has ended and `outer` goes on."""
        self.layer = outer
        self._depth -= 1
        self._own(outer)

    def _own(self, layer: int) -> None:
        if self._outside is None:
            self._numbers.append(_next_number())
            self._owners.append(layer)

    def _settle(self) -> None:
        """Return to the phase and layer that called a backward which is over: the engine does not announce its end."""
        if self._outside is not None and _graph_task() == -1:
            self.phase, self.layer, self._depth = self._outside
            self._outside = None

    def _phase_after_backward(self) -> int:
        """Return the phase in which the code goes on that starts a backward now."""
        return self.phase

    def tick(self) -> None:
        """An op is about to run."""
        raise_waiting()
        if _graph_task() == -1:
            if self._outside is not None:
                self._settle()
            return
        if self._outside is None:
            self._outside = (self._phase_after_backward(), self.layer, self._depth)
            self.phase = self.index("backward")
        if self.pinned is not None:
            self.layer = self.pinned
        elif self._depth == self._outside[2]:
            # A module that runs inside of where backward began is recomputed by a checkpoint.
            node = _node()
            number = _NO_NUMBER if node is None else node._sequence_nr()
            if number < _NO_NUMBER:
                self.layer = self._owners[bisect_right(self._numbers, number) - 1]
        else:
            self.recomputes = True
