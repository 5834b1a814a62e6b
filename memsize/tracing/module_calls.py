"""Calls of modules: which module is running, and what each module took and returned.

Every call of a module passes through `nn.Module._wrapped_call_impl`, which first asks the instance for a
`_compiled_call_impl`. The model that runs is memsize's copy, so each of its modules gets one that enters the layer,
makes the ordinary call, and leaves it. Forward hooks would do the same, but a module with hooks leaves its fused paths
(`nn.TransformerEncoder`), and `torch.nn` then takes its slow route through every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memsize.depth.likeness import plain_values
from memsize.errors import exits_caught
from memsize.loading.model_defined_step import model_defined_step_of
from memsize.model.tensor_storage import plain_tensors, spec_of
from memsize.processes.ctrl_c import raise_waiting
from memsize.records.trace import Memory, Output, TensorSpec
from memsize.torch_internals.isolation import CompilerImport
from memsize.torch_internals.pytree import arguments_in, paths_of, tensors_in
from memsize.tracing.ledger import Ledger


def parameters_reached(outputs: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the leaf tensors at the far end of the outputs' autograd graph."""
    outputs = tuple(outputs)
    return _leaves(outputs, _graph_of(outputs))


def _graph_of(outputs: Iterable[torch.Tensor]) -> Set[Any]:
    """The nodes of the outputs' autograd graph."""
    todo: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def _leaves(outputs: Iterable[torch.Tensor], graph: Iterable[Any]) -> set[int]:
    variables = (getattr(node, "variable", None) for node in graph)
    leaves = {id(tensor) for tensor in outputs if tensor.is_leaf and tensor.requires_grad}
    return leaves.union(id(variable) for variable in variables if variable is not None)


def _functions_in(graph: Iterable[Any]) -> Iterator[Hashable]:
    """The behavior of each `torch.autograd.Function` in a graph, apart from PyTorch's own."""
    for node in graph:
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith("torch."):
            yield function, plain_values(vars(node))


@dataclass(slots=True)
class ModuleRecord:
    path: str
    type: str
    depth: int
    leaf: bool
    module: nn.Module
    aliases: tuple[str, ...] = ()
    kernel: tuple[int, ...] = ()
    calls: int = 0
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    plain: bool = True
    """Whether each call took a tensor first and returned one tensor."""


@dataclass(frozen=True, slots=True)
class Running:
    """The module whose forward an exception came from, by its `id`, and the tensors that it was given."""

    error: int
    layer: int
    inputs: tuple[str, ...]


