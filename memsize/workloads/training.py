"""Training steps of one model, as a `Trace`: forward, loss, backward and optimizer, several times over.

Everything is PyTorch's own: autograd runs the backward, `torch.optim` the update, `torch.amp` the scaling. The user's
own loop runs the same way: phases are read from autograd's engine and the optimizers' hooks, not from memsize's loop.

A training step starts from the storages that the last one left. Once a step leaves and allocates the same as the one
before it, the next step differs in nothing but its number: its events are recorded without a run (`StepRepetition`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from memsize.errors import InputError
from memsize.loading.model_defined_step import model_defined_step_of
from memsize.model.tensor_storage import plain_tensors, spec_of
from memsize.records.trace import Event, Trace
from memsize.spec.training import USUAL_STEPS, Training
from memsize.tracing.ledger import Ledger
from memsize.tracing.run import Run, Setup
from memsize.tracing.storages import Row
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.workloads import Forward, Inference, Proof, Workload
from memsize.workloads.losses import Losses
from memsize.workloads.optimizers import make_optimizer, steps_watched
from memsize.workloads.pipeline_phases import DENOISING, phases_of

Body = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TrainingSteps(Workload):
    """The usual training loop with these options, for `options.steps` steps."""

    options: Training

    @property
    def proof(self) -> Proof | None:
        return Forward().proof if is_regular(self.options) else None

    def run(self, setup: Setup) -> Trace:
        run = Run(setup)
        with run.recording(), _as_trained(run):
            body = Loop(setup, run.ledger, self.options)
            steps = StepRepetition(run.ledger)
            for number in range(1, self.options.steps + 1):
                run.ledger.clock.step = number
                if self._repeats and steps.repeat_themselves:
                    steps.repeat()
                    continue
                with run.ledger.clock.during("step"):
                    body()
                steps.ended()
            run.note(body.losses.note)
        trace, ledger = run.trace(), run.ledger
        return replace(trace, host=ledger.host_memory.use) if isinstance(ledger, VirtualLedger) else trace

    @property
    def _repeats(self) -> bool:
        """Whether a step that would repeat the one before need not be run. An optimizer from elsewhere may do something
        every so often, and whoever asks for more steps than usual looks for what the first ones don't show.
        """
        return is_regular(replace(self.options, loss=None)) and self.options.steps <= USUAL_STEPS


def is_regular(training: Training) -> bool:
    """Whether every block is trained alike: no function of the user's is part of the training. One of memsize's own
    says so with its attribute `is_regular`.
    """
    functions = filter(callable, (training.optimizer, training.loss))
    return not training.is_own and all(getattr(function, "is_regular", False) for function in functions)


@dataclass(frozen=True, slots=True)
class OwnLoop(Workload):
    """The user's own loop. `make_body(model)` is called once with a copy of the user's model and returns the body,
    which is called `steps` times with the inputs; whatever it makes outside the body exists from the first step on.
    """

    make_body: Callable[[nn.Module], Body]
    steps: int = 3

    def run(self, setup: Setup) -> Trace:
        run = Run(setup)
        args, kwargs = setup.call
        with run.recording(), _as_trained(run):
            with run.ledger.clock.during("setup"):
                body = body_of(self.make_body, setup.model)
            for number in range(1, self.steps + 1):
                run.ledger.clock.step = number
                with run.ledger.clock.during("step"), setup.precision.autocast():
                    body(*args, **kwargs)
        return run.trace()


def body_of(make_body: Callable[[nn.Module], Body], model: nn.Module) -> Body:
    """The body of a loop; raises `InputError` where none was returned."""
    body: Any = make_body(model)
    if not callable(body):
        raise InputError(f"step(model) returned {body!r}: it has to return the body of the loop, a function")
    return body  # type: ignore[no-any-return]


def step_workload(training: Training | None) -> Inference | TrainingSteps:
    """Training steps with these options; one inference where there are none."""
    return Inference() if training is None else TrainingSteps(training)


@contextmanager
def _as_trained(run: Run) -> Iterator[None]:
    """Gradient mode, optimizers' steps as phases, and gradients marked as they are accumulated."""
    trained, buckets = _trainable(run.setup.model), run.setup.buckets
    buckets_in_use = buckets.hold(trained, run.ledger) if buckets else []
    try:
        with torch.enable_grad(), steps_watched(run.ledger), gradients_marked(run):
            yield
    finally:
        buckets_in_use.clear()


