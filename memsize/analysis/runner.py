"""Runs of one model under scenarios: how meta copies are made ready, and what one run can spare the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from memsize.analysis.short_runs import ShortRuns
from memsize.depth.counters import Numbers, is_counting, numbers_of
from memsize.depth.repeated import FoldedPath
from memsize.depth.trace_extension import NotRepeatedError
from memsize.device.cards import card
from memsize.device.cuda_libraries import cublas_workspace, cublaslt_workspace, keeps_cublaslt_workspace
from memsize.errors import ForwardError, MemsizeError
from memsize.kernels.convolution import ConvolutionWorkspaces
from memsize.kernels.cudnn.library import Plans
from memsize.loading.hubs import checkpoint_config_of
from memsize.loading.model_defined_step import model_defined_step_of
from memsize.model.input_tensors import ModelInputs
from memsize.model.materialize import executable, executable_call
from memsize.model.meta_copy import MetaCopier
from memsize.model.stored import stored_tensors
from memsize.model.tensor_storage import dtype_name
from memsize.precision.quantization_config import quantization_of
from memsize.precision.recipes import apply_scenario, floating_dtype
from memsize.records.finding import join_names
from memsize.records.gpu import DEFAULT_GPU, Card
from memsize.records.trace import StoredTensor, Trace
from memsize.spec.model_request import Call
from memsize.spec.scenario import SCENARIOS, Scenario
from memsize.spec.stack import INSTALLED, Stack
from memsize.torch_internals.isolation import forget_run, undisturbed
from memsize.tracing.ddp import buckets_of
from memsize.tracing.ledger import Workspaces
from memsize.tracing.module_calls import ModuleCallRecorder
from memsize.tracing.run import GpuSetup, Setup, give_shapes
from memsize.workloads import Forward, Proof, Workload, kept_for_backward

_CAST = "the floating inputs were cast to {}, which the model computes in: it does not run on them as they are given"
_LATE = "the forward registers {}: the model is shown as it is after a first forward"
_SCRIPTED = "TorchScript calls its layers unseen: what they return and keep stands in the row of {}"
_QUANTIZED = "its config says that weights are quantized ({}): as-given stores and runs them so"
_UNQUANTIZED = "its config says that weights are quantized ({}): they are shown as they are without that"
_EXECUTED = "the model was run for real on the CPU: kernels that only CUDA has are not in its figures"


@dataclass(frozen=True, slots=True)
class ModelEdit:
    """Changes a meta copy before a scenario does; raises `memsize.analysis.remedies.NotApplicable`."""

    change: Callable[[nn.Module], None]


Edit = Callable[[Setup], Setup] | ModelEdit
"""Changes a meta copy that is ready to run; raises `memsize.analysis.remedies.NotApplicable`."""
Listener = Callable[[ModuleCallRecorder], None]

_StorageKey = tuple[str | None, bool]
"""How a scenario holds the parameters, unless it quantizes them: their dtype, and whether norms stay as they are."""


def _as_it_is(call: Call) -> Call:
    return call


class Runner:
    """One model with one input, and any number of runs of it on `gpu` (None: the default card).

    Each run has its own copy of the model, so that no run sees what another did. `execute` really computes, on the CPU.
    `plans` give the workspaces that cuDNN takes for convolutions; without them those workspaces are left out. `stack`
    is the software on that card.
    """

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
        self.name = name
        self.model = model
        self.inputs = inputs
        self.training = training
        self.gpu = gpu or card(DEFAULT_GPU)
        self.execute = execute
        self.plans = plans
        self.stack = stack
        self.whole = whole
        self.skipped_layers: dict[str, dict[str, str]] = {}
        """By scenario: the layers that it left unquantized, and why."""
        self.late: tuple[str, ...] = ()
        """The parameters and buffers that the forward was found to register."""
        self.is_counting = False
        """Whether a run changed numbers that the model's code may decide by: one of its calls may be another."""
        self._copier = MetaCopier(model)
        self.short_runs = ShortRuns(model, self.copy)
        self._short_runners: dict[nn.Module, Runner] = {}
        self._proofs: dict[Hashable, Trace | None] = {}
        """By kind, the first run of a workload that proves itself; None where that is no proof."""
        self._stored: dict[_StorageKey, tuple[StoredTensor, ...]] = {}

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
            proof = None if self.whole or self.execute else getattr(workload, "proof", None)
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

        record = getattr(workload, "record", None)
        trace = self.short_runs.extended(run, (workload, scenario, options["edits"]), record and record.extend)
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
        before = tuple(edit for edit in edits if isinstance(edit, ModelEdit))
        setup = self.setup(scenario, batch_size, before)
        setup = replace(setup, call=resized(setup.call))
        for edit in edits:
            setup = setup if isinstance(edit, ModelEdit) else edit(setup)
        return setup

    def _run(
        self, workload: Workload, make: Callable[[], Setup], scenario: Scenario, listener: Listener | None
    ) -> Trace:
        setup = make()
        if listener is not None:
            setup = replace(setup, listener=listener)
        if not self.execute:
            setup = replace(setup, ended=partial(self._note_counting, numbers_of(setup.model)))
        before = _registered(setup.model)
        failed: ForwardError | None = None
        try:
            trace = workload.run(setup)
        except ForwardError as error:
            failed = error
        after = _registered(setup.model)
        if not self.late and len(after) > len(before):  # a wrapper inside the model gives them other names
            self.late = tuple(name for name in after if name not in before)
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

    def copy(self) -> nn.Module:
        """A meta copy of the model as it is."""
        return self._copier.copy()

    def same_stored(self, scenario: Scenario, other: Scenario) -> None:
        """Reuse what `other` was found to store for what `scenario` stores."""
        self._stored[_storage_key(scenario)] = self._stored[_storage_key(other)]

    def _stored_tensors(self, storage: _StorageKey, copied: nn.Module) -> tuple[StoredTensor, ...]:
        """The stored tensors of a copy; all copies with one `storage` key store the same."""
        if storage not in self._stored:
            self._stored[storage] = stored_tensors(copied)
        return self._stored[storage]

    def setup(self, scenario: Scenario, batch_size: int | None = None, edits: tuple[ModelEdit, ...] = ()) -> Setup:
        """A fresh copy with these `edits`, ready to run under the scenario; `batch_size` overrides the inputs'."""
        batch_size = self.inputs.batch_size if batch_size is None else batch_size
        if scenario.recipe == "as-given":
            scenario = replace(scenario, autocast=own_autocast(self.model))
        copied = executable(self.model) if self.execute else self.copy()
        if not self.execute:
            # What a recipe does to a layer follows from its shapes.
            give_shapes(
                copied, self.inputs.call(batch_size, floating_dtype(copied)), self.training, always=bool(self.late)
            )
        for edit in edits:
            edit.change(copied)
        recipe = apply_scenario(copied, scenario)
        if recipe.quantized:
            self.skipped_layers[scenario.name] = dict(recipe.quantized.left)
        is_shared = recipe.quantized is None and not edits and not self.late
        call = self.call(scenario, recipe.floating, batch_size)
        if self.execute:
            with undisturbed():
                call = executable_call(call)
        return Setup(
            name=self.name,
            device="cpu" if self.execute else "meta",
            notes=self._notes(scenario),
            scenario=scenario.name,
            model=recipe.model,
            call=call,
            training=self.training,
            batch_size=batch_size,
            precision=recipe.precision,
            gpu=GpuSetup(self.gpu.capability, workspaces(self.gpu, self.plans, self.stack), self.stack),
            buckets=buckets_of(self.model),
            stored=partial(self._stored_tensors, _storage_key(scenario)) if is_shared else stored_tensors,
        )

    def call(self, scenario: Scenario, floating: torch.dtype | None, batch_size: int | None = None) -> Call:
        """The arguments of one call under `scenario`, whose floating inputs come in `floating`.

        A model as it is gets inputs of the dtypes that the user chose, unless it does not run on them.
        """
        as_chosen = scenario.recipe == "as-given" and not self._inputs_are_cast
        return self.inputs.call(batch_size, floating, typed_too=not as_chosen)

    def _notes(self, scenario: Scenario) -> tuple[str, ...]:
        floating = self._given_floating if scenario.recipe == "as-given" and self._inputs_are_cast else None
        cast = (_CAST.format(dtype_name(floating)),) if floating is not None else ()
        hidden = (_SCRIPTED.format(join_names(_outermost(self._scripted))),) if self._scripted else ()
        stored = (_quantized_note(self.model),) if scenario.recipe == "as-given" else ()
        late = (_LATE.format(join_names(self.late)),) if self.late else ()
        stack = self.stack.note(str(torch.__version__))
        return (
            *cast,
            *hidden,
            *late,
            *filter(None, (*stored, _EXECUTED if self.execute else None, self.gpu.note, stack)),
        )

    @cached_property
    def _scripted(self) -> tuple[str, ...]:
        return tuple(path for path, module in self.model.named_modules() if _hides_layers(module))

    @cached_property
    def _given_floating(self) -> torch.dtype | None:
        return floating_dtype(self.model)

    @cached_property
    def _inputs_are_cast(self) -> bool:
        """Whether the model as it is needs floating inputs of its own dtype instead of those that it is given."""
        if self._given_floating is None or self.inputs.typed_dtypes() <= {self._given_floating}:
            return False
        call = self.inputs.call(floating=self._given_floating, typed_too=False)
        try:
            kept_for_backward(
                Setup(self.name, scenario="as-given", model=self.copy(), call=call, training=self.training)
            )
        except ForwardError:
            return True
        return False


