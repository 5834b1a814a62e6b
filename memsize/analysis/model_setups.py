"""`ModelSetups`: meta copies of one model, made ready to run with its inputs under scenarios."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from memsize.device.cards import card, multiprocessors
from memsize.device.cuda_libraries import cublas_workspace, cublaslt_workspace, keeps_cublaslt_workspace
from memsize.errors import ForwardError, ScenarioError
from memsize.kernels.convolution_workspaces import ConvolutionWorkspaces
from memsize.kernels.cudnn.plans import Plans
from memsize.loading.hubs import checkpoint_config_of
from memsize.loading.model_defined_step import model_defined_step_of
from memsize.model.input_tensors import ModelInputs
from memsize.model.materialize import executable, executable_call
from memsize.model.meta_copy import MetaCopier, compiled_parts
from memsize.model.tensor_storage import dtype_name
from memsize.precision.quantization_config import quantization_of
from memsize.precision.recipes import apply_scenario, floating_dtype
from memsize.records.finding import join_names
from memsize.records.gpu import DEFAULT_GPU, Card
from memsize.records.trace import Trace
from memsize.spec.model_request import Call
from memsize.spec.scenario import CompileMode, Scenario
from memsize.spec.stack import INSTALLED, NEWEST, Stack, release
from memsize.torch_internals.isolation import undisturbed
from memsize.tracing.ddp import buckets_of
from memsize.tracing.ledger import Workspaces
from memsize.tracing.run import GpuSetup, Run, Setup, give_shapes
from memsize.workloads import kept_for_backward

_LOOKED_UP = "{}: int64, as nn.Embedding needs"
_CAST = "floating-point inputs were cast to {}, the model's dtype: it does not run on them as given"
_LATE = "the forward registers {}: the model is shown as it is after a first forward"
_SCRIPTED = "TorchScript hides calls of its layers: their outputs and saved tensors are in the row of {}"
_QUANTIZED = "its config says that weights are quantized ({}): as-given stores and runs them that way"
_UNQUANTIZED = "its config says that weights are quantized ({}): they are shown unquantized"
_COMES_COMPILED = "scenarios with +compile compile what the model compiles itself: {}"
_UNCOMPILED = (
    "torch.compile is ignored in scenarios without +compile: --compile (compile=True) shows what it changes in each"
)
_NO_COMPILER = "PyTorch's compiler cannot be imported: {}"
_HIDDEN = ", since `import triton` finds {}: rename that file, which torch.compile meets in a program beside it too"
_EXECUTED = "the model was run with real values on the CPU: its figures lack kernels that only CUDA has"

StorageKey = tuple[str | None, bool]
"""How a scenario holds the parameters, unless it quantizes them: their dtype, and whether norms stay as they are."""


@dataclass(frozen=True, slots=True)
class ModelEdit:
    """Changes a meta copy before a scenario does; raises `memsize.analysis.remedies.NotApplicable`."""

    change: Callable[[nn.Module], None]


@dataclass(eq=False)
class ModelSetups:
    """One model with one input, and the setups of its runs on `gpu`.

    Each setup has its own copy of the model, so that no run sees what another did. With `execute` it really computes,
    on the CPU. `plans` give the workspaces that cuDNN takes for convolutions; without them those workspaces are left
    out. `stack` is the software on that card.
    """

    name: str
    model: nn.Module
    inputs: ModelInputs
    training: bool
    _: KW_ONLY
    gpu: Card = field(default_factory=partial(card, DEFAULT_GPU))
    execute: bool = False
    plans: Plans | None = None
    stack: Stack = INSTALLED
    skipped_layers: dict[str, dict[str, str]] = field(default_factory=dict, init=False)
    """By scenario: the layers that it left unquantized, and why."""
    late: tuple[str, ...] = field(default=(), init=False)
    """The parameters and buffers that the forward was found to register."""

    def __post_init__(self) -> None:
        self._copier = MetaCopier(self.model)

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
        call = self.call(scenario, recipe.floating, batch_size)
        if self.execute:
            with undisturbed():
                call = executable_call(call)
        return Setup(
            name=self.name,
            device="cpu" if self.execute else "meta",
            notes=tuple(self.notes(scenario)),
            scenario=scenario.name,
            model=recipe.model,
            call=call,
            training=self.training,
            batch_size=batch_size,
            precision=recipe.precision,
            gpu=GpuSetup(self.gpu.capability, workspaces(self.gpu, self.plans, self.stack), self.stack),
            buckets=buckets_of(self.model),
            compiled=None if scenario.compile is None else _compiled(scenario.compile, self.gpu, self.model),
        )

    def call(self, scenario: Scenario, floating: torch.dtype | None, batch_size: int | None = None) -> Call:
        """The arguments of a call, floating ones in `floating`; as-given keeps the user's where it runs on them."""
        as_chosen = scenario.recipe == "as-given" and not self._inputs_are_cast
        return self.inputs.call(batch_size, floating, typed_too=not as_chosen)

    def notes(self, scenario: Scenario) -> Iterator[str]:
        """Remarks on how the model and its inputs are run under a scenario."""
        is_own = scenario.recipe == "as-given"
        if is_own and self._inputs_are_cast and self._given_floating is not None:
            yield _CAST.format(dtype_name(self._given_floating))
        if self.inputs.looked_up:
            yield _LOOKED_UP.format(self.inputs.looked_up)
        if self._scripted:
            yield _SCRIPTED.format(join_names(self._scripted))
        if self.late:
            yield _LATE.format(join_names(self.late))
        quantized = checkpoint_config_of(self.model) if is_own else None
        if quantized is not None and (quantization := quantization_of(self.model)) is not None:
            yield _QUANTIZED.format(quantization.method)
        elif quantized is not None:
            methods = quantized if isinstance(quantized, dict) else {}
            yield _UNQUANTIZED.format(methods.get("quant_method", "some method"))
        if self.execute:
            yield _EXECUTED
        if parts := compiled_parts(self.model):
            yield _UNCOMPILED if scenario.compile is None else _COMES_COMPILED.format(join_names(parts))
        yield from filter(None, (self.gpu.note, self.stack.note(str(torch.__version__))))

    @cached_property
    def _scripted(self) -> tuple[str, ...]:
        """The outermost modules of TorchScript that have others inside."""
        paths = [
            path
            for path, module in self.model.named_modules()
            if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.children())
        ]
        prefixes = {path: f"{path}." if path else "" for path in paths}
        return tuple(
            path for path in paths if not any(path.startswith(prefixes[other]) for other in paths if other != path)
        )

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

    def copy(self) -> nn.Module:
        return self._copier.copy()


