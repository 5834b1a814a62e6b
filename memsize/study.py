"""One model under many scenarios: which runs are needed, what they showed, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from memsize.document import Report, ScenarioResult, Status
from memsize.errors import ForwardError, ScenarioError
from memsize.findings.evidence import Evidence
from memsize.findings.rules import findings
from memsize.fitting import Crossover, find_crossover
from memsize.folds import totals
from memsize.precision.modelled import modelled
from memsize.precision.recipes import Recipe, apply_scenario, floating_dtype, gpu_semantics
from memsize.record import Reading, Trace
from memsize.scenario import SCENARIOS, Scenario
from memsize.summaries import torchinfo_reading
from memsize.tracing.feed import Feed
from memsize.tracing.run import Setup, run_forward
from memsize.tracing.shadow import shadow

_AMP = ("amp-fp16", "amp-bf16")


class Study:
    """The runs of one model with one feed. A run is made when it is first asked for, and kept."""

    def __init__(self, name: str, model: nn.Module, feed: Feed, training: bool, say: Callable[[str], None]) -> None:
        self.name = name
        self.model = model
        self.feed = feed
        self.training = training
        self.say = say
        self._traces: dict[tuple[str, int], Trace] = {}
        self._left: dict[str, dict[str, str]] = {}

    def report(self, asked: Sequence[Scenario], *, default: bool, notes: Sequence[str] = ()) -> Report:
        """The report over the scenarios `asked`; `default` leaves out `as-given` where it is what fp32 is."""
        given = self.trace(SCENARIOS["as-given"])
        as_fp32 = is_float32(given)
        if as_fp32:
            self._traces["fp32", self.feed.batch_size] = replace(given, scenario="fp32")
        shown = [s for s in asked if not (default and as_fp32 and s.name == "as-given")]
        results = tuple(self.result(scenario) for scenario in shown)
        baseline = self.result(SCENARIOS["fp32"])
        return Report(
            model=self.name,
            trace=given,
            scenario_results=results,
            findings=findings(self._evidence(given, (*results, baseline))),
            notes=tuple(notes),
            baseline=baseline.totals,
        )

    def result(self, scenario: Scenario) -> ScenarioResult:
        """The figures of one scenario, or why it does not apply."""
        try:
            trace = self.trace(scenario)
        except (ScenarioError, ForwardError) as error:
            return ScenarioResult(scenario.name, scenario.title, "unavailable", _one_line(error))
        trace, reason = modelled(trace, scenario)
        status: Status = "modelled" if reason else "run"
        return ScenarioResult(scenario.name, scenario.title, status, reason, totals(trace), trace)

    def trace(self, scenario: Scenario, batch_size: int | None = None) -> Trace:
        """The run under a scenario; raises `ScenarioError` or `ForwardError` when there can be none."""
        batch = batch_size or self.feed.batch_size
        if (scenario.name, batch) not in self._traces:
            self.say(f"{scenario.name}, batch {batch}")
            self._traces[scenario.name, batch] = self._run(scenario, batch)
        return self._traces[scenario.name, batch]

    def _run(self, scenario: Scenario, batch: int) -> Trace:
        recipe = apply_scenario(shadow(self.model), scenario)
        if recipe.quantized:
            self._left[scenario.name] = dict(recipe.quantized.left)
        return run_forward(self._setup(scenario.name, recipe, batch))

    def _setup(self, scenario: str, recipe: Recipe, batch: int) -> Setup:
        return Setup(
            model=self.name,
            scenario=scenario,
            twin=recipe.twin,
            call=self.feed.call(batch, recipe.floating),
            training=self.training,
            batch_size=batch,
            semantics=gpu_semantics,
            autocast=recipe.autocast,
            rewrite=recipe.rewrite,
            sizes=recipe.sizes,
        )

    def _evidence(self, given: Trace, results: Sequence[ScenarioResult]) -> Evidence:
        runs = {result.name: result.trace for result in results if result.trace}
        amp = next((name for name in _AMP if name in runs), None)
        return Evidence(
            given=given,
            runs=runs,
            left={name: left for name, left in self._left.items() if name in runs},
            readings=self._readings(),
            crossover=self._crossover(amp) if amp and "fp32" in runs else None,
            amp=amp,
        )

    def _readings(self) -> tuple[Reading, ...]:
        self.say("torchinfo's reading")
        twin = shadow(self.model).train(self.training)
        reading = torchinfo_reading(twin, self.feed.call(floating=floating_dtype(twin)))
        return () if reading is None else (reading,)

    def _crossover(self, amp: str) -> Crossover | None:
        """Where `amp` begins to keep less than fp32; None where the batch cannot be changed."""
        if not self.feed.resizable:
            return None

        def kept(batch: int) -> tuple[int, int]:
            ours, others = (totals(self.trace(SCENARIOS[name], batch)) for name in ("fp32", amp))
            return ours.saved_bytes, others.saved_bytes

        try:
            return find_crossover(kept, self.feed.batch_size)
        except ForwardError:
            # The model does not run at some batch size on the way.
            return None


def is_float32(trace: Trace) -> bool:
    """Whether casting the model to float32 changes nothing that it stores or runs on."""
    held = [t for t in trace.tensors if t.kind != "attribute"]
    floats = {t.spec.dtype for t in held if getattr(torch, t.spec.dtype).is_floating_point}
    plain = not any(tensor.parts or tensor.wrapper or tensor.kind == "packed" for tensor in held)
    return plain and floats <= {"float32"}


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
