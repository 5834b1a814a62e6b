"""`Runner`: runs of one model under scenarios, each of all layers or extended from short models.

What one run can spare the next is shared between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Set
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

from torch import nn

from memsize.analysis.model_setups import ModelEdit, ModelSetups, StorageKey, storage_key
from memsize.analysis.short_runs import ShortRuns, different_part
from memsize.depth.blocks import FoldedPath
from memsize.depth.likeness import is_counting, numbers_of
from memsize.depth.trace_extension import NotRepeatedError
from memsize.errors import ForwardError, MemsizeError
from memsize.model.input_tensors import ModelInputs
from memsize.model.tensor_storage import stored_tensors
from memsize.records.trace import StoredTensor, Trace
from memsize.spec.model_request import Call
from memsize.spec.scenario import SCENARIOS, Scenario
from memsize.torch_internals.isolation import forget_run
from memsize.torch_internals.pytree import paths_of
from memsize.tracing.ddp import buckets_of
from memsize.tracing.failure import looked_up_length
from memsize.tracing.module_calls import ModuleCallRecorder
from memsize.tracing.run import Setup
from memsize.workloads import Forward, Proof, Workload, kept_for_backward

T = TypeVar("T")
Edit = Callable[[Setup], Setup] | ModelEdit
"""Changes a meta copy that is ready to run; raises `memsize.analysis.remedies.NotApplicable`."""
Listener = Callable[[ModuleCallRecorder], None]


def _as_it_is(call: Call) -> Call:
    return call


@dataclass(frozen=True)
class _RunRequest:
    workload: Workload
    scenario: Scenario
    batch_size: int | None = None
    resized: Callable[[Call], Call] = _as_it_is
    edits: tuple[Edit, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether a run of all layers shows how they repeat in others as well, and need not be made again for that."""
        is_edited = self.edits or self.resized is not _as_it_is or self.scenario.recipe == "quantized"
        return not is_edited and self.workload.record is None and self.workload.apart is None

    @property
    def kind(self) -> Hashable:
        """The properties of a request on which it depends whether short runs extend."""
        return self.workload, self.edits


