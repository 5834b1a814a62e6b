"""The shadow: a private twin of a model whose tensors are all on the `meta` device.

Same classes, names, shapes, strides, ties, attributes and flags; no values and no memory. The twin is what runs, so the
user's model is never moved, hooked, cast or called.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.overrides import TorchFunctionMode

from memsize.tracing.known import remember

_ATOMIC = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
)
_EMPTY = (OrderedDict, dict, set, list)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_KNOWN_ELEMENTS = 2**18


def shadow(model: nn.Module) -> nn.Module:
    """A twin of `model` on `meta`. Tensors that share memory share it in the twin; parameters keep `requires_grad`.

    Small integer and boolean tensors keep their values beside them (`memsize.tracing.known`), since models look at
    them. An attribute that cannot be copied is shared with the original.
    """
    return _Copy().module(_eager(model))


def meta_copy(value: Any) -> Any:
    """`value` (any nest: a model's inputs, say) with each of its tensors on `meta`, sharing memory as before."""
    return _Copy().value(value)


def _eager(model: nn.Module) -> nn.Module:
    # torch.compile wraps a module; what it compiles is the module inside.
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model  # type: ignore[return-value]


class _Copy:
    """One copying pass. The memo is `copy.deepcopy`'s, so that shared objects stay shared however they are reached."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def module(self, model: nn.Module) -> nn.Module:
        originals = [_eager(module) for module in model.modules()]
        for module in originals:
            self._announce(module)
        for module in originals:
            self._fill(module)
        twin: nn.Module = self.memo[id(model)]
        return twin

    def value(self, value: Any) -> Any:
        return self._deepcopy(value)

    def _announce(self, module: nn.Module) -> None:
        """Give the module an empty twin first: attributes may refer to any module, also to their own owner."""
        if isinstance(module, torch.jit.ScriptModule):
            self.memo[id(module)] = copy.deepcopy(module)
        elif id(module) not in self.memo:
            self.memo[id(module)] = type(module).__new__(type(module))

    def _fill(self, module: nn.Module) -> None:
        twin = self.memo[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return
        state = vars(twin)
        for name, value in vars(module).items():
            if name in _REGISTRIES:
                state[name] = self._registry(value)
            elif name == "_compiled_call_impl":
                state[name] = None
            elif isinstance(value, _ATOMIC) or (type(value) is tuple and all(isinstance(v, _ATOMIC) for v in value)):
                state[name] = value
            elif type(value) in _EMPTY and not value:
                # Most of a module's attributes are empty hook tables; deepcopy would spend ten times as long on them.
                state[name] = self.memo[id(value)] = type(value)()
            else:
                state[name] = self._deepcopy(value)

    def _registry(self, entries: dict[str, Any]) -> dict[str, Any]:
        copied = {name: None if entry is None else self._entry(entry) for name, entry in entries.items()}
        return OrderedDict(copied) if isinstance(entries, OrderedDict) else copied

    def _entry(self, entry: Any) -> Any:
        if isinstance(entry, nn.Module):
            return self.memo[id(_eager(entry))]
        if isinstance(entry, torch.Tensor):
            return self.tensor(entry)
        return self._deepcopy(entry)

    def _deepcopy(self, value: Any) -> Any:
        try:
            with _TensorsOnMeta(self):
                return copy.deepcopy(value, self.memo)
        except Exception:  # whatever a user's __deepcopy__ or __reduce__ raises: sharing is the next best
            return value

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """The one `meta` twin of `original`."""
        if id(original) not in self.memo:
            twin = self._new_tensor(original)
            self.memo[id(original)] = twin
            # The memo is keyed by id: the original must outlive it.
            self.memo.setdefault(id(self.memo), []).append(original)
        found: torch.Tensor = self.memo[id(original)]
        return found

    def _new_tensor(self, original: torch.Tensor) -> torch.Tensor:
        if is_lazy(original):
            kind: Any = UninitializedParameter if isinstance(original, nn.Parameter) else UninitializedBuffer
            lazy: torch.Tensor = kind(requires_grad=original.requires_grad, device="meta", dtype=original.dtype)
            return lazy
        twin = self.data(original)
        if isinstance(original, nn.Parameter) and not isinstance(twin, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=original.requires_grad)
            twin.__dict__.update(self._tensor_attributes(original))
        elif original.requires_grad:
            twin.requires_grad_()
        return twin

    def _tensor_attributes(self, original: torch.Tensor) -> dict[str, Any]:
        return {name: self._deepcopy(value) for name, value in vars(original).items() if isinstance(value, _ATOMIC)}

    def data(self, original: torch.Tensor) -> torch.Tensor:
        if hasattr(original, "__tensor_flatten__"):
            return self._wrapper(original)
        if original.layout is not torch.strided or original.is_quantized or original.is_nested:
            return original.detach().to("meta")
        twin = self._strided(original)
        if original.device.type == "meta" or original.is_floating_point() or original.numel() > _KNOWN_ELEMENTS:
            return twin
        return remember(twin, original.detach().cpu().clone())

    def _wrapper(self, original: torch.Tensor) -> torch.Tensor:
        """A wrapper subclass (torchao, DTensor): its inner tensors on `meta`, put together again by its own class."""
        names, context = original.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: self.tensor(getattr(original, name)) for name in names}
        rebuilt: torch.Tensor = type(original).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, original.shape, original.stride()
        )
        return rebuilt

    def _strided(self, original: torch.Tensor) -> torch.Tensor:
        storage = original.untyped_storage()
        base = self.storages.get(storage._cdata)
        if base is None:
            base = torch.UntypedStorage(storage.nbytes(), device="meta")
            self.storages[storage._cdata] = base
            self.memo.setdefault(id(self.memo), []).append(storage)
        # Not as_strided: the twin of a plain tensor must not be a view of anything in autograd's eyes.
        empty = torch.empty(0, dtype=original.dtype, device="meta")
        return empty.set_(base, original.storage_offset(), original.shape, original.stride())


class _TensorsOnMeta(TorchFunctionMode):
    """While an attribute is deep-copied, tensors met in it become `meta` twins instead of copies."""

    def __init__(self, copying: _Copy) -> None:
        super().__init__()
        self.copying = weakref.proxy(copying)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            if func is torch.Tensor.__deepcopy__:
                return self.copying.tensor(args[0])
            if func is torch.Tensor.clone:
                # Parameter.__deepcopy__ clones its data, and does not ask modes.
                return self.copying.data(args[0])
            return func(*args, **(kwargs or {}))
