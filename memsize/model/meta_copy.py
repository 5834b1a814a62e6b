"""The meta copy: a private copy of a model whose tensors are all on the `meta` device.

Same classes, names, shapes, strides, ties, attributes and flags; no values and no memory. The copy is what runs, so the
user's model is never moved, hooked, cast or called, not even through a function that refers to it, such as a hook or a
forward that was set on the instance.

Known limits: functions still reach whatever they find in a module's globals; an attribute that cannot be copied (a
lock, a file) is shared with the original.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memsize.errors import MemsizeError
from memsize.model.meta_tensors import MetaTensors, Plain
from memsize.torch_internals.pytree import paths_of

_ATOMIC = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
)
_SHARED = (*_ATOMIC, TorchDispatchMode, TorchFunctionMode, StorageWeakRef)
"""What copies share with the original: also what holds a bare address, which a second object would free once more."""
_CONSTANTS = frozenset(_ATOMIC)
_CODE = (type, types.BuiltinFunctionType, types.ModuleType)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict)
_EMPTY = frozenset({*_MAPPINGS, *_SEQUENCES})
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Modules that only wrap another one for a compiler or a process group: the module inside is what runs."""
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
_STATISTICS = ("running_mean", "running_var")
_ORIGINAL = "_torchdynamo_orig_callable"


def meta_copy(value: Any) -> Any:
    """A copy of a model, or of any pytree (a model's inputs, say), with each of its tensors on `meta`.

    Tensors that share memory share it in the copy; parameters keep `requires_grad`. Small tensors keep their values as
    constants, since models look at them.

    Raises `MemsizeError` for a model that is sharded over a process group: no process holds all of it.
    """
    return MetaCopier(value).copy() if isinstance(value, nn.Module) else _Copy().part(value)


