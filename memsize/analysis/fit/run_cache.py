"""The cache of runs behind a fit: each variant of a model is run once at each size. A generation is composed of a few
traced steps, at any batch and context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, NamedTuple, Protocol

from torch import nn

from memsize.analysis.fit.footprint import Footprint, SharedReplays
from memsize.analysis.fit.search import LIMIT, MOST_RUNS
from memsize.analysis.generation.generator import Generator
from memsize.analysis.model_setups import ModelEdit
from memsize.analysis.runner import Edit, Runner
from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.allocator_config import AllocatorConfig
from memsize.errors import ForwardError, InputError
from memsize.model.input_tensors import ModelInputs, input_tensors, resized_call
from memsize.records.columns import in_columns
from memsize.records.fit import FitRun
from memsize.records.gpu import Card
from memsize.records.trace import InputTensor, Trace
from memsize.spec.generation import Generation
from memsize.spec.model_request import Call
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import Scenario
from memsize.spec.stack import INSTALLED, Stack
from memsize.spec.training import Training
from memsize.spec.vary import Vary
from memsize.torch_internals.isolation import forget_run
from memsize.workloads.generation import Prompts, have_own_length, positions
from memsize.workloads.parallel import steps_on


class RunKey(NamedTuple):
    """The properties of a variant that determine the events of a run. GPUs of one generation run the same `kernels`."""

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
    """One way to run a model; a remedy turns a variant into another.

    The model is trained (`training`), generates (`generation`), or makes one forward (neither is set); `parallel`
    spreads it over several GPUs. `edits` change the meta copy before it runs. The batch is cut into `split` parts that
    run one after the other. `applied` names the remedies in it. `sequences` is the batch of a generation whose context
    varies (None: the batch of the inputs). `capacity` is the number of bytes that the allocator may take; runs do not
    depend on it.
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
    capacity: int = 0

    def edited(self, edit: Edit) -> RunVariant:
        return replace(self, edits=(*self.edits, edit))

    @property
    def run_key(self) -> RunKey:
        """The key under which runs are shared with other variants: neither allocator nor memory size are part of it."""
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
    """A run: its trace, which may be built anew each time, and its events."""

    @property
    def trace(self) -> Trace: ...

    @property
    def flow(self) -> AllocationEvents: ...


@dataclass(frozen=True)
class TracedRun:
    """A run whose trace is stored."""

    trace: Trace

    @property
    def flow(self) -> AllocationEvents:
        return flow_of(self.trace)


ResultKey = tuple[RunKey, int]
"""A variant and a size."""


class NewRuns(NamedTuple):
    """Runs and refusals to hand over to another process, by variant and size."""

    results: dict[ResultKey, Run | ForwardError]
    dropped: int = 0
    """How many more runs were made and dropped again."""


