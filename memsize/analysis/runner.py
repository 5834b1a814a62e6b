"""One model under many scenarios: which runs are needed, what they showed, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from memsize.analysis.crossover import Crossover, find_crossover
from memsize.analysis.findings.evidence import Evidence
from memsize.analysis.findings.report import RULES
from memsize.analysis.torchinfo import counts_without_running, torchinfo_reading
from memsize.cuda.convolution import Convolutions
from memsize.cuda.cudnn.plans import Plans
from memsize.device.cards import card
from memsize.device.config import AllocatorConfig
from memsize.device.gpu_estimate import outlook
from memsize.device.workspace import cublas_workspace, cublaslt_workspace
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.internals.isolation import collector_paused
from memsize.model.inputs import Feed
from memsize.model.materialize import executable, executable_call
from memsize.model.meta_copy import Mould, in_mode
from memsize.model.stored import stored_tensors
from memsize.precision.modelled import modelled
from memsize.precision.recipes import apply_scenario, floating_dtype
from memsize.records.aggregates import Totals, totals
from memsize.records.finding import join_names
from memsize.records.gpu import DEFAULT_GPU, Card, Outlook
from memsize.records.report import Report, ScenarioResult
from memsize.records.trace import Reading, StoredTensor, Trace
from memsize.spec.scenario import SCENARIOS, Scenario
from memsize.spec.training import Training
from memsize.tracing.ddp import bucket_bytes, buckets_of
from memsize.tracing.ledger import Workspaces
from memsize.tracing.module_calls import Calls
from memsize.tracing.run import Setup, give_shapes, gpu_semantics, wants_shapes
from memsize.workloads.inference import kept_for_backward, run_forward, run_inference
from memsize.workloads.training import run_own_step, run_training

_AMP = ("amp-fp16", "amp-bf16")
_CAST = "the floating inputs were cast to {}, which the model computes in: it does not run on them as they are given"
_LATE = "the forward registers {}: the model is shown as it is after a first forward"
_SCRIPTED = "TorchScript calls its layers unseen: what they return and keep stands in the row of {}"
_EXECUTED = "the model was run for real on the CPU: kernels that only CUDA has are not in its figures"


_HeldAs = tuple[str | None, bool]
"""How a scenario holds the parameters, unless it quantizes them: their dtype, and whether norms stay as they are."""


class Study:
    """The runs of one model with one feed. A run is made when it is first asked for, and kept.

    `plans` tell what cuDNN takes for convolutions; without them their workspaces are left out.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        feed: Feed,
        training: bool,
        say: Callable[[str], None],
        gpu: Card | None = None,
        trained: Training | None = None,
        execute: bool = False,
        config: AllocatorConfig | None = None,
        plans: Plans | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.feed = feed
        self.training = training
        self.say = say
        self.gpu = gpu or card(DEFAULT_GPU)
        self.trained = trained
        self.execute = execute
        self.config = config
        self.plans = plans
        self.peaks = gpu is not None or trained is not None
        self._untrained: dict[str, str] = {}
        self._late: tuple[str, ...] = ()
        self._traces: dict[str, Trace] = {}
        self._left: dict[str, dict[str, str]] = {}
        self._mould = Mould(model)
        self._stored: dict[_HeldAs, tuple[StoredTensor, ...]] = {}
        self._readable: nn.Module | None = None

    def report(self, asked: Sequence[Scenario], *, default: bool, notes: Sequence[str] = ()) -> Report:
        """The report over the scenarios `asked`; `default` leaves out `as-given` where it is what fp32 is."""
        with collector_paused():
            return self._report(asked, default, notes)

    def _report(self, asked: Sequence[Scenario], default: bool, notes: Sequence[str]) -> Report:
        given = self.trace(SCENARIOS["as-given"])
        as_fp32 = is_float32(given)
        if as_fp32:
            self._traces["fp32"] = replace(given, scenario="fp32")
            if not any(tensor.kind == "attribute" for tensor in given.tensors):  # a module may cast those itself
                self._stored[_held_as(SCENARIOS["fp32"])] = self._stored[_held_as(SCENARIOS["as-given"])]
        shown = [s for s in asked if not (default and as_fp32 and s.name == "as-given")]
        results = tuple(self.result(scenario) for scenario in shown)
        baseline = self.result(SCENARIOS["fp32"])
        return Report(
            model=self.name,
            trace=given,
            scenario_results=results,
            findings=RULES.findings(self._evidence(given, (*results, baseline))),
            notes=tuple(notes),
            baseline=_as_float32(baseline.totals, given),
            gpu=self.gpu.name if self.peaks else "",
            optimizer=self._optimizer(),
        )

    def result(self, scenario: Scenario) -> ScenarioResult:
        """The figures of one scenario, or why it does not apply."""
        try:
            trace = self.trace(scenario)
        except (ScenarioError, ForwardError) as error:
            return ScenarioResult(scenario.name, scenario.title, "unavailable", _one_line(error))
        trained = self.trained and scenario.name not in self._untrained
        training = outlook(trace, config=self.config) if trained and not scenario.is_modelled else None
        trace, reason = modelled(trace, scenario)
        return ScenarioResult(
            scenario.name,
            scenario.title,
            "modelled" if reason else "run",
            reason,
            totals(trace),
            trace,
            inference=self._inference(scenario) if self.peaks else None,
            training=training,
            untrained=self._untrained.get(scenario.name),
        )

    def _inference(self, scenario: Scenario) -> Outlook | None:
        """What a GPU would show of one forward without gradients; None where its activations are only modelled."""
        if scenario.is_modelled:
            return None
        try:
            return outlook(run_inference(self.prepared(scenario, self.feed.batch_size)))
        except ForwardError:
            # A model may run with gradients only; what it stores and keeps is told all the same.
            return None

    def _optimizer(self) -> str:
        if self.trained is None:
            return ""
        kind = self.trained.optimizer
        return kind if isinstance(kind, str) else getattr(kind, "__name__", "the given optimizer")

    def trace(self, scenario: Scenario) -> Trace:
        """The run under a scenario; raises `ScenarioError` or `ForwardError` when there can be none."""
        if scenario.name not in self._traces:
            self.say(scenario.name)
            self._traces[scenario.name] = self._run(scenario)
        return self._traces[scenario.name]

    def _kept(self, scenario: Scenario, batch: int) -> int:
        """What a forward keeps for backward at a batch size."""
        if batch == self.feed.batch_size:
            return totals(self.trace(scenario)).saved_bytes
        self.say(f"{scenario.name}, batch {batch}")
        return kept_for_backward(self.prepared(scenario, batch))

    def run(self, scenario: Scenario, step: Callable[..., Any] | None, steps: int) -> Trace:
        """One run for its own sake: the user's own loop, training steps, or an inference where none are asked for."""

        def once(setup: Setup) -> Trace:
            if step is not None:
                return run_own_step(setup, step, steps)
            return run_inference(setup) if self.trained is None else run_training(setup, self.trained)

        return self._settled(once, scenario)

    def _run(self, scenario: Scenario) -> Trace:
        if (training := self.trained) is not None:
            try:
                return self._settled(lambda setup: run_training(setup, training), scenario)
            except (ForwardError, InputError) as error:
                # The forward alone may still run: then that is what the tables show.
                self._untrained[scenario.name] = _one_line(error)
        return self._settled(run_forward, scenario)

    def _sharing(self, setup: Setup, scenario: Scenario) -> Setup:
        """A setup whose twin is as `prepared` made it, with what other runs of this study may take from it, or gave."""
        if scenario.recipe == "as-given":
            setup = replace(setup, listener=self._heard)
        if scenario.recipe == "quantized" or self._late:
            return setup
        return replace(setup, stored=partial(self._stored_tensors, _held_as(scenario)))

    def _stored_tensors(self, held: _HeldAs, twin: nn.Module) -> tuple[StoredTensor, ...]:
        """What a twin stores that is held so; all such twins store the same."""
        if held not in self._stored:
            self._stored[held] = stored_tensors(twin)
        return self._stored[held]

    def _heard(self, calls: Calls) -> None:
        """The model was run as it is. Where torchinfo need not run it as well, it may read the same twin."""
        grows = self._late or wants_shapes(self.model)
        is_simple = not grows and not self.execute and calls.complete and counts_without_running(calls)
        self._readable = calls.seen[0].module if is_simple else None

    def _settled(self, run: Callable[[Setup], Trace], scenario: Scenario) -> Trace:
        """The run of a twin that registers nothing any more: a model that does so in its forward is run once before."""
        setup = self._sharing(self.prepared(scenario, self.feed.batch_size), scenario)
        before = set(_registered(setup.twin))
        failed: ForwardError | None = None
        try:
            trace = run(setup)
        except ForwardError as error:
            failed = error
        if not self._late and (late := [name for name in _registered(setup.twin) if name not in before]):
            self._late = tuple(late)
            return self._settled(run, scenario)
        if failed is not None:
            raise failed
        return trace

    def prepared(self, scenario: Scenario, batch: int) -> Setup:
        """A fresh twin, ready to be run under the scenario."""
        twin = executable(self.model) if self.execute else self._mould.cast()
        if not self.execute:
            # What a recipe does to a layer follows from its shapes.
            give_shapes(twin, self.feed.call(batch, floating_dtype(twin)), self.training, always=bool(self._late))
        recipe = apply_scenario(twin, scenario)
        if recipe.quantized:
            self._left[scenario.name] = dict(recipe.quantized.left)
        as_given = scenario.recipe == "as-given"
        call = self.feed.call(batch, recipe.floating, typed_too=not as_given or self._inputs_are_cast)
        return Setup(
            model=self.name,
            device="cpu" if self.execute else "meta",
            notes=self._notes(as_given),
            scenario=scenario.name,
            twin=recipe.twin,
            call=executable_call(call) if self.execute else call,
            training=self.training,
            batch_size=batch,
            semantics=partial(gpu_semantics, capability=self.gpu.capability),
            autocast=recipe.autocast,
            rewrite=recipe.rewrite,
            sizes=recipe.sizes,
            masters=scenario.master_weights,
            scaled=scenario.autocast == "float16",
            buckets=buckets_of(self.model),
            workspaces=workspaces(self.gpu, self.plans),
        )

    def _notes(self, as_given: bool) -> tuple[str, ...]:
        cast = (_CAST.format(_name(self._given_floating)),) if as_given and self._inputs_are_cast else ()
        hidden = (_SCRIPTED.format(join_names(_outermost(self._scripted))),) if self._scripted else ()
        late = (_LATE.format(join_names(self._late)),) if self._late else ()
        return (*cast, *hidden, *late, *filter(None, (_EXECUTED if self.execute else None, self.gpu.note)))

    @cached_property
    def _scripted(self) -> tuple[str, ...]:
        return tuple(path for path, module in self.model.named_modules() if _hides_layers(module))

    @cached_property
    def _given_floating(self) -> torch.dtype | None:
        return floating_dtype(self.model)

    @cached_property
    def _inputs_are_cast(self) -> bool:
        """Whether the model as it is needs floating inputs of its own dtype instead of those that it is given."""
        if self._given_floating is None or self.feed.typed_dtypes() <= {self._given_floating}:
            return False
        call = self.feed.call(floating=self._given_floating, typed_too=False)
        try:
            kept_for_backward(Setup(self.name, "as-given", self._mould.cast(), call, self.training))
        except ForwardError:
            return True
        return False

    def _evidence(self, given: Trace, results: Sequence[ScenarioResult]) -> Evidence:
        runs = {result.name: result.trace for result in results if result.trace}
        amp = next((name for name in _AMP if name in runs), None)
        return Evidence(
            given=given,
            runs=runs,
            left={name: left for name, left in self._left.items() if name in runs},
            readings=self._readings(),
            peaks={result.name: result.training for result in results if result.training},
            optimizer=self._optimizer(),
            crossover=self._crossover(amp) if amp and "fp32" in runs else None,
            amp=amp,
            buckets=bucket_bytes(self.model),
        )

    def _readings(self) -> tuple[Reading, ...]:
        self.say("torchinfo's reading")
        if self._readable is not None:
            reading = torchinfo_reading(self._readable, ((), {}))
        else:
            twin = in_mode(self._mould.cast(), self.training)
            reading = torchinfo_reading(twin, self.feed.call(floating=floating_dtype(twin)))
        return () if reading is None else (reading,)

    def _crossover(self, amp: str) -> Crossover | None:
        """Where `amp` begins to keep less than fp32; None where the batch cannot be changed."""
        if not self.feed.resizable:
            return None

        def kept(batch: int) -> tuple[int, int]:
            return self._kept(SCENARIOS["fp32"], batch), self._kept(SCENARIOS[amp], batch)

        try:
            return find_crossover(kept, self.feed.batch_size)
        except ForwardError:
            # The model does not run at some batch size on the way.
            return None


