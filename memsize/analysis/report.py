"""The report on one model under many scenarios: the runs that it needs, what they showed, and what follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from importlib.metadata import version

import torch
from torch import nn

from memsize.analysis.findings.evidence import Crossover, Evidence, find_crossover
from memsize.analysis.findings.report_rules import RULES
from memsize.analysis.findings.unfinished_runs import interrupted
from memsize.analysis.model_setups import is_float32, own_autocast
from memsize.analysis.runner import Runner
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.gpu_estimate import Replays, estimate_gpu, phase_peaks
from memsize.errors import ForwardError, InputError, ScenarioError, exits_caught
from memsize.loading.building import wanted_inputs
from memsize.model.experts import active_parameters
from memsize.model.meta_copy import in_mode
from memsize.precision.quantized import BASE, is_adapter
from memsize.precision.recipes import floating_dtype
from memsize.processes.ctrl_c import found_kept
from memsize.processes.patches import collector_paused
from memsize.processes.workers import Workers
from memsize.ranks.strategies import how
from memsize.records.aggregates import totals
from memsize.records.codec import plain
from memsize.records.finding import Finding, join_names
from memsize.records.gpu import GpuEstimate
from memsize.records.report import Report, ScenarioResult
from memsize.records.trace import ToolReport, Trace
from memsize.spec.model_request import Call
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import SCENARIOS, Scenario
from memsize.spec.training import Training
from memsize.torch_internals.isolation import undisturbed
from memsize.torch_internals.pytree import paths_of
from memsize.tracing.ddp import bucket_bytes
from memsize.tracing.dispatch import MetaDispatchMode
from memsize.tracing.module_calls import ModuleCallRecorder
from memsize.tracing.run import stored_only, wants_shapes
from memsize.workloads import Forward, Inference
from memsize.workloads.pipeline_phases import phases_of

_AMP = ("amp-fp16", "amp-bf16")
_OWN, _FP32 = SCENARIOS["as-given"], SCENARIOS["fp32"]
_MANY_MODULES = 50
"""From here on a run is likely to take so long that other processes should help with the rest at once."""
_HEAD_START = 0.2
"""Seconds of CPU time that forking two processes takes."""


@dataclass
class _Parts:
    """The parts of a report that are finished, in any order, by scenario. `skipped_layers` are the layers that it left
    unquantized, as the `Runner` has them, and `notes` those that only the run on several GPUs could make. `trace` is
    the run of the model as it is, with torchinfo's `readings` of the model.
    """

    results: dict[str, ScenarioResult] = field(default_factory=dict)
    skipped_layers: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    trace: Trace | None = None
    readings: tuple[ToolReport, ...] = ()

    def add(self, part: _Parts) -> None:
        """Add a part. What the model showed as it is goes before what was run for fp32."""
        first, then = (self, part) if part.trace else (part, self)
        self.results = first.results | then.results
        self.skipped_layers = first.skipped_layers | then.skipped_layers
        self.notes = first.notes | then.notes
        if part.trace is not None:
            self.trace, self.readings = part.trace, part.readings


def numbered(progress: Callable[[str], None], names: Set[str]) -> Callable[[str], None]:
    """`progress` with a count behind each of `names` as they are begun, whatever their order: ``fp16, 3 of 7``."""
    begun: dict[str, int] = {}

    def counted(text: str) -> None:
        if text in names:
            text = f"{text}, {begun.setdefault(text, len(begun) + 1)} of {len(names)}"
        progress(text)

    return counted


@dataclass(eq=False)
class ReportBuilder:
    """The runs of a report. Each is made when it is first needed, and kept.

    `training` asks for training steps, which `parallel` spreads over several GPUs, `peaks` for the GPU estimate of each
    scenario, with the allocator set by `config`. `progress` is called with progress messages.
    """

    runner: Runner
    training: Training | None = None
    _: KW_ONLY
    parallel: Parallel | None = None
    peaks: bool = False
    config: AllocatorConfig | None = None
    progress: Callable[[str], None] = lambda _: None
    add_part: Callable[[_Parts], None] = lambda _: None
    _traces: dict[str, Trace] = field(default_factory=dict)
    _untrained: dict[str, str] = field(default_factory=dict)
    """By scenario: why its training steps fail although a forward runs."""
    _spread_notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _readable: nn.Module | None = None

    def __post_init__(self) -> None:
        self.peaks = self.peaks or self.training is not None
        self._replays = Replays(self.config, timeline=bool(phases_of(self.runner.model)))

    def build(self, scenarios: Sequence[Scenario], *, default: bool, notes: Sequence[str] = ()) -> Report:
        """The report over `scenarios`; `default` leaves out `as-given` where it is what fp32 is.

        Raises `Interrupted` with what was found, once the model as it is was run.
        """
        names = {_OWN.name, *(scenario.name for scenario in scenarios)} - {_FP32.name}
        parts = _Parts()

        def so_far() -> Report | None:
            if parts.trace is None:
                return None
            missing = [entry.name for entry in scenarios if entry is not _OWN and entry.name not in parts.results]
            return self._report(scenarios, notes, parts, crossover=None, missing=tuple(missing) or ("findings",))

        head_start = _HEAD_START if len(paths_of(self.runner.model)) < _MANY_MODULES else 0
        with (
            found_kept(so_far),
            collector_paused(),
            Workers(self, numbered(self.progress, names), parts.add, head_start=head_start) as workers,
        ):
            self.progress, self.add_part = workers.announce, workers.deliver
            others = [("shown", scenario) for scenario in scenarios if scenario not in (_OWN, _FP32)]
            # In float32, the model's own runs are those of fp32 too, and show both.
            likely = floating_dtype(self.runner.model) in (torch.float32, None) and not own_autocast(self.runner.model)
            work = [("own", scenarios, default), *others, *([] if likely else [("shown", _FP32)])]
            if self.runner.shares_runs:  # each worker would prove again what the first run shows
                workers.answers([work.pop(0)])
            workers.answers(work)
            if "fp32" not in parts.results:
                self.shown(_FP32)
            return self._report(scenarios, notes, parts, crossover=self._crossover(parts.results, workers))

    def _report(
        self,
        scenarios: Sequence[Scenario],
        notes: Sequence[str],
        parts: _Parts,
        crossover: Crossover | None,
        missing: tuple[str, ...] = (),
    ) -> Report:
        by_name, as_given = parts.results, parts.trace
        assert as_given is not None
        self.runner.skipped_layers |= parts.skipped_layers
        shown_results = tuple(by_name[scenario.name] for scenario in scenarios if scenario.name in by_name)
        fp32 = by_name.get("fp32")
        baseline = fp32.totals if fp32 else None
        if baseline is not None and any(t.wrapper or t.parts or t.kind == "packed" for t in as_given.tensors):
            # Casting does not undo quantization: those weights' float32 size is arithmetic.
            baseline = replace(baseline, parameter_bytes=4 * baseline.parameters)
        # fp32 is part of the evidence only as the run to compare with.
        runs = {result.name: result.trace for result in (*shown_results, *filter(None, [fp32])) if result.trace}
        # Workers finish in any order; findings come in the order of the scenarios.
        layers = self.runner.skipped_layers
        optimizer = self.training.optimizer_name if self.training else ""
        evidence = Evidence(
            as_given=as_given,
            runs=runs,
            skipped_layers={result.name: layers[result.name] for result in shown_results if result.name in layers},
            base=vars(self.runner.model).get(BASE, ""),
            hidden=frozenset(runs) - {result.name for result in shown_results},
            adapters=frozenset(path for path, module in self.runner.model.named_modules() if is_adapter(module)),
            readings=parts.readings,
            peaks={result.name: result.training for result in shown_results if result.training},
            inference={result.name: result.inference for result in shown_results if result.inference},
            untrained={result.name: result.untrained for result in shown_results if result.untrained},
            gpu=self.runner.gpu.name,
            gpu_bytes=self.runner.gpu.bytes,
            optimizer=optimizer,
            crossover=crossover,
            amp=next((name for name in _AMP if name in runs), None),
            buckets=bucket_bytes(self.runner.model),
            spread=self.parallel,
        )
        return Report(
            model=self.runner.name,
            trace=as_given,
            scenario_results=shown_results,
            findings=(*interrupted(missing), *RULES.findings(evidence)),
            notes=(*notes, *self._how(scenarios, parts.notes)),
            baseline=baseline,
            gpu=self.runner.gpu.name if self.peaks else "",
            optimizer=optimizer,
            allocator=json.dumps(plain(self.config)) if self.config else "",
            missing=missing,
            active_parameters=active_parameters(self.runner.model),
        )

    def own(self, scenarios: Sequence[Scenario], default: bool) -> None:
        """Find what the model shows as it is, and for fp32 where that is the same. Raises what its run raises."""
        trace = self.trace(_OWN)
        as_fp32 = is_float32(self.runner.model, trace)
        if as_fp32:
            self._traces["fp32"] = replace(trace, scenario="fp32")
            if _OWN.name in self._untrained:
                self._untrained["fp32"] = self._untrained[_OWN.name]
            if not any(tensor.kind == "attribute" for tensor in trace.tensors):  # a module may cast those itself
                self.runner.same_stored(_FP32, _OWN)
        wanted = [*([_OWN] if _OWN in scenarios and not (default and as_fp32) else []), *([_FP32] if as_fp32 else [])]
        results = {scenario.name: self.result(scenario) for scenario in wanted}
        self.add_part(_Parts(results, {}, self._spread_notes, trace, self.readings()))

    def shown(self, scenario: Scenario) -> None:
        """Find what the runs of one scenario show."""
        result, left = self.result(scenario), self.runner.skipped_layers.get(scenario.name)
        spread_notes = {name: notes for name, notes in self._spread_notes.items() if name == scenario.name}
        self.add_part(_Parts({scenario.name: result}, {} if left is None else {scenario.name: left}, spread_notes))

    def result(self, scenario: Scenario) -> ScenarioResult:
        """The figures of one scenario, or why it does not apply."""
        try:
            trace = self.trace(scenario)
        except (ScenarioError, ForwardError) as error:
            return ScenarioResult(scenario.name, title=scenario.title, status="unavailable", reason=_one_line(error))
        training = self._trained(trace, scenario)
        inference = None
        if self.peaks:
            # A model may run with gradients only; what it stores and keeps is still reported.
            with suppress(ForwardError):
                forward = self.runner.run(Inference(), scenario)
                inference = estimate_gpu(forward, self.runner.gpu, replays=self._replays)
                if phases := phases_of(self.runner.model):
                    peaks = phase_peaks(forward, self.runner.gpu, self._replays, phases)
                    inference = replace(inference, phases=tuple(peaks))
        return ScenarioResult(
            name=scenario.name,
            title=scenario.title,
            status="run",
            totals=totals(trace),
            trace=trace,
            inference=inference,
            training=training,
            untrained=self._untrained.get(scenario.name),
        )

    def _trained(self, trace: Trace, scenario: Scenario) -> GpuEstimate | None:
        if self.training is None or scenario.name in self._untrained:
            return None
        if self.parallel is not None:
            from memsize.workloads.parallel import ParallelSteps

            single_gpu = trace
            try:
                trace = self.runner.run(ParallelSteps(self.training, self.parallel, self.runner.gpu), scenario)
            except (ScenarioError, ForwardError, InputError) as error:
                self._untrained[scenario.name] = _one_line(error)
                return None
            single_gpu_notes = {*single_gpu.notes, *how(self.runner.model, self.parallel, scenario)}
            self._spread_notes[scenario.name] = tuple(note for note in trace.notes if note not in single_gpu_notes)
        return estimate_gpu(trace, self.runner.gpu, replays=self._replays)

    def _how(self, scenarios: Sequence[Scenario], spread_notes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
        if self.parallel is None:
            return
        able = [scenario for scenario in scenarios if not self.parallel.refuses(scenario)]
        yield from dict.fromkeys(note for scenario in able for note in how(self.runner.model, self.parallel, scenario))
        notes = {scenario.name: spread_notes[scenario.name] for scenario in able if scenario.name in spread_notes}
        for note in dict.fromkeys(note for own in notes.values() for note in own):
            of = tuple(name for name, own in notes.items() if note in own)
            yield note if len(of) == len(notes) else f"{join_names(of)}: {note}"
        yield f"layers are shown whole, as on one GPU, and so is inference; the training is {self.parallel}"

    def trace(self, scenario: Scenario) -> Trace:
        """The run under a scenario; raises `ScenarioError` or `ForwardError` when there can be none."""
        if scenario.name not in self._traces:
            self.progress(scenario.name)
            listener = self._observe if scenario.recipe == "as-given" else lambda _: None
            trace = None
            if self.training is not None and self.parallel is None:
                from memsize.workloads.training import TrainingSteps

                try:
                    trace = self.runner.run(TrainingSteps(self.training), scenario, listener=listener)
                except (ForwardError, InputError) as error:
                    # The forward alone may still run: then that is what the tables show.
                    self._untrained[scenario.name] = _one_line(error)
            if trace is None:
                trace = self.runner.run(Forward(), scenario, listener=listener)
            # What a run of a few layers extends to is long, and in columns already.
            self._traces[scenario.name] = trace if trace.extended_from else trace.in_rows()
        return self._traces[scenario.name]

    def _observe(self, calls: ModuleCallRecorder) -> None:
        """Note whether torchinfo may read the very copy that was run as it is."""
        grows = self.runner.late or wants_shapes(self.runner.model)
        is_simple = not grows and not self.runner.execute and calls.complete and counts_without_running(calls)
        self._readable = calls.seen[0].module if is_simple else None

    def readings(self) -> tuple[ToolReport, ...]:
        """torchinfo's reading of the model, where it has one; from those of short models if they show all layers."""
        self.progress("torchinfo's reading")
        if self._traces[_OWN.name].extended_from:
            read = cache(self._reading)

            def figure(name: str) -> int:
                return self.runner.affine(lambda short: getattr(read(short), name))

            with suppress(AttributeError):  # it cannot read one of them
                return (ToolReport(_torchinfo(), figure("parameters"), figure("parameter_bytes")),)
        if self._readable is not None:
            reading = torchinfo_reading(self._readable, ((), {}))
        else:
            reading = self._reading(self.runner)
        return () if reading is None else (reading,)

    def _reading(self, runner: Runner) -> ToolReport | None:
        copied = in_mode(runner.copy(), runner.training)
        return torchinfo_reading(copied, runner.inputs.call(floating=floating_dtype(copied)))

    def _crossover(self, results: Mapping[str, ScenarioResult], workers: Workers) -> Crossover | None:
        runs = {name: result.trace for name, result in results.items() if result.trace}
        names = ("fp32", next((name for name in _AMP if name in runs), ""))

        def saved(batch_size: int) -> tuple[int, int]:
            if batch_size == self.runner.inputs.batch_size:
                fp32, lower = (totals(runs[name]).saved_bytes for name in names)
            else:
                fp32, lower = workers.answers([("saved_bytes", SCENARIOS[name], batch_size) for name in names])
            return fp32, lower

        if not self.runner.inputs.resizable or not all(name in runs for name in names):
            return None
        try:
            return find_crossover(saved, self.runner.inputs.batch_size)
        except ForwardError:
            # The model does not run at some batch size on the way.
            return None

    def saved_bytes(self, scenario: Scenario, batch_size: int) -> int:
        """The bytes that a forward keeps for backward at a batch size."""
        self.progress(f"{scenario.name}, batch {batch_size}")
        return self.runner.kept_for_backward(scenario, batch_size)