@contextmanager
def gradients_marked(run: Run) -> Iterator[None]:
    """While open, gradients of the run's model are marked as they are accumulated; not those of offloaded parameters,
    as PyTorch copies them otherwise where somebody watches, nor of flat ones, which are whole until they are reduced.
    """
    ledger = run.ledger

    def mark(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.mark(parameter.grad, "gradient")

    handles = [
        parameter.register_post_accumulate_grad_hook(mark)
        for parameter in _trainable(run.setup.model)
        if any(ledger.index_of(part) >= 0 for part in plain_tensors(parameter))
        and not hasattr(parameter, "_is_flat_param")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _trainable(model: nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Loop:
    """The usual body: zero the gradients, forward, loss, backward, step.

    A real run on a GPU uses this loop too, with a ledger that does not record.
    """

    def __init__(self, setup: Setup, ledger: Ledger, training: Training) -> None:
        self.setup = setup
        self.training = training
        self.ledger = ledger
        phases = {phase: part for part, phase in phases_of(setup.model).items()}
        if part := phases.get(DENOISING):
            name = setup.name.removeprefix("diffusers:").partition(" (")[0]
            raise InputError(f"a pipeline only generates; train its {part}, {name}/{part}")
        self.parameters = _trainable(setup.model)
        if not self.parameters:
            raise InputError("no parameter of the model requires a gradient: there is nothing to train")
        self.masters: list[torch.Tensor] | None = None
        if setup.precision.masters:  # one in float32 for each of lower precision; a float32 parameter is its own
            lower = [p for p in self.parameters if p.dtype is not torch.float32]
            copies = dict(zip(map(id, lower), _copies(lower, ledger, "master weight"), strict=True))
            self.masters = [copies[id(p)].requires_grad_() if id(p) in copies else p for p in self.parameters]
        own = model_defined_step_of(setup.model) if training.is_own else None
        if training.is_own and own is None:
            kind = type(setup.model).__name__
            raise InputError(f"{kind} was not given as a target: its own training step is unknown")
        updated = self.parameters if self.masters is None else self.masters
        self.optimizer = own.optimizer() if own else make_optimizer(training.optimizer, updated)
        self.accumulate = training.gradient_accumulation_steps
        if own and self.accumulate == 1:
            self.accumulate = own.accumulate
        self.clip = own.clip if own else 0
        self.losses = Losses(training.loss, self.ledger)
        scaled = setup.precision.scaled if training.scaler is None else training.scaler
        self.scaler = torch.GradScaler("cuda") if scaled else None
        self.average = _copies(self.parameters, self.ledger, "optimizer state") if training.ema else []

    def __call__(self) -> None:
        with self.ledger.clock.during("zero_grad"):
            views = self.setup.buckets is not None and self.setup.buckets.views  # views of buckets, which stay
            self.optimizer.zero_grad(set_to_none=self.training.set_to_none and not views)
            for parameter in self.parameters if self.masters is not None else ():
                parameter.grad = None
        for _ in range(self.accumulate):
            self._forward_and_backward()
        if self.clip:
            with self.ledger.clock.during("clip"):
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self._step()
        if self.average:
            with self.ledger.clock.during("ema"), torch.no_grad():
                torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 0.001)

    def _forward_and_backward(self) -> None:
        args, kwargs = self.setup.call
        with self.setup.precision.autocast():
            with self.setup.precision.forward():
                output = self.setup.model(*args, **kwargs)
            with self.ledger.clock.during("loss"):
                loss = one_number(self.losses(output))
                if self.accumulate > 1:
                    loss = loss / self.accumulate
        # A training loop usually holds the output until the next one replaces it; so does this one.
        self.output = output
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _step(self) -> None:
        if self.masters is None and self.scaler is None:
            self.optimizer.step()
            return
        with self.ledger.clock.during("optimizer"):
            if self.masters is None:
                assert self.scaler is not None
                self.scaler.step(self.optimizer)
                self.scaler.update()
                return
            # apex O2: gradients are copied to float32, the masters are updated, and the parameters are made from them.
            lower = [pair for pair in zip(self.masters, self.parameters, strict=True) if pair[0] is not pair[1]]
            for master, parameter in lower:
                if parameter.grad is not None:
                    master.grad = parameter.grad.detach().to(torch.float32)
                    self.ledger.mark(master.grad, "gradient")
            self.optimizer.step()
            with torch.no_grad():
                for master, parameter in lower:
                    parameter.copy_(master)


def one_number(loss: Any) -> torch.Tensor:
    """`loss`; raises `InputError` where a backward cannot start from it."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = spec_of(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(f"the loss is {got}: a backward starts from a tensor with one element")
    return loss


def _copies(parameters: list[torch.Tensor], ledger: Ledger, role: Any) -> list[torch.Tensor]:
    copies = [parameter.detach().to(torch.float32, copy=True) for parameter in parameters]
    for copy in copies:
        ledger.mark(copy, role)
    return copies


# -- steps that would only repeat the one before -----------------------------------------------------------------------


class _End(NamedTuple):
    """The ledger at the end of a step: the number of events and storages so far, and the rows of live storages."""

    events: int
    storages: int
    alive: dict[int, Row]


class StepRepetition:
    """The steps of one run, as its ledger has them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._bytes: dict[int, int] = {}
        """The bytes of each storage at the last end."""
        self._ends: list[_End] = []
        self.ended()

    def ended(self) -> None:
        """A step is over, or the first is about to begin."""
        ledger = self.ledger
        for event in ledger.events[self._ends[-1].events if self._ends else 0 :]:
            self._bytes[event.storage] = self._bytes.get(event.storage, 0) + event.delta
            if not self._bytes[event.storage]:
                del self._bytes[event.storage]
        alive = {index: replace(ledger.rows[index]) for index in self._bytes}
        self._ends.append(_End(len(ledger.events), ledger.count, alive))

    @property
    def repeat_themselves(self) -> bool:
        """Whether the last two steps left the same storages and made the same allocations, in order; storages that stay
        from the earlier one on (an optimizer's state, the libraries' workspaces) are not made again.
        """
        if len(self._ends) < 3:
            return False
        first, earlier, last = self._ends[-3:]
        if Counter(earlier.alive.values()) != Counter(last.alive.values()):
            return False
        return list(self._allocations(first, earlier, last.alive)) == list(self._allocations(earlier, last, ()))

    def repeat(self) -> None:
        """Record another step like the last one; `repeat_themselves` has to hold.

        The last step's storages are made again. Where the last step freed a storage of the step before, this one frees
        the storage that the last step left in its place, whose role changes in the same way.
        """
        before, last = self._ends[-2:]
        ledger = self.ledger
        left: dict[Row, list[int]] = {}
        for index in sorted(last.alive.keys() - before.alive.keys(), reverse=True):
            left.setdefault(last.alive[index], []).append(index)
        freed = sorted(before.alive.keys() - last.alive.keys())
        follows = {index: left[before.alive[index]].pop() for index in freed}
        roles = {later: ledger.rows[earlier].role for earlier, later in follows.items()}
        copies = {index: ledger.count + number for number, index in enumerate(range(before.storages, last.storages))}
        ledger.rows += [replace(ledger.rows[index]) for index in copies]
        ledger.streams |= {copy: ledger.streams[index] for index, copy in copies.items() if index in ledger.streams}
        for later, role in roles.items():
            ledger.rows[later].role = role
        phases = ledger.clock.of_this_step()
        for storage, delta, phase, layer, op in ledger.events[before.events : last.events]:
            index = copies.get(storage, follows.get(storage, storage))
            ledger.events.append(Event(index, delta, phases[phase], layer, op))
        for reference in ledger.live.values():
            reference.index = copies.get(reference.index, reference.index)
        self.ended()

    def _allocations(self, start: _End, end: _End, apart: Container[int]) -> Iterator[tuple[object, ...]]:
        """Yield the allocations of a step, but for those of the storages `apart`."""
        for event in self.ledger.events[start.events : end.events]:
            if event.delta > 0 and event.storage not in apart:
                row = self.ledger.rows[event.storage]
                yield event.delta, event.layer, event.op, row.dtype, row.shape