def plans_of(card: Card, stack: Stack = INSTALLED) -> Plans:
    """The convolution workspaces on a card, by the stack's cuDNN if this machine has it, else by another one."""
    from memsize.kernels.cudnn.installed import installed

    return Plans(card.capability, partial(installed, stack.cudnn_release), wanted=stack.cudnn_release)


def workspaces(gpu: Card, plans: Plans | None = None, stack: Stack = INSTALLED) -> Workspaces:
    """The workspaces that the libraries of a software stack would take on a card."""
    benchmark = None if stack.benchmark is None else stack.benchmark == "on"
    return workspaces_of(gpu, stack.torch or str(torch.__version__), plans, benchmark=benchmark)


def workspaces_of(
    gpu: Card,
    torch_version: str,
    plans: Plans | None,
    cublas_config: str | None = None,
    benchmark: bool | None = None,
) -> Workspaces:
    """The workspaces of cuBLAS, of a setting or the usual ones, cuBLASLt, cuDNN and reductions under a release."""
    return Workspaces(
        cublas_workspace(gpu.capability, config=cublas_config, torch_version=torch_version),
        lt=cublaslt_workspace(torch_version),
        convolutions=ConvolutionWorkspaces(plans, benchmark, release(torch_version) or NEWEST) if plans else None,
        keeps_lt=keeps_cublaslt_workspace(torch_version),
        multiprocessors=multiprocessors(gpu),
    )


def _compiled(mode: CompileMode, gpu: Card, model: nn.Module) -> Callable[[Run], AbstractContextManager[None]]:
    """The region in which a copy of `model` is compiled: the parts that come compiled, or all of it. The compiler is
    imported here: that takes as long as torch. A file beside the model may hide a module that it needs.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch's own modules use what PyTorch deprecates
            from memsize.compile.region import compiled_model
    except (AttributeError, ImportError) as error:
        file = getattr(sys.modules.get("triton"), "__file__", None)
        raise ScenarioError(_NO_COMPILER.format(error) + (_HIDDEN.format(file) if file else "")) from error

    return partial(compiled_model, mode=mode, capability=gpu.capability, parts=compiled_parts(model) or ("",))


def own_autocast(model: nn.Module) -> str | None:
    """The lower precision of autocast that the training step of the model's own runs in; None where there is none."""
    step = model_defined_step_of(model)
    return step.autocast if step else None


def is_float32(model: nn.Module, trace: Trace) -> bool:
    """Whether `model`, of which `trace` is a run as it is, in float32 would store and run on just the same."""
    if own_autocast(model):
        return False
    registered = [t for t in trace.tensors if t.kind != "attribute"]
    floats = {t.spec.dtype for t in registered if getattr(torch, t.spec.dtype).is_floating_point}
    plain = not any(tensor.parts or tensor.wrapper or tensor.kind == "packed" for tensor in registered)
    return plain and floats <= {"float32"}


def storage_key(scenario: Scenario) -> StorageKey:
    return scenario.dtype, scenario.keep_norms