@dataclass(eq=False)
class RunCache:
    """The runs of one model by variant and size.

    `generates`: each run is a generation, of which few steps are traced. Up to `most_runs` are made for an answer.
    """

    generates: ClassVar = False
    most_runs: ClassVar = MOST_RUNS

    name: str
    model: nn.Module
    model_inputs: ModelInputs
    training: bool
    vary: Vary
    progress: Callable[[str], None]
    stack: Stack = INSTALLED
    whole: bool = False
    """Whether every layer is run, even if layers repeat."""

    def __post_init__(self) -> None:
        self.inputs: tuple[InputTensor, ...] = input_tensors(self.model_inputs.call())
        self._dimensions = self.vary.dimensions(self.inputs)
        self._results: dict[ResultKey, Run | ForwardError] = {}
        self._dropped = 0
        self._latest: tuple[Run | None, Trace | None] = None, None
        self._footprints: dict[tuple[ResultKey, AllocatorConfig], Footprint] = {}
        self._replays: SharedReplays = {}
        self._runners: dict[tuple[object, ...], Runner] = {}

    @property
    def count(self) -> int:
        """How many runs were made, refused ones included."""
        return len(self._results) + self._dropped

    @property
    def resizable(self) -> bool:
        """Whether the size can be chosen: the batch cannot if the inputs disagree on it."""
        return self.model_inputs.resizable or not self.vary.batch

    @property
    def least(self) -> int:
        """The smallest possible size."""
        return 1

    @property
    def most(self) -> int:
        """The largest size to try."""
        return LIMIT

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report about the sizes to try."""
        return ()

    @property
    def input_size(self) -> int:
        return self.model_inputs.batch_size if self.vary.batch else self.vary.size(self.inputs)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def run(self, variant: RunVariant, size: int) -> Footprint:
        """Run a variant at a size, or return the run made before; of a split batch, the run of its largest part.

        Raises `ForwardError` where the model refuses the size, `ScenarioError` where the variant is impossible.
        """
        key = variant.run_key, size
        if key not in self._results:
            parallel = [str(variant.parallel)] if variant.parallel else []
            sequences = [f"batch {variant.sequences:,}"] if variant.sequences else []
            parts = (variant.scenario.name, *variant.applied, *parallel, *sequences, f"{self.vary.text} {size:,}")
            self.progress(", ".join(parts))
            self._latest = None, None  # its trace is not needed while another run is made
            try:
                self._results[key] = self._trace(variant, size)
            except ForwardError as error:
                self._results[key] = error
                raise
            finally:
                forget_run()
        result = self._results[key]
        if isinstance(result, ForwardError):
            raise result
        config = variant.config
        if (key, config) not in self._footprints:
            source = partial(self._trace_of, result)
            self._footprints[key, config] = Footprint(size, source, config, events=result.flow, shared=self._replays)
        return self._footprints[key, config]

    def runs_of(self, variant: RunVariant) -> dict[int, Footprint]:
        """Return the runs of a variant that were made before, on this GPU or one like it."""
        results = self._results.items()
        sizes = [size for (of, size), run in results if of == variant.run_key and not isinstance(run, ForwardError)]
        return {size: self.run(variant, size) for size in sizes}

    def refusals_of(self, variant: RunVariant) -> dict[int, str]:
        """Return the sizes that the model refused in a variant, and why: on any GPU, since shapes are the reason."""
        key = variant.run_key
        return {
            size: str(error)
            for (of, size), error in self._results.items()
            if isinstance(error, ForwardError) and of._replace(kernels=key.kernels) == key
        }

    def drop(self, variant: RunVariant, but: int | None) -> None:
        """Drop all runs of a variant except the one of the size `but`."""
        key = variant.run_key
        stale = [
            (of, size)
            for (of, size), run in self._results.items()
            if of == key and size != but and not isinstance(run, ForwardError)
        ]
        for result in stale:
            del self._results[result]
        self._dropped += len(stale)
        self._footprints.clear()
        self._replays.clear()
        self._latest = None, None

    def new_runs(self, since: NewRuns | None = None) -> NewRuns:
        """Return the results that were not there at `since`, for `adopt` in another process."""
        before = since or NewRuns({})
        results = {key: result for key, result in self._results.items() if key not in before.results}
        return NewRuns(results, self._dropped - before.dropped)

    def adopt(self, new_runs: NewRuns) -> None:
        """Take over the results of another process."""
        self._results |= new_runs.results
        self._dropped += new_runs.dropped

    def traces(self, variants: Iterable[tuple[str, RunVariant]]) -> dict[FitRun, Trace]:
        """Return the traces of all runs of `variants`, which come with the names of their GPUs."""
        gpus: dict[RunKey, str] = {}
        for gpu, variant in variants:
            gpus.setdefault(variant.run_key, gpu)
        return {
            FitRun(key.scenario.name, size, gpus[of_batch], key.sequences): run.trace
            for (key, size), run in self._results.items()
            if not isinstance(run, ForwardError) and (of_batch := key._replace(sequences=None)) in gpus
        }

    # -- how a run is made --------------------------------------------------------------------------------------------

    def _trace(self, variant: RunVariant, size: int) -> Run:
        training = variant.training
        if training:
            accumulated = training.gradient_accumulation_steps
            backwards = variant.parallel.microbatches(training) if variant.parallel else accumulated
            # The first step creates the optimizer's state: the second is like all that follow.
            training = replace(training, steps=2, gradient_accumulation_steps=backwards * variant.split)
        batch = size if self.vary.batch else self.model_inputs.batch_size

        def resized(call: Call) -> Call:
            return call if self.vary.batch else resized_call(call, self._dimensions, size)

        trace = self._runner(variant).run(
            steps_on(training, variant.parallel, variant.card),
            variant.scenario,
            batch_size=-(-batch // variant.split),
            resized=resized,
            edits=variant.edits,
        )
        return TracedRun(replace(trace, storages=in_columns(trace.storages), events=in_columns(trace.events)))

    def _runner(self, variant: RunVariant) -> Runner:
        kernels = variant.card.kernels
        if kernels not in self._runners:
            model = self.name, self.model, self.model_inputs, self.training
            self._runners[kernels] = Runner(*model, gpu=variant.card, stack=self.stack, whole=self.whole)
        return self._runners[kernels]

    def _trace_of(self, run: Run) -> Trace:
        """Return the trace of a run. Of the traces that are built anew each time, the latest is stored."""
        latest, trace = self._latest
        if latest is not run or trace is None:
            self._latest = latest, trace = None, None  # free it before the next is built
            trace = run.trace
            self._latest = run, trace
        return trace


# -- generations -------------------------------------------------------------------------------------------------------

MOST_SEQUENCES: Final = 1024
"""The largest batch of a frontier."""
_SHORT: Final = 8
"""The shortest prompt of the contexts that are traced together."""
_TOGETHER: Final = 16
"""The largest of the batches that are traced together has this many times the sequences of the smallest."""
_MOST_TOKENS: Final = 1 << 23
"""The most tokens of all sequences in a generation that is traced for several contexts."""
_INEXACT = "some steps differ slightly from the derived figures"


class GenerationRunCache(RunCache):
    """The generations of one model by variant and size: a batch, or the tokens of a context, new ones included.

    `generation` is the one in question; where the context varies, its prompt is where the search begins. No context is
    longer than the model has positions for. Traces of `generators` are used again. Raises `InputError` where the
    context varies and the prompt has no length, as with speech.
    """

    generates: ClassVar = True
    most_runs: ClassVar = 24
    """The scan of a state is padded to 256 tokens, or loops over them: forecasts only say about where the answer is."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        prompts: Prompts,
        generation: Generation,
        batch: int,
        vary: Vary,
        progress: Callable[[str], None],
        stack: Stack = INSTALLED,
        generators: Iterable[Generator] = (),
        whole: bool = False,
    ) -> None:
        inputs = replace(prompts(generation.prompt), batch_size=batch)
        super().__init__(name, model, inputs, training=False, vary=vary, progress=progress, stack=stack, whole=whole)
        if vary.context and have_own_length(prompts, generation.prompt):
            raise InputError(f"{name} reads an input of one length, whatever the prompt: its context does not vary")
        self.generation = generation
        self._prompts = prompts
        self._generators = {RunVariant(one.scenario, one.runner.gpu).run_key: one for one in generators}
        self._derives = vary.frontier or bool(self._generators)
        self._covered: set[tuple[Generator, Generation, int]] = set()

    @property
    def input_size(self) -> int:
        """The batch, or the context, of the generation in question."""
        whole = self.generation.prompt + self.generation.max_new_tokens
        return min(whole, self.most) if self.vary.context else self.model_inputs.batch_size

    @property
    def least(self) -> int:
        """The smallest possible size: for a context, the new tokens and one to begin with."""
        return self.generation.max_new_tokens + 1 if self.vary.context else 1

    @property
    def most(self) -> int:
        """The largest size to try: for a context, the number of the model's positions."""
        return (self.vary.context and positions(self.model)) or LIMIT

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report about the sizes to try."""
        note = f"the model has positions for {self.most:,} tokens: longer contexts were not tried"
        return (note,) if self.most < LIMIT else ()

    def _trace(self, variant: RunVariant, size: int) -> Run:
        assert variant.generation is not None, "only generations are run here"
        key = variant.run_key._replace(generation=None, sequences=None, split=1)
        if key not in self._generators:
            runner = self._runner(variant)
            edits = tuple(edit for edit in variant.edits if not isinstance(edit, ModelEdit))  # of trainings alone
            self._generators[key] = Generator(runner, self._prompts, variant.scenario, edits=edits)
        generation, batch, generator = variant.generation, -(-size // variant.split), self._generators[key]
        if self.vary.context:
            new = generation.max_new_tokens
            if size <= new:
                raise ForwardError(f"a context of {size} tokens has no room for a prompt and {new} new ones")
            generation = replace(generation, prompt=size - new)
            batch = variant.sequences or self.model_inputs.batch_size
            self._cover(generator, generation, batch, size)
        run = (generator.derive if self._derives else generator.run)(generation, batch)
        return run if run.exact else run.noted(_INEXACT)

    def _cover(self, generator: Generator, generation: Generation, batch: int, size: int) -> None:
        """Trace what all contexts of a batch (or of similar batches of a frontier) have in common, up to a size whose
        inputs are small themselves.
        """
        shortest, batches = replace(generation, prompt=_SHORT), [batch]
        if self.vary.frontier and batch > 1:  # a batch of 1 takes other code paths
            batches.append(min(_TOGETHER * batch, MOST_SEQUENCES))
        longest = min(self.most, max(_MOST_TOKENS // batches[-1], size)) - generation.max_new_tokens
        done = (generator, shortest, batch) in self._covered or generator.covers(generation, batch)
        if longest > _SHORT and not done:
            self._covered.add((generator, shortest, batch))
            with suppress(ForwardError, InputError):  # then each context is traced by itself
                generator.cover(shortest, batches, [_SHORT, longest], between=True, splits=0)