def workspaces(gpu: Card, plans: Plans | None = None) -> Workspaces:
    """What the libraries of the installed torch would take on a card."""
    version = str(torch.__version__)
    blas = cublas_workspace(gpu.capability, torch_version=version)
    return Workspaces(blas, cublaslt_workspace(torch_version=version), Convolutions.on(plans) if plans else None)


def _as_float32(baseline: Totals | None, given: Trace) -> Totals | None:
    """What percentages compare with. Casting does not turn quantized weights back: their float32 size is arithmetic."""
    if baseline is None or not any(t.wrapper or t.parts or t.kind == "packed" for t in given.tensors):
        return baseline
    return replace(baseline, parameter_bytes=4 * baseline.parameters)


def is_float32(trace: Trace) -> bool:
    """Whether casting the model to float32 changes nothing that it stores or runs on."""
    held = [t for t in trace.tensors if t.kind != "attribute"]
    floats = {t.spec.dtype for t in held if getattr(torch, t.spec.dtype).is_floating_point}
    plain = not any(tensor.parts or tensor.wrapper or tensor.kind == "packed" for tensor in held)
    return plain and floats <= {"float32"}


def _held_as(scenario: Scenario) -> _HeldAs:
    return scenario.dtype, scenario.keep_norms


def _hides_layers(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.children())


def _outermost(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path for path in paths if not any(path.startswith(f"{o}." if o else "") for o in paths if o != path))


def _registered(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers, each tensor by its first one."""
    met: set[int] = set()
    names: tuple[list[str], list[str]] = ([], [])
    for path, module in model.named_modules():
        for found, own in zip(names, (module._parameters, module._buffers), strict=True):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in met:
                    met.add(id(tensor))
                    found.append(f"{path}.{name}" if path else name)
    return [*names[0], *names[1]]


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
