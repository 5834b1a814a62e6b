"""The modules of a program, as they are called: its models are not known before.

A module that is called while none is running is a root, and its modules are the next layers. Every call passes through
`nn.Module.__call__`, which is replaced for the class: the instances are the program's own, and may be copied or saved.
Also activation checkpointing that a program switches on and that recomputes nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, Final

import torch
from torch import nn

from memsize.model.tensor_storage import plain_tensors, spec_of, stored_tensors
from memsize.processes.patches import LatePatches, calling, wrapping
from memsize.processes.user_code import users_frames, variables
from memsize.records.aggregates import split_phase
from memsize.records.timeline import AROUND
from memsize.records.trace import InputTensor, StoredTensor
from memsize.torch_internals.jit_tracing import is_tracing, traced_again, untraced
from memsize.torch_internals.pytree import arguments_in, paths_of, tensors_in
from memsize.tracing.module_calls import ModuleCallRecorder, ModuleRecord, module_type, record_of, version_of
from memsize.virtual.device_assignment import devices
from memsize.virtual.ledger.gpu_ledger import VirtualLedger

Call = Callable[..., Any]
_COMPILER: Final = "torch._dynamo.eval_frame"
_PARTS: Final = "torch._dynamo.backends.distributed"
"""Defines the modules that hold the parts of a graph that DDP's buckets divide, which are no layers."""


class Root:
    """A module that the program calls itself, and which of all layers are its own."""

    def __init__(self, name: str, module: nn.Module, first: int) -> None:
        self.name = name
        self.first = first
        self.tensors: tuple[StoredTensor, ...] = stored_tensors(module)
        """What it stored when it was first called."""
        self.has_weights = any(True for _ in module.parameters())
        self.inputs: tuple[InputTensor, ...] = ()
        self.trained = False
        """Whether its first forward in gradient mode is over: tables show that one."""
        self.was_training = False
        """Whether it was called in gradient mode while its `training` was set: without, it is evaluated then."""
        self.called = False


