"""One run of a model under a scenario, recorded as a `Trace`: what all workloads share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from memsize.cuda.cuda_semantics import cuda_semantics
from memsize.depth.likeness import behavior_of
from memsize.errors import ForwardError, MemsizeError, exits_caught
from memsize.kernels.semantics import CUDNN, Semantics
from memsize.model.input_tensors import input_tensors
from memsize.model.meta_copy import in_mode
from memsize.model.restored_globals import restored_globals
from memsize.model.tensor_storage import has_no_shape, plain_tensors, stored_tensors
from memsize.precision.recipes import RunPrecision
from memsize.processes.simulation import Function, Override, ThreadPatches, current_part
from memsize.records.roles import Role
from memsize.records.trace import Failure, Layer, Storage, StoredTensor, Trace
from memsize.spec.model_request import Call
from memsize.spec.stack import INSTALLED, Stack
from memsize.torch_internals.isolation import undisturbed
from memsize.torch_internals.pytree import paths_of, tensors_in
from memsize.tracing.ddp import Buckets
from memsize.tracing.failure import explain
from memsize.tracing.ledger import NO_WORKSPACES, Ledger, Workspaces
from memsize.tracing.module_calls import ModuleCallRecorder, ModuleRecord
from memsize.tracing.saved_tensors import functional_transforms_allowed, saving


def gpu_semantics(
    ledger: Ledger, capability: tuple[int, int], cudnn: int = CUDNN, release: tuple[int, int] | None = None
) -> AbstractContextManager[Semantics]:
    """While open, PyTorch behaves as it would for tensors on a GPU, and autocast's copies are marked in the ledger.

    `release` is the PyTorch to simulate where it is another than the installed one.
    """
    return cuda_semantics(
        stands_for=(ledger.device.type,),
        capability=capability,
        cudnn=cudnn,
        release=release,
        autocast_observer=lambda _, copy: ledger.mark(copy, "cast copy"),
    )


@dataclass(frozen=True)
class GpuSetup:
    """The GPU that a run simulates, with its software `stack`.

    Without a `capability`, PyTorch behaves as on the device where the run happens. `workspaces` are those of the GPU's
    libraries, `cudnn` is the release of cuDNN (9.15.1 is 91501).
    """

    capability: tuple[int, int] | None = None
    workspaces: Workspaces = NO_WORKSPACES
    stack: Stack = INSTALLED
    cudnn: int = CUDNN

    def semantics(self, ledger: Ledger) -> AbstractContextManager[Any]:
        """Return the region in which PyTorch behaves as on this GPU, and autocast's copies are marked in `ledger`."""
        if self.capability is None:
            return nullcontext()
        return gpu_semantics(ledger, self.capability, self.cudnn, self.stack.release)


@contextmanager
def calls_seen(ledger: Ledger) -> Iterator[None]:
    """Record in `ledger`, while open, the calls of this run that no dispatch shows: ``untyped_storage().resize_(n)``,
    and hooks that are registered on gradients.
    """
    with _patches.active() as simulation, simulation.with_part(Ledger, ledger):
        yield


def _resized(original: Function, storage: torch.UntypedStorage, size: int) -> Any:
    result = original(storage, size)
    if ledger := current_part(Ledger):
        ledger.resized(storage)
    return result


