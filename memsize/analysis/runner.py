"""`Runner`: runs of one model under scenarios, each of all layers or extended from short models.

What one run can spare the next is shared between them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from memsize.analysis.model_setups import ModelSetups, StorageKey, storage_key
from memsize.analysis.short_runs import ShortRuns
from memsize.depth.counters import Numbers, is_counting, numbers_of
from memsize.depth.repeated import FoldedPath
from memsize.depth.trace_extension import NotRepeatedError
from memsize.errors import ForwardError, MemsizeError
from memsize.kernels.cudnn.library import Plans
from memsize.model.input_tensors import ModelInputs
from memsize.model.stored import stored_tensors
from memsize.records.gpu import Card
from memsize.records.trace import StoredTensor, Trace
from memsize.spec.model_request import Call
from memsize.spec.scenario import SCENARIOS, Scenario
from memsize.spec.stack import INSTALLED, Stack
from memsize.torch_internals.isolation import forget_run
from memsize.torch_internals.module_tree import paths_of
from memsize.tracing.ddp import buckets_of
from memsize.tracing.module_calls import ModuleCallRecorder
from memsize.tracing.run import Setup
from memsize.workloads import Forward, Proof, Workload, kept_for_backward

Edit = Callable[[Setup], Setup]
"""Changes a meta copy that is ready to run; raises `memsize.analysis.remedies.NotApplicable`."""
Listener = Callable[[ModuleCallRecorder], None]


def _as_it_is(call: Call) -> Call:
    return call


class Runner(ModelSetups):
    """Any number of runs of one model with one input. With `whole` each of them runs all layers."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        inputs: ModelInputs,
        training: bool,
        *,
        gpu: Card | None = None,
        execute: bool = False,
        plans: Plans | None = None,
        stack: Stack = INSTALLED,
        whole: bool = False,
    ) -> None:
        super().__init__(name, model, inputs, training, gpu=gpu, execute=execute, plans=plans, stack=stack)
        self.whole = whole
        self.is_counting = False
        """Whether a run changed numbers that the model's code may decide by: one of its calls may be another."""
        self.short_runs = ShortRuns(model, self.copy)
        self._short_runners: dict[nn.Module, Runner] = {}
        self._proofs: dict[Hashable, Trace | None] = {}
        """By kind, the first run of a workload that proves itself; None where that is no proof."""
        self._stored: dict[StorageKey, tuple[StoredTensor, ...]] = {}

    def run(
        self,
        workload: Workload,
        scenario: Scenario,
        *,
        batch_size: int | None = None,
        resized: Callable[[Call], Call] = _as_it_is,
        edits: tuple[Edit, ...] = (),
        listener: Listener | None = None,
    ) -> Trace:
        """The trace of `workload` under `scenario`. `batch_size` overrides that of the inputs, `resized` changes their
        other sizes, `edits` change the copy that runs, and `listener` receives the calls that the run recorded, or a
        forward of the model as it is.

        A model that registers parameters or buffers in its forward is run once before, so that they are counted. Of a
        model with many blocks that are alike, two short models are run (`memsize.analysis.short_runs`). Raises
        `ScenarioError` or `ForwardError` where no run is possible.
        """
        make = partial(self._setup, scenario, batch_size, resized, edits)
        options = {"batch_size": batch_size, "resized": resized, "edits": edits}
        try:
            proof = None if self.whole or self.execute else workload.proof
            if proof is not None and workload == proof.workload and proof.kind not in self._proofs:
                # A single run takes no longer than its proof, and may be that of the runs that follow.
                trace = self._run(workload, make, scenario, listener)
                is_proof = scenario.recipe == "as-given" and batch_size is None and not edits
                self._proofs[proof.kind] = trace if is_proof and resized is _as_it_is else None
                return trace
            if proof is not None and self._is_proven(proof, listener):
                extended = self._extended(workload, scenario, options)
                if extended is not None:
                    return extended
            return self._run(workload, make, scenario, listener)
        finally:
            forget_run()

    def _extended(self, workload: Workload, scenario: Scenario, options: dict[str, Any]) -> Trace | None:
        """The trace of `workload` from the runs of short models; None where those don't tell."""
        skipped: dict[FoldedPath, str] = {}

        def run(model: nn.Module) -> Trace:
            trace = self._run_short(workload, scenario, model, **options)
            runner = self._short_runner(model)
            if scenario.name in runner.skipped_layers:
                skipped.update(self.short_runs.folded(model, runner.skipped_layers[scenario.name]))
            return trace

        trace = self.short_runs.extended(run, (workload, scenario, options["edits"]), workload.record)
        if trace is None:
            return None
        if skipped:
            self.skipped_layers[scenario.name] = self.short_runs.unfolded(trace, skipped)
        return replace(trace, notes=(*trace.notes, self.short_runs.note))

    def _is_proven(self, proof: Proof, listener: Listener | None) -> bool:
        """Whether runs of short models extend to those of the whole one, as one run of that shows."""
        if (
            self.whole
            or self.execute
            or self.late
            or self.is_counting
            or buckets_of(self.model) is not None
            or self.short_runs.blocks is None
        ):
            return False
        if proof.kind not in self.short_runs.refusals:
            own = SCENARIOS["as-given"]
            try:
                whole = self._proofs.get(proof.kind) or self._run(
                    proof.workload, partial(self.setup, own), own, listener
                )
            except MemsizeError as error:  # a proof that fails once is not tried for each run
                self.short_runs.refusals[proof.kind] = str(error)
                return False
            self._proofs[proof.kind] = None
            if self.late or self.is_counting:
                return False
            self.short_runs.prove(proof, whole, partial(self._run_short, proof.workload, own))
        return not self.short_runs.refusals[proof.kind]

    def _run_short(self, workload: Workload, scenario: Scenario, model: nn.Module, **options: Any) -> Trace:
        runner = self._short_runner(model)
        trace = runner.run(workload, scenario, **options)
        if runner.is_counting:
            raise NotRepeatedError("the model counts its calls")
        return trace

    def _short_runner(self, model: nn.Module) -> Runner:
        if model not in self._short_runners:
            self._short_runners[model] = Runner(
                self.name,
                model,
                self.inputs,
                self.training,
                gpu=self.gpu,
                plans=self.plans,
                stack=self.stack,
                whole=True,
            )
        return self._short_runners[model]

    def _setup(
        self, scenario: Scenario, batch_size: int | None, resized: Callable[[Call], Call], edits: tuple[Edit, ...]
    ) -> Setup:
        setup = self.setup(scenario, batch_size)
        setup = replace(setup, call=resized(setup.call))
        for edit in edits:
            setup = edit(setup)
        return setup

    def _run(
        self, workload: Workload, make: Callable[[], Setup], scenario: Scenario, listener: Listener | None
    ) -> Trace:
        setup = make()
        if listener is not None:
            setup = replace(setup, listener=listener)
        if scenario.recipe != "quantized" and not self.late:
            setup = replace(setup, stored=partial(self._stored_tensors, storage_key(scenario)))
        if not self.execute and (self.whole or self.short_runs.blocks is not None):
            setup = replace(setup, ended=partial(self._note_counting, numbers_of(setup.model)))
        before = _registered(setup.model)
        failed: ForwardError | None = None
        try:
            trace = workload.run(setup)
        except ForwardError as error:
            failed = error
        after = _registered(setup.model)
        if not self.late and len(after) > len(before):  # a wrapper inside the model gives them other names
            self.late = tuple(".".join(filter(None, name)) for name in after if name not in before)
            return self._run(workload, make, scenario, listener)
        if failed is not None:
            raise failed
        return trace

    def _note_counting(self, before: Numbers, model: nn.Module) -> None:
        self.is_counting = self.is_counting or is_counting(before, numbers_of(model))

    def with_inputs(self, inputs: ModelInputs, batch_size: int) -> Runner:
        """A runner of the same model with other inputs, of which it makes `batch_size`."""
        other = copy(self)
        other.inputs = replace(inputs, batch_size=batch_size)
        other._short_runners, other._proofs = {}, {}
        vars(other).pop("_inputs_are_cast", None)
        return other

    def kept_for_backward(self, scenario: Scenario, batch_size: int) -> int:
        """Bytes that one forward keeps for backward at a batch size, parameters apart."""
        if self._is_proven(Forward().proof, None):
            shorter, longer = (
                self._short_runner(model).kept_for_backward(scenario, batch_size) for model in self.short_runs.two
            )
            return shorter + (longer - shorter) * self.short_runs.left_out
        return kept_for_backward(self.setup(scenario, batch_size))

    def same_stored(self, scenario: Scenario, other: Scenario) -> None:
        """Reuse what `other` was found to store for what `scenario` stores."""
        self._stored[storage_key(scenario)] = self._stored[storage_key(other)]

    def _stored_tensors(self, storage: StorageKey, copied: nn.Module) -> tuple[StoredTensor, ...]:
        """The stored tensors of a copy; all copies with one `storage` key store the same."""
        if storage not in self._stored:
            self._stored[storage] = stored_tensors(copied)
        return self._stored[storage]


def _registered(model: nn.Module) -> list[tuple[str, str]]:
    """The parameters and buffers, each tensor by the path of its first module and its name there."""
    parameters: dict[int, tuple[str, str]] = {}
    buffers: dict[int, tuple[str, str]] = {}
    for module, path in paths_of(model).items():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                parameters.setdefault(id(tensor), (path, name))
        for name, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in parameters:
                buffers.setdefault(id(tensor), (path, name))
    return [*parameters.values(), *buffers.values()]
