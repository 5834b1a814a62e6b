"""The runs behind a fit: one meta copy per variant and size, each run once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

from torch import nn

from memsize.analysis.fit.footprint import Footprint, Replays
from memsize.analysis.fit.search import LIMIT, MOST_RUNS
from memsize.analysis.runner import Runner
from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.allocator_config import AllocatorConfig
from memsize.errors import ForwardError
from memsize.model.input_tensors import ModelInputs, input_tensors, resized_call
from memsize.records.columns import in_columns
from memsize.records.fit import FitRun
from memsize.records.gpu import Card
from memsize.records.trace import InputTensor, Trace
from memsize.spec.generation import Generation
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import Scenario
from memsize.spec.stack import INSTALLED, Stack
from memsize.spec.training import Training
from memsize.spec.vary import Vary
from memsize.torch_internals.isolation import forget_run
from memsize.tracing.run import Setup
from memsize.workloads.parallel import steps_on

Edit = Callable[[Setup], Setup]
"""Changes a meta copy that is ready to run; raises `NotApplicable` where it does not apply."""


class NotApplicable(Exception):  # noqa: N818
    """Why an optimization does not apply to a model. Raised only within the search for optimizations."""


class RunKey(NamedTuple):
    """What determines the events of a run besides its size. Cards of one generation run the same `kernels`."""

    scenario: Scenario
    kernels: tuple[object, ...]
    training: Training | None
    edits: tuple[Edit, ...]
    split: int
    parallel: Parallel | None
    generation: Generation | None
    sequences: int | None


@dataclass(frozen=True)
class RunVariant:
    """One way to run a model whose memory is asked for; an optimization turns a variant into another.

    A scenario on a card, trained (None: inference) or generating (None: one forward), spread over several of them by
    `parallel` (None: on one), with the allocator's settings and edits of the meta copy. `split` is into how many parts
    a batch is cut, one after the other; `applied` names the optimizations in it. `sequences` is the batch of a
    generation whose context varies, where that is not the one that was given.
    """

    scenario: Scenario
    card: Card
    training: Training | None = None
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    edits: tuple[Edit, ...] = ()
    split: int = 1
    applied: tuple[str, ...] = ()
    parallel: Parallel | None = None
    generation: Generation | None = None
    sequences: int | None = None

    def edited(self, edit: Edit) -> RunVariant:
        """The variant with one more edit."""
        return replace(self, edits=(*self.edits, edit))

    @property
    def events(self) -> RunKey:
        """What its runs share with those of other variants: the allocator and its card's size play no part."""
        return RunKey(
            self.scenario,
            self.card.kernels,
            self.training,
            self.edits,
            self.split,
            self.parallel,
            self.generation,
            self.sequences,
        )


class Run(Protocol):
    """A run: its record, which may be put together each time, and the events of it."""

    @property
    def trace(self) -> Trace: ...

    @property
    def flow(self) -> AllocationEvents: ...


@dataclass(frozen=True)
class Traced:
    """A run whose record is kept."""

    trace: Trace

    @property
    def flow(self) -> AllocationEvents:
        """The events of its record."""
        return flow_of(self.trace)


class NewRuns(NamedTuple):
    """Runs by variant and size, and what the model refused."""

    runs: dict[tuple[RunKey, int], Run]
    refusals: dict[tuple[RunKey, int], ForwardError]
    forgotten: int = 0