def _hooked(original: Function, tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
    is_own = (getattr(hook, "__module__", None) or "").startswith("memsize.")  # which treats all layers alike
    if not is_own and (ledger := current_part(Ledger)):
        ledger.hooks.add(behavior_of(hook))
    return original(tensor, hook)


_patches = ThreadPatches(
    lambda: (
        Override(torch.UntypedStorage, "resize_", _resized),
        Override(torch.Tensor, "register_hook", _hooked),
        Override(torch.Tensor, "register_post_accumulate_grad_hook", _hooked),
    )
)


class RunDevice:
    """The device on which a run happens: what records the run, and which regions are open around it."""

    def ledger(self, setup: Setup) -> Ledger:
        """Return a ledger for a run of `setup` on this device."""
        return Ledger(setup.device, setup.gpu.workspaces)

    def regions(self, setup: Setup, ledger: Ledger) -> Iterable[AbstractContextManager[Any]]:
        """Return the regions in which `ledger` records, the outermost first."""
        hooks = saving(ledger.saved)
        watches = (calls_seen(ledger), functional_transforms_allowed(), hooks)
        return (*watches, ledger, setup.gpu.semantics(ledger))


@dataclass(frozen=True)
class Setup:
    """The setup of a run: a copy of the user's model that memsize may run and change, and its arguments.

    `compiled` opens the region in which calls of the model are compiled; None where it runs as it is written.

    `name` is what the user calls the model. `precision` is what the scenario does in the run, `gpu` is the GPU to
    simulate, and `buckets` are those of distributed training. `stored` finds the tensors that the model stores. `notes`
    go into the trace. `listener` receives the calls that the run recorded, `ended` the model before globals that its
    code changed are put back. `machine` is where the run happens.
    """

    name: str
    scenario: str
    model: nn.Module
    call: Call
    training: bool
    batch_size: int | None = None
    device: str = "meta"
    precision: RunPrecision = field(default_factory=RunPrecision)
    gpu: GpuSetup = GpuSetup()
    buckets: Buckets | None = None
    stored: Callable[[nn.Module], tuple[StoredTensor, ...]] = stored_tensors
    notes: tuple[str, ...] = ()
    listener: Callable[[ModuleCallRecorder], None] = lambda _: None
    ended: Callable[[nn.Module], None] = lambda _: None
    machine: RunDevice = field(default_factory=RunDevice)
    compiled: Callable[[Run], AbstractContextManager[Any]] | None = None


def stored_only(name: str, model: nn.Module) -> Trace:
    """Return what `model` stores, as a trace without a run: layers and tensors, but no calls, outputs or events."""
    return Run(Setup(name, "as-given", model, ((), {}), model.training), enter=False).trace()


class Run:
    """A run of one model, with its ledger and its calls: opened once with `recording`, then read with `trace`."""

    def __init__(self, setup: Setup, enter: bool = True, tables: bool = True) -> None:
        self.setup = setup
        self.result: Any = None
        if enter:
            in_mode(setup.model, setup.training)
            give_shapes(setup.model, setup.call, setup.training, setup.device)
        self.tensors = setup.stored(setup.model) if tables else ()
        self.ledger = setup.machine.ledger(setup)
        self.ledger.counts = tables
        self.calls = ModuleCallRecorder(setup.model, self.ledger)
        self._notes: list[str] = []
        if enter:
            self.enter_inputs()

    @contextmanager
    def recording(self, inner: bool = True) -> Iterator[None]:
        """While open, everything that runs is recorded; a failure becomes a `ForwardError` that carries what ran before
        it.

        With `inner` False only calls of the model itself are recorded, and nothing is known about layers.
        """
        with undisturbed(), restored_globals(self.setup.model), ExitStack() as regions:
            if self.setup.device == "meta":
                # Only small constants are computed, a mask at most: on a busy machine threads take many times as long.
                torch.set_num_threads(1)
            try:
                machine = self.setup.machine.regions(self.setup, self.ledger)
                compiled = () if self.setup.compiled is None else (self.setup.compiled(self),)
                with exits_caught():
                    for region in (*compiled, self.calls.watched(inner), *machine):
                        regions.enter_context(region)
                    yield
                    regions.close()
                self.setup.ended(self.setup.model)
            except MemsizeError:
                raise
            except Exception as error:
                what, failure = explain(error, self.calls, self.ledger)
                self.calls.saved_storages = {reference.index for reference in self.ledger.live.values()}
                inputs = f", given {', '.join(failure.inputs)}" if failure.inputs else ""
                raise ForwardError(f"{what}{inputs}: {failure.reason}", self.trace(failure)) from error

    def note(self, text: str) -> None:
        """Add something that a reader must know about how the run was made."""
        self._notes.append(text)

    def trace(self, failure: Failure | None = None) -> Trace:
        """The trace of what was recorded so far."""
        setup, ledger, convolutions = self.setup, self.ledger, self.setup.gpu.workspaces.convolutions
        storages = ledger.storages(self.calls.saved_storages)
        tensors = self.tensors if failure or not self.calls.complete else self._with_use()
        tensors = setup.precision.rewrite(tensors)
        has_run = any(seen.calls for seen in self.calls.seen) or self.calls.failed
        multiply_adds = ledger.multiply_adds if has_run else None
        trace = Trace(
            model=setup.name,
            scenario=setup.scenario,
            training=setup.training,
            batch_size=setup.batch_size,
            torch=str(torch.__version__),
            inputs=input_tensors(setup.call),
            layers=layer_rows(self.calls.seen, tensors, storages, self.calls.saved_storages, multiply_adds),
            tensors=tensors,
            phases=tuple(ledger.clock.phases),
            storages=storages,
            events=tuple(ledger.events),
            emptied=tuple(ledger.emptied),
            assumptions=tuple(ledger.evaluator.assumptions),
            notes=(*setup.notes, *self._notes, *ledger.evaluator.notes, *(convolutions.notes if convolutions else ())),
            cudnn=convolutions.source if convolutions else None,
            failure=failure,
            lines=ledger.lines,
            stack=str(setup.gpu.stack),
        )
        ledger.close()
        setup.listener(self.calls)
        return trace

    def enter_inputs(self) -> None:
        """Record the storages that exist before the run: the model's and its inputs'."""
        ledger, sizes = self.ledger, self.setup.precision.sizes
        there = set(map(id, paths_of(self.setup.model)))
        ledger.line = -1
        for index, seen in enumerate(self.calls.seen):
            if id(seen.module) not in there:  # a stage of a pipeline drops the layers of others
                continue
            ledger.clock.layer = index
            roles: tuple[tuple[Role, Any], ...] = (
                ("parameter", seen.module._parameters),
                ("buffer", seen.module._buffers),
            )
            for role, (name, tensor) in ((role, item) for role, own in roles for item in own.items()):
                if tensor is not None and not has_no_shape(tensor):
                    size = sizes.get(f"{seen.path}.{name}" if seen.path else name) if role == "parameter" else None
                    for piece in plain_tensors(tensor):
                        ledger.enter(piece, role, size=size)
        ledger.clock.layer = -1
        for tensor in tensors_in(self.setup.call):
            for piece in plain_tensors(tensor):
                ledger.enter(piece, "input")
        ledger.line = None

    def _with_use(self) -> tuple[StoredTensor, ...]:
        """Return the stored tensors with two facts from the run: whether an op read them, and whether a gradient
        reaches them.
        """
        ledger, reached = self.ledger, self.calls.reached
        use = {
            f"{path}.{name}" if path else name: (
                not ledger.read.isdisjoint(ledger.addresses(tensor)),
                id(tensor) in reached,
            )
            for module, path in paths_of(self.setup.model).items()
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        }
        return tuple(tensor.seen(*use[tensor.name]) if tensor.name in use else tensor for tensor in self.tensors)


def give_shapes(model: nn.Module, call: Call, training: bool, device: str = "meta", always: bool = False) -> None:
    """Run one forward ahead of any recorded run, in which lazy modules learn their shapes; a failure is left to that
    run.

    `always` does it for any model, as needed for one that registers modules in its forward.
    """
    if always or wants_shapes(model):
        with suppress(Exception), exits_caught(), undisturbed(), torch.no_grad(), Ledger(device):
            model.train(training)(*call[0], **call[1])


def wants_shapes(model: nn.Module) -> bool:
    """Whether a parameter or buffer has no shape yet. Checked before every run, so without `parameters()`, which looks
    for ties.
    """
    tensors = (own.values() for module in paths_of(model) for own in (module._parameters, module._buffers) if own)
    return any(map(has_no_shape, chain.from_iterable(tensors)))


def layer_rows(
    seen: list[ModuleRecord],
    tensors: Iterable[StoredTensor],
    storages: tuple[Storage, ...],
    saved_storages: Set[int],
    multiply_adds: Mapping[int, int] | None,
) -> tuple[Layer, ...]:
    """One record per module of `seen`; `saved_storages` are the storages that a forward leaves for backward.

    `multiply_adds` are by layer, None where nothing ran.
    """
    saved, cast = [0] * (len(seen) + 1), [0] * (len(seen) + 1)
    for index in saved_storages:
        storage = storages[index]
        if storage.saved_by >= 0:
            saved[storage.saved_by] += storage.bytes
        if storage.role == "cast copy":
            cast[storage.layer] += storage.bytes
    own: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        own.setdefault(tensor.layer, []).append(tensor)
    layers = []
    for index, module in enumerate(seen):
        stored = own.get(module.path, ())
        weights = [t for t in stored if t.kind in ("parameter", "packed")] if stored else ()
        layer = Layer(
            path=module.path,
            type=module.type,
            depth=module.depth,
            leaf=module.leaf,
            calls=module.calls,
            outputs=tuple(module.outputs),
            parameters=sum(t.elements for t in weights if t.tied_to is None),
            trainable=sum(t.elements for t in weights if t.trainable and t.tied_to is None),
            parameter_bytes=sum(t.bytes for t in weights),
            buffer_bytes=sum(t.bytes for t in stored if t.kind == "buffer"),
            output_bytes=sum(output.bytes for output in module.outputs),
            saved_bytes=saved[index],
            cast_bytes=cast[index],
            aliases=module.aliases,
            inputs=tuple(module.inputs),
            kernel=module.kernel,
            multiply_adds=None if multiply_adds is None else multiply_adds.get(index, 0),
        )
        layers.append(layer)
    return tuple(layers)