class ProgramCalls(ModuleCallRecorder):
    """The calls of every module that works on the GPU; `before_forward` is called before each one of a root, with
    whether it trains. It returns whether the steps are over.
    """

    def __init__(self, ledger: VirtualLedger, before_forward: Callable[[bool], bool]) -> None:
        super().__init__(None, ledger)
        ledger.counts = False
        ledger.differentiated = self._differentiated
        ledger.inline, ledger.inlined = self._inline, self._inlined
        self.roots: list[Root] = []
        self.root_of: list[int] = []
        self._ledger = ledger
        self._before_forward = before_forward
        self._layers: dict[int, tuple[weakref.ref[nn.Module], int]] = {}

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Patch the call of a module, its copies in `nn.DataParallel`, and what gives a tensor its role before."""
        yield nn.Module, "__call__", self._called(nn.Module.__call__)
        yield nn.Parameter, "__new__", staticmethod(calling(self._parameter, nn.Parameter.__new__))
        yield wrapping(nn.Module, "register_buffer", self._registered)
        yield wrapping(nn.Module, "_replicate_for_data_parallel", self._replicated)

    def _replicated(self, original: Callable[[Any], Any], module: nn.Module) -> Any:
        """A copy of a module on another GPU is the same layer."""
        copy, index = original(module), self._index(module)
        if index >= 0:
            self._layers[id(copy)] = weakref.ref(copy), index
        return copy

    def _parameter(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parameter = original(*args, **kwargs)
        self.ledger.mark(parameter, "parameter")
        return parameter

    def _registered(
        self, original: Callable[..., None], module: nn.Module, name: str, tensor: Any, persistent: bool = True
    ) -> None:
        original(module, name, tensor, persistent)
        if tensor is not None:
            self.ledger.mark(tensor, "buffer")

    def _called(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            call = None
            if (compiler := sys.modules.get(_COMPILER)) and isinstance(module, compiler.OptimizedModule):
                module, call = module._orig_mod, module._call_impl
            index = self._index(module)
            if type(module).__module__ == _PARTS or (
                index < 0 and is_tracing() is None and not _is_on_gpu(module, args, kwargs)
            ):
                return call(*args, **kwargs) if call else original(module, *args, **kwargs)
            with untraced():
                if index < 0 and _is_on_gpu(module, args, kwargs):
                    index = self._add(module)
                if index < 0:
                    with traced_again():
                        return call(*args, **kwargs) if call else original(module, *args, **kwargs)
                call = call or module._compiled_call_impl or module._call_impl
                if not self.ledger.clock.inside:
                    return self._call_root(module, index, call, args, kwargs)
                return self._call_module(module, index, call, args, kwargs)

        return called

    def _index(self, module: nn.Module) -> int:
        entry = self._layers.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else -1

    def _is_beside(self, layer: int, other: int) -> bool:
        return other < 0 or self.root_of[layer] == self.root_of[other]

    def _add(self, module: nn.Module) -> int:
        """Let `module` be a root; returns its layer. Modules that were called on their own before keep their layer."""
        taken = {root.name for root in self.roots}
        around = chain.from_iterable(map(variables, reversed([*users_frames()])))
        names = (name for name, value in around if value is module and name != "self" and name not in taken)
        name = next(names, module_type(module))
        free = (candidate for candidate in chain([name], (f"{name}#{n}" for n in count(2))) if candidate not in taken)
        first, root = len(self.seen), Root(next(free), module, len(self.seen))
        for path, submodule in module.named_modules():
            if self._index(submodule) < 0:
                self._layers[id(submodule)] = weakref.ref(submodule), len(self.seen)
                self._ledger.own(submodule, len(self.seen))
                self.seen.append(record_of(path, submodule, weakref.proxy(submodule)))
                self.root_of.append(len(self.roots))
        self.roots.append(root)
        return first

    def _call_root(self, module: nn.Module, index: int, call: Call, args: Any, kwargs: Any) -> Any:
        root = self.roots[self.root_of[index]]
        if not root.has_weights:
            return self._call_module(module, index, call, args, kwargs)
        grad = torch.is_grad_enabled()
        is_over = self._before_forward(grad and module.training)
        for tensor in arguments_in((args, kwargs)):
            self.ledger.mark(tensor, "input")
        root.was_training = root.was_training or (grad and module.training)
        evaluates = not grad or (is_over and root.was_training and not module.training)
        self.ledger.counts = not root.trained
        if grad and root.called and not root.trained:
            for layer, seen in enumerate(self.seen):
                if self.roots[self.root_of[layer]] is root:
                    seen.calls, seen.inputs, seen.outputs = 0, [], []
                    self.ledger.multiply_adds.pop(layer, None)
        with self._forward(evaluates):
            result = self._call_module(module, index, call, args, kwargs)
            if not root.trained:
                self.ledger.forget_released()
            for tensor in tensors_in(result):
                for piece in plain_tensors(tensor):
                    self.ledger.mark(piece, "output")
        self.ledger.counts = False
        if not root.trained:
            if grad:
                alive = {reference.index for reference in self.ledger.live.values()}
                self.saved_storages = self.saved_storages | alive
            named = [*((str(position), value) for position, value in enumerate(args)), *kwargs.items()]
            root.inputs = root.inputs or (
                tuple(
                    InputTensor(name, spec_of(value), value.numel() * value.element_size())
                    for name, value in named
                    if isinstance(value, torch.Tensor)
                )
            )
            root.called, root.trained = True, grad
        return result

    @contextmanager
    def _forward(self, evaluates: bool) -> Iterator[None]:
        """A forward in its phase, after which comes that of code around it."""
        name = "evaluation" if evaluates else AROUND
        clock = self.ledger.clock
        current, _ = split_phase(clock.phases[clock.phase])
        if current != name and current in (AROUND, "evaluation", "forward"):
            clock.phase = clock.index(name)
        with clock.during("evaluation" if evaluates else "forward"):
            yield

    def _inline(self, module: nn.Module) -> None:
        """The code of `module` becomes part of a compiled function, which calls it no more."""
        if self._index(module) < 0 and any(parameter.is_meta for parameter in module.parameters()):
            self._add(module)

    @contextmanager
    def _inlined(self, grad: bool) -> Iterator[None]:
        """A compiled function runs, with the modules that are part of it."""
        current, _ = split_phase(self.ledger.clock.phases[self.ledger.clock.phase])
        if current not in ("setup", AROUND, "evaluation", "forward"):
            yield
            return
        self._before_forward(grad)
        with self._forward(not grad):
            yield

    def _differentiated(self) -> None:
        """Set the phase of an op outside modules that trains: of a loss, a forward without modules, or on gradients."""
        clock = self.ledger.clock
        current, _ = split_phase(clock.phases[clock.phase])
        if current == "evaluation":
            clock.phase = clock.index(AROUND)
        elif current in ("setup", AROUND) and not any(root.has_weights for root in self.roots):
            self._before_forward(True)
            clock.phase = clock.index("forward")

    def _call_module(self, module: nn.Module, index: int, call: Call, args: Any, kwargs: Any) -> Any:
        clock = self.ledger.clock
        self._compiler.forget()
        outer, start = clock.enter(index), self.ledger.count
        is_open = not self.roots[self.root_of[index]].trained and _is_here()
        arguments = [(tensor, version_of(tensor)) for tensor in arguments_in((args, kwargs))] if is_open else []
        try:
            with traced_again():
                result = call(*args, **kwargs)
        finally:
            clock.leave(outer)
        if is_open:
            self._returned(index, result, start, arguments)
        return result


def _is_here() -> bool:
    """Whether this thread works on the GPU that is recorded, and not for a replica on another one."""
    return not devices().drives_all or devices().current == devices().index


def _is_on_gpu(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call has arguments on the GPU, or parameters. It is asked at each call of a module on the CPU."""
    if any(tensor.is_cuda for tensor in arguments_in((*args, *kwargs.values()) if kwargs else args)):
        return True
    modules = paths_of(module) if module._modules else (module,)
    return any(
        parameter.is_cuda for part in modules for parameter in part._parameters.values() if parameter is not None
    )


WRAPPERS: Final = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_SWITCHES: Final = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes of modules by which transformers and diffusers, and timm and open_clip, switch it on."""


class CheckpointingCalls:
    """The calls of `apply_activation_checkpointing` that match no module; `line` says where the program is."""

    def __init__(self, line: Callable[[], str]) -> None:
        self.without_match: str | None = None
        """The line of the last one."""
        self._line = line

    def later(self) -> dict[str, LatePatches]:
        """Return the patch of the function, for when its module is imported."""
        return {WRAPPERS: lambda module: (wrapping(module, "apply_activation_checkpointing", self._applied),)}

    def _applied(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        before = sum(1 for _ in model.modules())
        result = original(model, *args, **kwargs)
        if sum(1 for _ in model.modules()) == before:
            self.without_match = self._line()
        return result


def switched_on(records: Iterable[ModuleRecord]) -> str | None:
    """The attribute of the first module that has checkpointing switched on, by its path."""
    for record in records:
        try:
            attributes = vars(record.module)
        except ReferenceError:
            continue
        for name in _SWITCHES:
            if attributes.get(name) is True:
                return f"{record.path}.{name}" if record.path else name
    return None