@dataclass(eq=False, kw_only=True)
class Runner(ModelSetups):
    """Any number of runs of one model with one input. With `whole` each of them runs all layers."""

    whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_counting = False
        """Whether a run changed numbers that the model's code may decide by: one of its calls may be another."""
        self.backward_code: Set[Hashable] = frozenset()
        """The behavior of functions that the backward of the last forward calls (`ModuleCallRecorder`)."""
        self.short_runs = ShortRuns(self.model, self._copier.copy)
        self._ran: weakref.ref[nn.Module] | None = None
        """The copy that ran last."""
        self._short_runners: dict[nn.Module, Runner] = {}
        self._stored: dict[StorageKey, tuple[StoredTensor, ...]] = {}
        self._whole: dict[Hashable, tuple[_RunRequest, Trace]] = {}
        """The first run of all layers, by the kind of its proof."""

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
        request = _RunRequest(workload, scenario, batch_size, resized, edits)
        uneven = any(getattr(edit, "tells_blocks_apart", False) for edit in edits)
        proof = None if self.whole or self.execute or scenario.compile or uneven else workload.proof
        try:
            if proof is None:
                return self._run(request, listener)
            if self._is_proven(proof, request, listener) and (extended := self._extended(request)):
                return extended
            trace = self._run(request, listener)
            self.short_runs.whole_runs[proof.kind] += 1
            if request.is_plain and proof.kind not in self.short_runs.refusals:
                self._whole.setdefault(proof.kind, (request, trace))
            return replace(trace, notes=(*trace.notes, *self.short_runs.refusal_notes(proof.kind, request.kind)))
        finally:
            forget_run(self._ran)

    def _extended(self, request: _RunRequest) -> Trace | None:
        skipped: dict[FoldedPath, str] = {}
        name = request.scenario.name
        apart = request.workload.apart

        def run(model: nn.Module) -> Trace:
            trace = self._run_short(request if apart is None else replace(request, workload=apart), model)
            layers = self._short_runner(model).skipped_layers.get(name, {})
            skipped.update(self.short_runs.folded(model, layers))
            return trace

        runs = cache(run)
        trace = self.short_runs.extended(runs, request.kind, request.workload.record)
        if trace is not None and apart is not None:
            trace = self._joined(request, trace, runs)
        if trace is None:
            return None
        if skipped:
            self.skipped_layers[name] = self.short_runs.unfolded(trace, skipped)
        return replace(trace, notes=(*trace.notes, self.short_runs.note))

    def _joined(self, request: _RunRequest, apart: Trace, runs: Callable[[nn.Module], Trace]) -> Trace | None:
        """Return the run of a workload whose short runs are those of another one, `runs`, which extend to `apart`; None
        where that of a short model is not the one that its run shows.
        """
        short = self.short_runs.shortest(apart)
        like = self._run_short(request, short)
        try:
            part = different_part(request.workload.joined(runs(short), like), like)
            if not part:
                return request.workload.joined(apart, like)
            reason = f"{part} of a short model are not as computed"
        except NotRepeatedError as error:
            reason = str(error)
        self.short_runs.refuse(request.kind, reason)
        return None

    def _is_proven(self, proof: Proof, request: _RunRequest, listener: Listener | None) -> bool:
        """Whether runs of short models extend to those of the whole one, as one run of that shows."""
        if self._counts(request) or self.late or buckets_of(self.model) is not None:
            return False
        refusals = self.short_runs.refusals
        if proof.kind not in refusals:
            first = self._whole.get(proof.kind)
            if not first and request.workload == proof.workload:
                return False  # it takes no longer than its proof
            if not self.short_runs.are_worthwhile(proof.kind, bool(first)):
                return False
            # As they are, or cast as the runs that follow: in half precision attention is fewer ops.
            is_cast = listener is None and request.scenario.recipe == "cast"
            scenario = request.scenario if is_cast else SCENARIOS["as-given"]
            proof_request = _RunRequest(proof.workload, scenario)
            try:
                proven, whole = first or (proof_request, self._run(proof_request, listener))
            except MemsizeError as error:  # a proof that fails once is not tried for each run
                refusals[proof.kind] = str(error)
                return False
            if self._counts(request) or self.late:
                return False
            code = self.backward_code
            refusals[proof.kind] = self.short_runs.refusal(whole, partial(self._run_short, proven), proven.kind)
            if not first and any(short.backward_code != code for short in self._short_runners.values()):
                refusals[proof.kind] = refusals[proof.kind] or "the backward calls functions that tell layers apart"
            self._whole.pop(proof.kind, None)
        return not refusals[proof.kind]

    def _counts(self, request: _RunRequest) -> bool:
        if self.is_counting:
            self.short_runs.refuse(request.kind, "the model counts its calls")
        return self.is_counting

    def _run_short(self, request: _RunRequest, model: nn.Module) -> Trace:
        runner = self._short_runner(model)
        try:
            trace = runner._run(request, None)
        finally:
            forget_run(runner._ran)
        if runner.is_counting:
            raise NotRepeatedError("the model counts its calls")
        return trace

    def _short_runner(self, model: nn.Module) -> Runner:
        if model not in self._short_runners:
            self._short_runners[model] = replace(self, model=model, whole=True)
        return self._short_runners[model]

    def _run(self, request: _RunRequest, listener: Listener | None) -> Trace:
        return self.looking_up(lambda: self._run_once(request, listener))

    def _run_once(self, request: _RunRequest, listener: Listener | None) -> Trace:
        before_scenario = tuple(edit for edit in request.edits if isinstance(edit, ModelEdit))
        setup = self.setup(request.scenario, request.batch_size, before_scenario)
        setup = replace(setup, call=request.resized(setup.call))
        for edit in request.edits:
            setup = setup if isinstance(edit, ModelEdit) else edit(setup)

        def listen(calls: ModuleCallRecorder) -> None:
            self.backward_code = calls.backward_code
            if listener is not None:
                listener(calls)

        setup = replace(setup, listener=listen)
        if not (request.scenario.name in self.skipped_layers or self.late or request.edits):  # which may freeze layers
            setup = replace(setup, stored=partial(self._stored_tensors, storage_key(request.scenario)))
        if self._shows_counting(request):
            numbers = numbers_of(setup.model)

            def note_counting(model: nn.Module) -> None:
                self.is_counting = self.is_counting or is_counting(numbers, numbers_of(model))

            setup = replace(setup, ended=note_counting)
        self._ran = weakref.ref(setup.model)
        before = _registered(setup.model)
        failed: ForwardError | None = None
        try:
            trace = request.workload.run(setup)
        except ForwardError as error:
            failed = error
        after = _registered(setup.model)
        if not self.late and len(after) > len(before):  # a wrapper inside the model gives them other names
            self.late = tuple(".".join(filter(None, name)) for name in after if name not in before)
            return self._run(request, listener)
        if failed is not None:
            raise failed
        return trace

    def looking_up(self, run: Callable[[], T]) -> T:
        """`run()`, a run of the model, repeated with integers for each input that an embedding could not look up.

        Raises the first `ForwardError` where integers do not help.
        """
        floating = self.inputs
        try:
            return run()
        except ForwardError as failed:
            length = looked_up_length(failed)
            integers = floating.with_token_ids(length) if length else None
            if integers is None:
                raise
            self.inputs = integers
            try:
                return self.looking_up(run)
            except ForwardError:
                self.inputs = floating
                raise failed from None

    def _shows_counting(self, request: _RunRequest) -> bool:
        """Whether to look for counters that a run changes: in that of a short model, and the first of each kind."""
        if self.execute or self.whole:
            return not self.execute
        kind = request.workload.proof and request.workload.proof.kind
        is_open = kind is not None and kind not in self._whole and kind not in self.short_runs.refusals
        return is_open and self.short_runs.blocks is not None

    def with_inputs(self, inputs: ModelInputs, batch_size: int) -> Runner:
        """A runner of the same model with other inputs, of which it makes `batch_size`."""
        other = copy(self)
        other.inputs = replace(inputs, batch_size=batch_size)
        other._short_runners, other._whole = {}, {}
        vars(other).pop("_inputs_are_cast", None)
        return other

    def kept_for_backward(self, scenario: Scenario, batch_size: int) -> int:
        """Bytes that one forward keeps for backward at a batch size, parameters apart."""
        forward = Forward()
        if not self.whole and not self.execute and self._is_proven(forward.proof, _RunRequest(forward, scenario), None):
            return self.affine(lambda short: short.kept_for_backward(scenario, batch_size))
        return kept_for_backward(self.setup(scenario, batch_size))

    def affine(self, figure: Callable[[Runner], int]) -> int:
        """Return a figure of the whole model from those of short ones, whose runs extend to those of the whole one."""
        return self.short_runs.affine(lambda model: figure(self._short_runner(model)))

    @property
    def shares_runs(self) -> bool:
        """Whether the runs of some layers may stand for those of all: what one run shows, the next need not."""
        return not self.whole and not self.execute and self.short_runs.blocks is not None

    def _stored_tensors(self, storage: StorageKey, copied: nn.Module) -> tuple[StoredTensor, ...]:
        if storage not in self._stored:
            self._stored[storage] = stored_tensors(copied)
        return self._stored[storage]

    def same_stored(self, scenario: Scenario, other: Scenario) -> None:
        """Reuse what `other` was found to store for what `scenario` stores."""
        self._stored[storage_key(scenario)] = self._stored[storage_key(other)]


def _registered(model: nn.Module) -> list[tuple[str, str]]:
    """The parameters and buffers, each tensor by the path of its first module and its name there."""
    parameters: dict[int, tuple[str, str]] = {}
    buffers: dict[int, tuple[str, str]] = {}
    for module, path in paths_of(model).items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters.setdefault(id(parameter), (path, name))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in parameters:
                buffers.setdefault(id(buffer), (path, name))
    return [*parameters.values(), *buffers.values()]
