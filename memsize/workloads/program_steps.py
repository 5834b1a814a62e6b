"""The training steps of a program, which nobody announces: its optimizers show them.

The first optimizer that makes a step leads, and when it is gone, the next: code that looks for the batch size that fits
makes one for each try. A training step ends with the last optimizer step before the leader's next, so that those of a
GAN's two networks are one. Where a program has no optimizer of PyTorch's, a step ends with the forward that follows an
update: a write to parameters after a backward that reached them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import Patch, assigned, wrapping
from memsize.records.aggregates import split_phase
from memsize.records.timeline import AROUND
from memsize.records.trace import Event
from memsize.records.world import Collective
from memsize.torch_internals.pytree import tensors_in
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.workloads.optimizers import mark_gradients, mark_state

_WAITED_FOR: Final = 2
"""For how many times the asked steps of the leader an optimizer is waited for that has made none."""
_MOST: Final = 10
"""The same for one that has made some, but fewer than were asked for."""


class Zeroed(NamedTuple):
    """A call of ``zero_grad`` before `event`; `keeps`: with ``set_to_none=False``. It `freed` gradients' storages."""

    event: int
    line: str
    keeps: bool
    gradients: frozenset[int]
    freed: frozenset[int]


class _End(NamedTuple):
    events: int
    collectives: int
    leads: bool