class MetaCopier:
    """Makes any number of copies of one model, which must not change meanwhile: it is inspected closely only once.

    The copies share nothing that a run can change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._learned = _Learned()

    def copy(self, without: Iterable[nn.Module] = ()) -> nn.Module:
        """A new copy, as `meta_copy` makes it. Modules `without` which it is to be, and what only they hold, are not
        copied: an empty module takes the place of each.
        """
        for module in () if self._learned.modules else paths_of(self._model):
            parts = (module, *module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(_SHARDED & {kind.__name__ for kind in type(part).__mro__} for part in parts):
                raise MemsizeError(
                    f"{type(module).__name__} holds shards of its parameters: pass the model as it is before it is "
                    "sharded, and shard it in the step of memsize.trace(…, world=…, step=…)"
                )
        copying, left_out = _Copy(self._learned), tuple(without)
        copying.memo.update((id(module), nn.Module()) for module in left_out)
        return copying.module(inside(self._model), left_out)


def in_mode(model: nn.Module, training: bool) -> nn.Module:
    """`model` with its training flag set, by its own `train`; an exported program refuses, and stays as it is."""
    with suppress(NotImplementedError):
        model.train(training)
    return model


def inside(model: nn.Module) -> nn.Module:
    """The module of `model` that really runs: a compiler's or a process group's wrapper only passes the call on."""
    wrapped = _WRAPPERS.get(type(model).__name__)
    return getattr(model, wrapped) if wrapped else model


def compiled_parts(model: nn.Module) -> tuple[str, ...]:
    """The paths of the modules that `torch.compile` was asked to compile, without those inside of others: as in a copy,
    which has no wrappers.
    """
    parts: list[str] = []
    for path, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl"):
            path = ".".join(name for name in path.split(".") if name != "_orig_mod")
            if not any(part == path or not part or path.startswith(f"{part}.") for part in parts):
                parts.append(path)
    return tuple(parts)


class _Attributes(NamedTuple):
    """The attributes of a module that its copies get new and empty, and those that must be copied; others are shared.

    It keeps its module alive, since it is found by the module's id.
    """

    module: nn.Module
    empty: tuple[tuple[str, type, int], ...]
    copied: tuple[str, ...]


class _Learned:
    """Facts about modules and tensors, by id, that one copying pass collects so that later passes can reuse them."""

    def __init__(self) -> None:
        self.modules: dict[int, _Attributes] = {}
        self.tensors: dict[int, Plain] = {}


class _Copy:
    """One copying pass. The memo is `copy.deepcopy`'s, so that shared objects stay shared however they are reached."""

    def __init__(self, learned: _Learned | None = None) -> None:
        self.memo: dict[int, Any] = {}
        self.learned = learned or _Learned()
        # Break the reference cycle, so that the copy is freed by reference counting even while garbage collection is
        # paused.
        copy_attribute = functools.partial(_Copy.part, weakref.proxy(self))
        self.tensors = MetaTensors(self.memo, copy_attribute, self.learned.tensors)

    # -- modules ------------------------------------------------------------------------------------------------------

    def module(self, model: nn.Module, without: Iterable[nn.Module] = ()) -> nn.Module:
        originals = [module for module in map(inside, paths_of(model, without)) if id(module) not in self.memo]
        # An empty copy first: attributes may refer to any module, including their own owner.
        for module in originals:
            if id(module) in self.memo:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                self._script(module)
            else:
                # Not the class's own __new__: it may want arguments, and torch.fx's makes a class without the forward.
                self.memo[id(module)] = object.__new__(type(module))
        for module in originals:
            self._fill(module)
        copied: nn.Module = self.memo[id(model)]
        return copied

    def _script(self, module: torch.jit.ScriptModule) -> None:
        """TorchScript copies itself, values and all; then its tensors are replaced. Constants in its code stay."""
        copied: Any = copy.deepcopy(module)
        for original, own in zip(module.modules(), copied.modules(), strict=True):
            for name, tensor in (*original._parameters.items(), *original._buffers.items()):
                if tensor is not None:
                    own._c.setattr(name, self.tensors.tensor(tensor))
            self.memo[id(original)] = own

    def _fill(self, module: nn.Module) -> None:
        own = self.memo[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return
        state, attributes = vars(own), vars(module)
        _, empty, copied = self.learned.modules.get(id(module)) or self._learn(module)
        state.update(attributes)
        for name, kind, address in empty:
            state[name] = self.memo[address] = kind()
        for name in copied:
            if name in _REGISTRIES:
                state[name] = self._registry(attributes[name])
            else:
                state[name] = None if name == "_compiled_call_impl" else self.part(attributes[name])
        if isinstance(module, nn.DataParallel):
            state["device_ids"] = []  # it delegates everything to the module inside

    def _learn(self, module: nn.Module) -> _Attributes:
        empty, copied = [], []
        for name, value in vars(module).items():
            kind = type(value)
            if kind in _EMPTY and not value:  # as most attributes are: hook tables
                empty.append((name, kind, id(value)))
            elif kind not in _CONSTANTS and not _is_constant(value):
                copied.append(name)
        learned = self.learned.modules[id(module)] = _Attributes(module, tuple(empty), tuple(copied))
        return learned

    def _registry(self, entries: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = OrderedDict() if isinstance(entries, OrderedDict) else {}
        for name, entry in entries.items():
            if entry is None or id(entry) in self.memo:
                copied[name] = None if entry is None else self.memo[id(entry)]
            elif isinstance(entry, torch.Tensor):
                copied[name] = self.tensors.tensor(entry, looked_at=name not in _STATISTICS)
            else:
                copied[name] = self.part(entry)
        return copied

    # -- everything else ----------------------------------------------------------------------------------------------

    def part(self, value: Any) -> Any:
        """The copy of any object that a module holds; `value` itself where it is immutable or can't be copied."""
        if _is_constant(value):
            return value
        kind = type(value)
        if kind in _EMPTY and not value:
            copied = self.memo[id(value)] = kind()
            return copied
        if isinstance(value, _SHARED):
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, torch.Tensor):
            return self.tensors.tensor(value)
        if isinstance(value, nn.Module):
            return self.module(inside(value))
        copier = _COPIERS.get(kind)
        return self._object(value) if copier is None else copier(self, value)

    def _remember(self, original: Any, copied: Any) -> Any:
        """Remember `copied` for `original`, and keep that alive as long as the memo, which is keyed by its id."""
        self.memo[id(original)] = copied
        self.memo.setdefault(id(self.memo), []).append(original)
        return copied

    def _list_or_set(self, value: list[Any] | set[Any]) -> Any:
        copied = self._remember(value, type(value)())
        (copied.extend if isinstance(value, list) else copied.update)(map(self.part, value))
        return copied

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        copied = tuple(map(self.part, value))
        same = all(a is b for a, b in zip(value, copied, strict=True))
        if not same:
            self._remember(value, copied)
        return value if same else copied

    def _mapping(self, value: dict[Any, Any]) -> dict[Any, Any]:
        factory = (self.part(value.default_factory),) if isinstance(value, defaultdict) else ()
        copied: dict[Any, Any] = self._remember(value, type(value)(*factory))
        copied.update((self.part(key), self.part(item)) for key, item in value.items())
        return copied

    def _function(self, function: types.FunctionType) -> Any:
        """A function whose closure and defaults belong to the copy; one that holds nothing of its own is shared."""
        compiled = vars(function).get(_ORIGINAL)
        if compiled is not None:
            return self.part(compiled)  # torch.compile's wrapper: what runs is the function inside
        if _holds_nothing(function, {id(function)}):
            return function
        cells = function.__closure__ or ()
        name, code = function.__name__, function.__code__
        own = tuple(self.memo.setdefault(id(cell), types.CellType()) for cell in cells)
        copied = types.FunctionType(code, function.__globals__, name, closure=own if cells else None)
        self._remember(function, copied)
        functools.update_wrapper(copied, function, updated=())
        vars(copied).pop("__wrapped__", None)
        for cell, own_cell in zip(cells, own, strict=True):
            self._fill_cell(cell, own_cell)
        copied.__defaults__ = self.part(function.__defaults__)
        copied.__kwdefaults__ = self.part(function.__kwdefaults__)
        vars(copied).update({name: self.part(value) for name, value in vars(function).items()})
        return copied

    def _fill_cell(self, cell: types.CellType, copied: types.CellType) -> None:
        try:
            contents = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        if not _is_filled(copied):
            copied.cell_contents = None  # a function may hold itself
            copied.cell_contents = self.part(contents)

    def _partial(self, value: functools.partial[Any]) -> Any:
        copied = functools.partial(self.part(value.func), *map(self.part, value.args), **self._mapping(value.keywords))
        return self._remember(value, copied)

    def _packed_sequence(self, value: PackedSequence) -> Any:
        """Copy a packed sequence, whose batch sizes are on the CPU wherever its data is."""
        data, sizes, order, back = value
        copied = PackedSequence(self.part(data), sizes.cpu().clone(), self.part(order), self.part(back))
        return self._remember(value, copied)

    def _object(self, value: Any) -> Any:
        size = len(self.memo)
        try:
            with _TensorsOnMeta(self.tensors):
                return copy.deepcopy(value, self.memo)
        except Exception:  # whatever a user's __deepcopy__ or __reduce__ raises
            while len(self.memo) > size:
                self.memo.popitem()  # half-made copies
        try:
            attributes = vars(value)
            copied = object.__new__(type(value))
        except TypeError:  # a lock, a file, a stream: an object that is not made of Python attributes
            return self._remember(value, value)
        self._remember(value, copied)
        vars(copied).update({name: self.part(item) for name, item in attributes.items()})
        return copied


def _is_constant(value: Any) -> bool:
    """Whether `value` is immutable, so that copies may share it. Exactly these classes: subclasses have attributes."""
    kind = type(value)
    return kind in _CONSTANTS or (kind is tuple and _CONSTANTS.issuperset(map(type, value)))


def _holds_nothing(function: Any, seen: set[int]) -> bool:
    """Whether `function` refers to nothing but code and other such functions; its defaults may be any constants.

    A number in a closure is not a constant: a function can use it to count.
    """
    if not isinstance(function, types.FunctionType):
        return isinstance(function, _CODE)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    values += [value for value in defaults if not isinstance(value, _ATOMIC)]
    new = [value for value in values if id(value) not in seen]
    return _ORIGINAL not in vars(function) and all(_holds_nothing(value, seen | {id(value)}) for value in new)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


_COPIERS: dict[type, Callable[[_Copy, Any], Any]] = {
    **dict.fromkeys((list, set), _Copy._list_or_set),
    tuple: _Copy._tuple,
    **dict.fromkeys((dict, OrderedDict, defaultdict), _Copy._mapping),
    types.FunctionType: _Copy._function,
    types.MethodType: lambda copier, method: types.MethodType(*map(copier.part, (method.__func__, method.__self__))),
    functools.partial: _Copy._partial,
    torch.Generator: lambda copier, value: copier._remember(value, torch.Generator(value.device)).set_state(
        value.get_state()
    ),
    PackedSequence: _Copy._packed_sequence,
}


class _TensorsOnMeta(TorchFunctionMode):
    """While open, tensors that `copy.deepcopy` meets in an object become tensors on `meta` instead of real copies."""

    def __init__(self, tensors: MetaTensors) -> None:
        super().__init__()
        self.tensors = weakref.proxy(tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            if func is torch.Tensor.__deepcopy__:
                return self.tensors.tensor(args[0])
            if func is torch.Tensor.clone:
                # Parameter.__deepcopy__ clones its data, and does not ask modes.
                return self.tensors.data(args[0])
            return func(*args, **(kwargs or {}))