def stored_report(name: str, model: nn.Module, notes: Sequence[str] = ()) -> Report:
    """The report on what a model stores, when there is no input to run it with, and what an input would add."""
    missing = Finding(
        "no-input", "Without an input, only stored bytes are known: {wanted}.", {"wanted": wanted_inputs(model)}
    )
    active = active_parameters(model)
    return Report(name, stored_only(name, model), findings=(missing,), notes=tuple(notes), active_parameters=active)


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


# -- a second opinion: torchinfo's -------------------------------------------------------------------------------------


def torchinfo_reading(model: nn.Module, call: Call) -> ToolReport | None:
    """The totals of `torchinfo.summary` for a meta copy, run on `meta`; None if it fails. Without arguments it does not
    run it, and adds up what is registered.
    """
    import torchinfo

    args, kwargs = call
    mode = "train" if model.training else "eval"
    try:
        with exits_caught(), undisturbed(), MetaDispatchMode():
            summary = torchinfo.summary(
                model, input_data=args or None, verbose=0, device="meta", mode=mode, cache_forward_pass=False, **kwargs
            )
    except Exception:  # torchinfo wraps whatever a model raises; that it has no answer is the answer
        return None
    return ToolReport(_torchinfo(), summary.total_params, summary.total_param_bytes)


def _torchinfo() -> str:
    return f"torchinfo {version('torchinfo')}"


def counts_without_running(calls: ModuleCallRecorder) -> bool:
    """Whether torchinfo counts the same for a model without running it as it does when it runs it: each module is
    registered once, is first called by the module that holds it, during that one's own first call, and returns tensors
    with dimensions, which its hooks want.
    """
    seen = calls.seen
    index = {layer.path: position for position, layer in enumerate(seen)}
    holders = [index[layer.path.rpartition(".")[0]] if layer.path else -1 for layer in seen]
    times = [0] * len(seen)
    for caller, called in calls.entered:
        if not times[called] and (caller != holders[called] or (caller >= 0 and times[caller] != 1)):
            return False
        times[called] += 1
    is_ordinary = all(layer.plain and all(output.spec.shape for output in layer.outputs) for layer in seen)
    registered = sum(1 for layer in seen for module in layer.module._modules.values() if module is not None)
    return registered == len(seen) - 1 and all(times) and is_ordinary