class ProgramSteps:
    """The steps of a program's optimizers, of which `wanted` are to be made by each (0: as many as it makes).

    `begun` is called before each step of an optimizer, and may end the program. `line` says where it is.
    """

    def __init__(self, ledger: VirtualLedger, wanted: int, begun: Callable[[], None], line: Callable[[], str]) -> None:
        self.wanted = wanted
        self.progress: Callable[[str], None] = lambda stage: None
        """Called with the step that begins."""
        self.completed: Callable[[], None] = lambda: None
        """Called when every optimizer has made its steps."""
        self.state_to_load: Callable[[Optimizer, Any], Any] = lambda optimizer, state: state
        """Returns the state that an optimizer loads in place of the one that it is passed."""
        self.zeroed: list[Zeroed] = []
        self._ledger = ledger
        self._begun = begun
        self._line = line
        self._step_counts = weakref.WeakKeyDictionary[Optimizer, int]()
        self._leader: weakref.ref[Optimizer] | None = None
        self._ends: list[_End] = []

    @property
    def done(self) -> int:
        """How many training steps were made."""
        return sum(end.leads for end in self._ends)

    @property
    def over(self) -> bool:
        """Whether every optimizer has made the steps that were asked for."""
        if not self.wanted or self.done < self.wanted:
            return False
        behind = [count for count in self._step_counts.values() if count < self.wanted]
        return not behind or self.done >= self.wanted * (_MOST if max(behind) else _WAITED_FOR)

    def replacements(self) -> Iterator[Patch]:
        """Yield the patches that observe new optimizers, loaded states and freed gradients."""

        def constructed(original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._step_counts[optimizer] = 0

        yield wrapping(Optimizer, "__init__", constructed)
        yield wrapping(Optimizer, "add_param_group", self._added)
        yield wrapping(Optimizer, "load_state_dict", self._loading)
        yield wrapping(Optimizer, "zero_grad", self._zeroing)
        yield wrapping(nn.Module, "zero_grad", self._zeroing)

    def _added(self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Wrap `add_param_group` to mark its tensors as parameters, whether a module stores them or not."""
        original(optimizer, *args, **kwargs)
        self._mark(optimizer.param_groups[-1:])

    def _loading(self, original: Callable[..., None], optimizer: Optimizer, state_dict: Any) -> None:
        state = self.state_to_load(optimizer, state_dict)
        with assigned(self._ledger, "loads_state", True):
            original(optimizer, state)

    def _mark(self, groups: Iterable[dict[str, Any]]) -> None:
        for parameter in (parameter for group in groups for parameter in group["params"]):
            self._ledger.mark(parameter, "parameter")

    def _zeroing(self, original: Callable[..., None], owner: Any, set_to_none: bool = True) -> None:
        events, gradients = self._ledger.events, frozenset(self._gradients(owner))
        before = len(events)
        original(owner, set_to_none)
        freed = frozenset(event.storage for event in events[before:] if event.delta < 0)
        self.zeroed.append(Zeroed(before, self._line(), not set_to_none, gradients, freed))

    def _gradients(self, owner: Optimizer | nn.Module) -> Iterator[int]:
        groups = [{"params": owner.parameters()}] if isinstance(owner, nn.Module) else owner.param_groups
        for gradient in (parameter.grad for group in groups for parameter in group["params"]):
            for piece in () if gradient is None else plain_tensors(gradient):
                yield self._ledger.index_of(piece)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While open, the steps of every optimizer are counted."""
        with ExitStack() as handles:
            handles.callback(register_optimizer_step_pre_hook(self._before).remove)
            handles.callback(register_optimizer_step_post_hook(self._after).remove)
            yield

    def mark_all(self) -> None:
        """Mark the parameters, gradients and state of every optimizer, also of one that has not made a step."""
        for optimizer in list(self._step_counts):
            self._mark(optimizer.param_groups)
            mark_gradients(self._ledger, optimizer)
            mark_state(self._ledger, optimizer)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begun()
        self._mark(optimizer.param_groups)
        self._ledger.likely_state = None if optimizer.state else set()
        reference = weakref.ref(optimizer)
        self._ledger.has_state = lambda: any(getattr(reference(), "state", {}).values())

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                for tensor in tensors_in(state):
                    self._ledger.belongs(tensor, parameter)
        likely, self._ledger.likely_state = self._ledger.likely_state, None
        if likely:  # what a first step made and did not keep in its state is a temporary
            state = tensors_in(list(optimizer.state.values()))
            for index in likely - {self._ledger.index_of(piece) for tensor in state for piece in plain_tensors(tensor)}:
                self._ledger.rows[index].role = "temporary"
        self._step_counts[optimizer] = self._step_counts.get(optimizer, 0) + 1
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        self._end(self._leader() is optimizer)

    def _end(self, leads: bool) -> None:
        self._ledger.has_gradients = self._ledger.has_updated = False
        self._ends.append(_End(len(self._ledger.events), len(self._ledger.collectives), leads))
        if leads:
            self._ledger.begin_step(self.done + 1)
            self.progress(self._stage())
        if self.over:
            self.completed()

    def end_updated(self) -> None:
        """End a step whose update no optimizer of PyTorch made, before the next forward."""
        if self._ledger.has_updated and not self._step_counts:
            self._end(leads=True)

    def _stage(self) -> str:
        if self.over:
            return "every step is made, running on to the next forward"
        if self.done < self.wanted:
            return f"step {self.done + 1} of {self.wanted}"
        return f"step {self.done + 1}" + " (other optimizers have made fewer)" * bool(self.wanted)

    @property
    def ends(self) -> tuple[int, ...]:
        """For each training step, how many events there were when it was over."""
        return tuple(end.events for end in self._last)

    @property
    def _last(self) -> tuple[_End, ...]:
        """The ends of the training steps: each is over when the leader is about to step again."""
        following = zip_longest(self._ends, self._ends[1:])
        return tuple(end for end, then in following if end is not None and (then is None or then.leads))

    def numbered(
        self, events: Sequence[Event], collectives: Sequence[Collective], phases: Sequence[str]
    ) -> tuple[tuple[Event, ...], tuple[Collective, ...], tuple[str, ...]]:
        """Assign events, collectives and phases to the training steps that they turned out to be part of."""
        indices = {name: number for number, name in enumerate(phases)}

        def phase_of(number: int, phase: int, ends: Sequence[int]) -> int:
            return indices.setdefault(in_step(phases[phase], number, ends), len(indices))

        ends, sent = self.ends, tuple(end.collectives for end in self._last)
        moved = tuple(event._replace(phase=phase_of(number, event.phase, ends)) for number, event in enumerate(events))
        sent_in = (phase_of(number, collective.phase, sent) for number, collective in enumerate(collectives))
        met = tuple(collective._replace(phase=phase) for collective, phase in zip(collectives, sent_in, strict=True))
        begun, over = {event.phase for event in moved}, len(ends)
        names = []
        for name, number in indices.items():
            of, step = split_phase(name)
            # Without events, none is an update of a step that is not among those that are over.
            is_update = number not in begun and of == "optimizer" and step > over
            names.append(f"{AROUND} {step}" if is_update else name)
        return moved, met, tuple(names)


def in_step(phase: str, number: int, ends: Sequence[int]) -> str:
    """The name of `phase` with the step that event `number` is in, where each step's events end at `ends`. What follows
    the last step, and is part of no other phase, belongs to that step.
    """
    name, _ = split_phase(phase)
    step = bisect_right(ends, number) + 1
    return phase if name == "setup" else f"{name} {min(step, len(ends) or 1) if name == AROUND else step}"