class ModuleCallRecorder:
    """The modules of one model, and their calls as the ledger's clock sees them."""

    def __init__(self, model: nn.Module | None, ledger: Ledger) -> None:
        self.ledger = ledger
        self.seen = [] if model is None else _all_seen(model)
        self.entered: list[tuple[int, int]] = []
        """For each call of the first forward, in order: the module that was running, and the one that was called."""
        self.failed: Running | None = None
        self.complete = False
        """Whether the model has returned once: tables show its first forward, not those of later steps."""
        self.saved_storages: Set[int] = set()
        self.reached: Set[int] = set()
        self.backward_code: Set[Hashable] = frozenset()
        """The behavior of functions outside of PyTorch that the backward of the first forward calls."""
        self.forward: Callable[[], str] = lambda: "forward"
        """Called before each forward of the model itself; returns the name of its phase."""
        self._claimed: set[int] = set()
        self._compiler = CompilerImport()
        recorder = weakref.proxy(self)  # a cycle would keep the model until a collection
        ledger.layer_inside = lambda layer, path: recorder.layer_inside(layer, path)

    def layer_inside(self, layer: int, path: str) -> int:
        """The layer of the module at `path` below that of `layer`; `layer` itself where none is there."""
        if not path:
            return layer
        outer = self.seen[layer].path if layer >= 0 else ""
        full = f"{outer}.{path}" if outer else path
        same = (i for i, seen in enumerate(self.seen) if seen.path == full and self._is_beside(i, layer))
        return next(same, layer)

    def _is_beside(self, layer: int, other: int) -> bool:
        """Whether two layers are of one model."""
        return True

    @contextmanager
    def watched(self, inner: bool = True) -> Iterator[None]:
        """While open, the model's modules record their calls; without `inner`, only the model itself does."""
        watched = self.seen if inner else self.seen[:1]
        for index, seen in enumerate(watched):
            vars(seen.module)["_compiled_call_impl"] = self._call(index, seen.module)
        try:
            yield
        finally:
            for seen in watched:
                vars(seen.module)["_compiled_call_impl"] = None

    def _call(self, index: int, module: nn.Module) -> Callable[..., Any]:
        clock, seen = self.ledger.clock, self.seen[index]

        def call(*args: Any, **kwargs: Any) -> Any:
            raise_waiting()
            self._compiler.forget()
            step = model_defined_step_of(module) if index == 0 else None
            outer, start = clock.enter(index), self.ledger.count
            if not self.complete:
                self.entered.append((outer, index))
            arguments = [(tensor, version_of(tensor)) for tensor in arguments_in((args, kwargs) if kwargs else args)]
            try:
                with exits_caught():
                    result = (step or module._call_impl)(*args, **kwargs)
            except Exception as error:
                if self.failed is None or self.failed.error != id(error):
                    self.failed = Running(id(error), index, tuple(str(spec_of(tensor)) for tensor, _ in arguments))
                raise
            finally:
                clock.leave(outer)
            if not self.complete and not (step and seen.calls):  # the step is no call of the module that it calls
                seen.plain = (
                    seen.plain and isinstance(result, torch.Tensor) and isinstance(next(iter(args), None), torch.Tensor)
                )
                self._returned(index, result, start, arguments)
            return result

        vars(call)["of"] = partial(self._copied, index)
        return partial(self._call_model, call) if index == 0 else call

    def _copied(self, index: int, copy: nn.Module) -> Callable[..., Any]:
        """The call of a copy of a module, as `nn.DataParallel` makes them, which is freed with its last use."""
        module: Any = weakref.proxy(copy)
        return self._call(index, module)

    def _call_model(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model itself: storages that are alive when the first forward returns are saved for backward."""
        clock = self.ledger.clock
        if clock.inside:
            return call(*args, **kwargs)
        with clock.during(self.forward()):
            result = call(*args, **kwargs)
            self.ledger.forget_released()
            for tensor in tensors_in(result):
                for piece in plain_tensors(tensor):
                    self.ledger.mark(piece, "output")
        if not self.complete:
            self.complete = True
            self.ledger.counts = False
            self.saved_storages = {reference.index for reference in self.ledger.live.values()}
            outputs = tuple(tensors_in(result))
            graph = _graph_of(outputs)
            self.reached = _leaves(outputs, graph)
            self.backward_code = frozenset((*self.ledger.hooks, *_functions_in(graph)))
        return result

    def _returned(self, index: int, result: Any, start: int, arguments: list[tuple[torch.Tensor, int]]) -> None:
        seen, ledger = self.seen[index], self.ledger
        met: dict[torch.Tensor, Output] = {}
        seen.calls += 1
        seen.inputs += [spec_of(tensor) for tensor, _ in arguments]
        for tensor in tensors_in(result):
            storages = [ledger.index_of(piece) for piece in plain_tensors(tensor)]
            new = {storage for storage in storages if storage >= start and storage not in self._claimed}
            if tensor in met:
                output = replace(met[tensor], bytes=0)
            elif new:
                self._claimed |= new
                output = Output(spec_of(tensor), "new", sum(map(ledger.size, new)))
            else:
                memory = _shared(tensor, storages[0] if storages else -1, start, arguments)
                output = Output(spec_of(tensor), memory, 0)
            met[tensor] = output
            seen.outputs.append(output)


def _shared(tensor: torch.Tensor, storage: int, start: int, arguments: list[tuple[torch.Tensor, int]]) -> Memory:
    """How an output that brought no new memory relates to the tensors that were there before."""
    for argument, version in arguments:
        if argument is tensor:
            return "passed" if version_of(tensor) == version else "in place"
    if any(version_of(argument) != version and _same_memory(argument, tensor) for argument, version in arguments):
        return "in place"
    return "view" if storage < start or tensor._is_view() else "passed"


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return a.layout is torch.strided is b.layout and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except NotImplementedError:  # one sample of a batch, as torch.func.vmap sees it
        return False


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was written in place, as autograd counts it."""
    return 0 if tensor.is_inference() else tensor._version


def _all_seen(model: nn.Module) -> list[ModuleRecord]:
    paths = paths_of(model)
    aliases: dict[nn.Module, list[str]] = {}
    for module, path in paths.items():
        for name, child in module._modules.items():
            alias = f"{path}.{name}" if path else name
            if child is not None and paths.get(child, alias) != alias:
                aliases.setdefault(child, []).append(alias)
    return [record_of(path, module, module, tuple(aliases.get(module, ()))) for module, path in paths.items()]


def record_of(path: str, module: nn.Module, reference: Any, aliases: tuple[str, ...] = ()) -> ModuleRecord:
    """Return the record of a `module` that was not called yet; `reference` is the module or a proxy."""
    depth = path.count(".") + 1 if path else 0
    leaf = all(child is None for child in module._modules.values())
    size = getattr(module, "kernel_size", ())  # the window that a convolution or a pooling slides over its input
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    kernel = sizes if all(type(length) is int for length in sizes) else ()
    return ModuleRecord(path, module_type(module), depth, leaf, reference, aliases, kernel)


def module_type(module: nn.Module) -> str:
    """The name of the class of `module`; of a scripted one, of the class that it was made from."""
    original = getattr(module, "original_name", None) if isinstance(module, torch.jit.ScriptModule) else None
    return original if isinstance(original, str) else type(module).__name__