class RunCache:
    """The runs of one model by variant and size. `generates`: each is a generation, of which few steps are traced.
    `most_runs` are made for an answer.
    """

    generates: ClassVar = False
    most_runs: ClassVar = MOST_RUNS

    def __init__(
        self,
        name: str,
        model: nn.Module,
        model_inputs: ModelInputs,
        training: bool,
        vary: Vary,
        say: Callable[[str], None],
        stack: Stack = INSTALLED,
    ) -> None:
        self.name = name
        self.model = model
        self.model_inputs = model_inputs
        self.training = training
        self.vary = vary
        self.say = say
        self.stack = stack
        self.inputs: tuple[InputTensor, ...] = input_tensors(model_inputs.call())
        self._dimensions = vary.dimensions(self.inputs)
        self._runs: dict[tuple[RunKey, int], Run] = {}
        self._latest: tuple[Run | None, Trace | None] = None, None
        self._refusals: dict[tuple[RunKey, int], ForwardError] = {}
        self._forgotten = 0
        self._footprints: dict[tuple[RunKey, int, AllocatorConfig], Footprint] = {}
        self._replays: dict[tuple[object, AllocatorConfig], Replays] = {}
        self._runners: dict[tuple[object, ...], Runner] = {}

    @property
    def count(self) -> int:
        """How many runs were made, refused ones too."""
        return len(self._runs) + len(self._refusals) + self._forgotten

    @property
    def resizable(self) -> bool:
        """Whether the size can be chosen: the batch of given inputs can't where they disagree on it."""
        return self.model_inputs.resizable or not self.vary.batch

    @property
    def least(self) -> int:
        """The smallest size that there is."""
        return 1

    @property
    def most(self) -> int:
        """The largest size that is looked at."""
        return LIMIT

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about the sizes that are looked at."""
        return ()

    @property
    def asked(self) -> int:
        """The size that the input was given with."""
        return self.model_inputs.batch_size if self.vary.batch else self.vary.size(self.inputs)

    def run(self, variant: RunVariant, size: int) -> Footprint:
        """The run of a size; of a split batch, the run of its largest part.

        Raises `ForwardError` where the model refuses the size, `ScenarioError` where the variant is impossible.
        """
        key = variant.events, size
        if key in self._refusals:
            raise self._refusals[key]
        if key not in self._runs:
            spread = [str(variant.parallel)] if variant.parallel else []
            sequences = [f"batch {variant.sequences:,}"] if variant.sequences else []
            how = (variant.scenario.name, *variant.applied, *spread, *sequences)
            self.say(f"{', '.join(how)}, {self.vary.text} {size:,}")
            self._latest = None, None  # nothing asks for it again while the next is looked at
            try:
                self._runs[key] = self._trace(variant, size)
            except ForwardError as error:
                self._refusals[key] = error
                raise
            finally:
                forget_run()
        served = (*key, variant.config)
        if served not in self._footprints:
            made = self._runs[key]
            run = Footprint(size, partial(self._record, made), variant.config, given=made.flow)
            # Runs that make the same events share their replays: float16 and bfloat16 often do.
            replays = self._replays.setdefault((run.flow.digest, variant.config), run.replays)
            self._footprints[served] = run if replays is run.replays else replace(run, replays=replays)
        return self._footprints[served]

    def made(self, but: NewRuns | None = None) -> NewRuns:
        """The runs so far, for `adopt`; without those that were made before."""
        runs, refusals, forgotten = but or ({}, {}, 0)
        return NewRuns(
            {key: run for key, run in self._runs.items() if key not in runs},
            {key: error for key, error in self._refusals.items() if key not in refusals},
            self._forgotten - forgotten,
        )

    def forget(self, variant: RunVariant, but: int | None) -> None:
        """Keep no run of a variant except that of one size."""
        events = variant.events
        for key in [key for key in self._runs if key[0] == events and key[1] != but]:
            del self._runs[key]
            self._forgotten += 1
        self._footprints.clear()
        self._replays.clear()
        self._latest = None, None

    def adopt(self, made: NewRuns) -> None:
        """Take over runs that another process made."""
        self._runs |= made.runs
        self._refusals |= made.refusals
        self._forgotten += made.forgotten

    def known(self, variant: RunVariant) -> dict[int, Footprint]:
        """The runs of a variant that were made before, on this card or one like it."""
        sizes = [size for events, size in self._runs if events == variant.events]
        return {size: self.run(variant, size) for size in sizes}

    def refused(self, variant: RunVariant) -> dict[int, str]:
        """The sizes that the model refused in such a variant, and why. Shapes are the reason, so they are refused on
        every card.
        """
        events = variant.events
        found = self._refusals.items()
        return {size: str(error) for (of, size), error in found if of._replace(kernels=events.kernels) == events}

    def traces(self, variants: Iterable[tuple[str, RunVariant]]) -> dict[FitRun, Trace]:
        """Every run of `variants`, which are given with the names of their GPUs."""
        named: dict[RunKey, str] = {}
        for gpu, variant in variants:
            named.setdefault(variant.events, gpu)
        return {
            FitRun(events.scenario.name, size, named[asked], events.sequences): run.trace
            for (events, size), run in self._runs.items()
            if (asked := events._replace(sequences=None)) in named
        }

    def prepared(self, variant: RunVariant, size: int) -> Setup:
        """A fresh meta copy of a variant, its edits made, with inputs of the size."""
        batch = size if self.vary.batch else self.model_inputs.batch_size
        setup = self._runner(variant).setup(variant.scenario, -(-batch // variant.split))
        if not self.vary.batch:
            setup = replace(setup, call=resized_call(setup.call, self._dimensions, size))
        for edit in variant.edits:
            setup = edit(setup)
        return setup

    def _record(self, run: Run) -> Trace:
        """The record of a run: of those that are put together each time the latest is kept."""
        made, trace = self._latest
        if made is not run or trace is None:
            self._latest = made, trace = None, None  # before the next takes its place in memory
            trace = run.trace
            self._latest = run, trace
        return trace

    def _trace(self, variant: RunVariant, size: int) -> Run:
        setup = self.prepared(variant, size)
        training = variant.training
        if training:
            backwards = variant.parallel.microbatches(training) if variant.parallel else training.accumulate
            # The first step creates the optimizer's state: the second is like all that follow.
            training = replace(training, steps=2, accumulate=backwards * variant.split)
        trace = steps_on(training, variant.parallel, variant.card).run(setup)
        return Traced(replace(trace, storages=in_columns(trace.storages), events=in_columns(trace.events)))

    def _runner(self, variant: RunVariant) -> Runner:
        if variant.card.kernels not in self._runners:
            runner = Runner(self.name, self.model, self.model_inputs, self.training, gpu=variant.card, stack=self.stack)
            self._runners[variant.card.kernels] = runner
        return self._runners[variant.card.kernels]