def plans_of(card: Card, stack: Stack = INSTALLED) -> Plans:
    """The convolution workspaces on a card, by the stack's cuDNN if this machine has it, else by another one."""
    from memsize.kernels.cudnn.installed import installed

    return Plans(card.capability, partial(installed, stack.cudnn_release), wanted=stack.cudnn_release)


def workspaces(gpu: Card, plans: Plans | None = None, stack: Stack = INSTALLED) -> Workspaces:
    """The workspaces that the libraries of a software stack would take on a card."""
    version = stack.torch or str(torch.__version__)
    return Workspaces(
        cublas_workspace(gpu.capability, torch_version=version),
        lt=cublaslt_workspace(version),
        convolutions=ConvolutionWorkspaces.on(plans) if plans else None,
        keeps_lt=keeps_cublaslt_workspace(version),
    )


def own_autocast(model: nn.Module) -> str | None:
    """The lower precision of autocast that the training step of the model's own runs in; None where there is none."""
    step = model_defined_step_of(model)
    return step.autocast if step else None


def _quantized_note(model: nn.Module) -> str | None:
    """A note on the weights of a quantized checkpoint; None for another model."""
    config, quantization = checkpoint_config_of(model), quantization_of(model)
    if config is None:
        return None
    if quantization is not None:
        return _QUANTIZED.format(quantization.method)
    method = config.get("quant_method", "some method") if isinstance(config, dict) else "some method"
    return _UNQUANTIZED.format(method)


def is_float32(model: nn.Module, trace: Trace) -> bool:
    """Whether `model`, of which `trace` is a run as it is, in float32 would store and run on just the same."""
    if own_autocast(model):
        return False
    registered = [t for t in trace.tensors if t.kind != "attribute"]
    floats = {t.spec.dtype for t in registered if getattr(torch, t.spec.dtype).is_floating_point}
    plain = not any(tensor.parts or tensor.wrapper or tensor.kind == "packed" for tensor in registered)
    return plain and floats <= {"float32"}


def _storage_key(scenario: Scenario) -> _StorageKey:
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
        for collected, own in zip(names, (module._parameters, module._buffers), strict=True):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in met:
                    met.add(id(tensor))
                    collected.append(f"{path}.{name}" if path else name)
    return [*names[0], *names[1]]
