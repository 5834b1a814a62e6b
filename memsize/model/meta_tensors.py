"""Meta tensors that stand in for real ones: same shape, strides, dtype, ties and flags, and no memory.

Values that models look at are kept with them (`memsize.known_values.values`): those of small integer and boolean
tensors, and of large ones that are one number; of small floating buffers and inputs, and of parameters with a single
element.

Some are refused before anything touches them: PyTorch cannot walk through a model that contains itself, or modules that
cannot be hashed. A tensor may belong to a tracer of PyTorch: a `FakeTensor` refers to its mode, and that to weak
references that hold bare addresses. Copying these frees an address twice, and the process crashes whenever that memory
is used next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from memsize.errors import MemsizeError, TargetError
from memsize.known_values.toeplitz import diagonals_in, diagonals_of, set_diagonals
from memsize.known_values.values import (
    UNREADABLE,
    ConstantState,
    constant_of,
    has_single_value,
    is_small,
    set_constant,
    state_of,
)
from memsize.torch_internals.sparse_tensors import PARTS, with_parts

_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


class Plain(NamedTuple):
    """All that is needed to make the meta tensor of an ordinary tensor, one that fills its storage and has no
    attributes.

    `value` is its known value, if any; `storage` is the address of its memory. It keeps its tensor alive, since it is
    found by the tensor's id.
    """

    original: torch.Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool
    storage: int
    value: torch.Tensor | None


class MetaTensors:
    """One copying pass over tensors. The memo is that of `copy.deepcopy`, so each tensor has one copy however it is
    reached.

    `copy_attribute` copies the Python attributes of a tensor. `plain` holds the facts that earlier passes over the same
    tensors collected, and is extended by this one.
    """

    def __init__(self, memo: dict[int, Any], copy_attribute: Callable[[Any], Any], plain: dict[int, Plain]) -> None:
        self.memo = memo
        self._copy_attribute = copy_attribute
        self._plain = plain
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._values: dict[int, torch.UntypedStorage] = {}
        self._states: dict[int, ConstantState] = {}
        self._alive: list[Any] = []
        """Objects that these tables know by address, kept alive."""

    def tensor(self, original: torch.Tensor, looked_at: bool = True) -> torch.Tensor:
        """The one copy of `original`. Without `looked_at` its values are dropped even if small: nobody reads them."""
        copied: torch.Tensor | None = self.memo.get(id(original))
        if copied is None:
            plain = self._plain.get(id(original))
            if plain is None or plain.storage in self._storages:
                copied = self._new(original, looked_at)
                self._learn(original, copied)
            else:
                copied = self._again(plain)
            self.memo[id(original)] = copied
            self._alive.append(original)
        return copied

    def _learn(self, original: torch.Tensor, copied: torch.Tensor) -> None:
        """Note how `copied` was made, where that is simple enough to be repeated without looking at `original`."""
        ordinary = type(original) in _PLAIN_TYPES and not original.is_nested and not original.is_quantized
        if not ordinary or diagonals_of(copied) is not None or vars(original) or not _fills_storage(original):
            return
        value, is_parameter = constant_of(copied), isinstance(copied, nn.Parameter)
        if value is None or _fills_storage(value):
            pristine = None if value is None else value.clone()
            layout = (original.shape, original.stride(), original.dtype, is_parameter, original.requires_grad)
            storage = original.untyped_storage()._cdata
            self._plain[id(original)] = Plain(original, *layout, storage, pristine)

    def _again(self, plain: Plain) -> torch.Tensor:
        copied = torch.empty_strided(plain.shape, plain.strides, dtype=plain.dtype, device="meta")
        self._storages[plain.storage] = copied.untyped_storage()
        if plain.is_parameter:
            copied = nn.Parameter(copied, plain.requires_grad)
        elif plain.requires_grad:
            copied.requires_grad_()
        if plain.value is None:
            return copied
        value, state = plain.value.clone(), ConstantState()
        self._values[plain.storage], self._states[plain.storage] = value.untyped_storage(), state
        return set_constant(copied, value, state)

    def data(self, original: torch.Tensor, looked_at: bool = True) -> torch.Tensor:
        """A plain tensor that stands in for `original`: not a parameter, and no leaf that requires a gradient."""
        if type(original) not in _PLAIN_TYPES and hasattr(original, "__tensor_flatten__"):
            # A wrapper subclass (torchao, DTensor): its inner tensors on `meta`, reassembled by its own class.
            names, context = original.__tensor_flatten__()
            inner = {name: self.tensor(getattr(original, name)) for name in names}
            size = (original.shape, original.stride())
            return type(original).__tensor_unflatten__(inner, context, *size)  # type: ignore[attr-defined,no-any-return]
        if original.layout in PARTS:
            return with_parts(original, lambda part: self.data(part, False))
        if original.layout is not torch.strided or original.is_quantized or original.is_nested:
            try:
                return original.detach().to("meta")
            except (NotImplementedError, RuntimeError):  # what cannot exist on `meta` is shared with the original
                return original.detach()
        copied = self._strided(original)
        if original.is_meta:
            return _known_as(original, copied)
        has_values = original.untyped_storage().device.type != "meta"  # a FakeTensor only seems to have some
        if not looked_at or not has_values:
            return copied
        return self._remembered(copied, original) if is_small(original) else self._as_mask(copied, original)

    def _new(self, original: torch.Tensor, looked_at: bool) -> torch.Tensor:
        refuse_traced(original)
        if is_lazy(original):
            kind: Any = UninitializedParameter if isinstance(original, nn.Parameter) else UninitializedBuffer
            lazy: torch.Tensor = kind(requires_grad=original.requires_grad, device="meta", dtype=original.dtype)
            return lazy
        single = original.numel() == 1 or not original.is_floating_point()
        is_parameter = type(original) is nn.Parameter or isinstance(original, nn.Parameter)
        copied = self.data(original, looked_at and (single or not is_parameter))
        if is_parameter and (type(copied) is torch.Tensor or not isinstance(copied, nn.Parameter)):
            return self._parameter(original, copied)
        return copied.requires_grad_() if original.requires_grad else copied

    def _parameter(self, original: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """A parameter of the same class, since a library may look for its own (bitsandbytes), with its attributes."""
        kind = type(original)
        if kind in _PLAIN_TYPES:
            copied: torch.Tensor = nn.Parameter(data, requires_grad=original.requires_grad)
        else:
            copied = torch.Tensor._make_subclass(kind, data, original.requires_grad)
        attributes = {name: self._copy_attribute(value) for name, value in vars(original).items()}
        copied.__dict__.update(attributes | data.__dict__)
        return copied

    def _strided(self, original: torch.Tensor) -> torch.Tensor:
        storage = original.untyped_storage()
        base = self._storages.get(storage._cdata)
        if base is None:
            self._alive.append(storage)
            if _fills_storage(original):
                whole = torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device="meta")
                self._storages[storage._cdata] = whole.untyped_storage()
                return whole
            base = self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        # Not as_strided: the copy of a plain tensor must not be a view of anything in autograd's eyes.
        empty = torch.empty(0, dtype=original.dtype, device="meta")
        return empty.set_(base, original.storage_offset(), original.shape, original.stride())

    def _as_mask(self, copied: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
        """A large tensor that few numbers tell: integers that are all the same, or a square matrix by its diagonals."""
        if not _fills_storage(original) or original.dtype in UNREADABLE:
            return copied
        original = original.detach()
        if not (original.is_floating_point() or original.is_complex()) and has_single_value(original):
            state = self._state(original)
            state.uniform = True
            return set_constant(copied, original[(0,) * original.dim()].clone().cpu().expand(original.shape), state)
        is_square = original.dim() > 1 and original.shape[-1] == original.shape[-2]
        diagonals = diagonals_in(original) if is_square and original.dtype in _MASKS else None
        return copied if diagonals is None else set_diagonals(copied, diagonals.cpu(), self._state(original))

    def _remembered(self, copied: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
        """Keep known values: views of one small block keep sharing them; each view of a large one has its own."""
        storage, state = original.untyped_storage(), self._state(original)
        if storage.nbytes() > 4 * original.numel() * original.element_size() + 1024:
            return set_constant(copied, original.detach().cpu().clone(), state.for_view())
        if storage._cdata not in self._values:
            self._values[storage._cdata] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
        empty = torch.empty(0, dtype=original.dtype, device="cpu")
        block = self._values[storage._cdata]
        value = empty.set_(block, original.storage_offset(), original.shape, original.stride())
        return set_constant(copied, value, state)

    def _state(self, original: torch.Tensor) -> ConstantState:
        """The state for the memory of `original`, one for all tensors that share it."""
        return self._states.setdefault(original.untyped_storage()._cdata, ConstantState())


_MASKS = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _known_as(original: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    state, value, diagonals = state_of(original), constant_of(original), diagonals_of(original)
    uniform = state is not None and state.uniform and not is_small(original)
    own = ConstantState(None if state is None else state.assumption, uniform)
    if value is not None and state is not None:
        return set_constant(copied, value if uniform else value.clone(), own)
    return copied if diagonals is None else set_diagonals(copied, diagonals, own)


def _fills_storage(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


_OUTSIDE = "call memsize outside of torch.func, make_fx and torch.compile"
_ADVICE = {
    "FakeTensor": "make it outside of FakeTensorMode (memsize allocates no weights either way)",
    "FunctionalTensor": _OUTSIDE,
}


def refuse_traced_model(model: nn.Module) -> None:
    """Raise `MemsizeError` where a parameter or buffer of `model` belongs to a tracer."""
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    refuse_traced(tensor, f"{path}.{name}" if path else name)


def refuse_traced(tensor: torch.Tensor, name: str = "a tensor of the model or its input") -> None:
    """Raise `MemsizeError` for a tensor that belongs to a tracer: fake, functional, or wrapped by torch.func."""
    for kind in type(tensor).__mro__:
        if kind is torch.Tensor:
            break
        if kind.__name__ in _ADVICE and kind.__module__.startswith("torch."):
            raise MemsizeError(f"{name} is a {kind.__name__}: {_ADVICE[kind.__name__]}")
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise MemsizeError(f"{name} belongs to a transformation of PyTorch's: {_OUTSIDE}")


def refuse_endless(model: nn.Module) -> None:
    """Raise `TargetError` where listing the modules of `model`, or calling its ``train()``, could not end well."""
    above: dict[int, str] = {}
    done: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in above:
            outer = above[id(module)] or "the model itself"
            raise TargetError(f"{path} is {outer} again: train(), to() and half() of such a model never end")
        if id(module) in done:
            return
        if type(module).__hash__ is None:
            name = type(module).__name__
            raise TargetError(f"PyTorch cannot list modules of {name}, which cannot be hashed: give it a __hash__")
        done.add(id(module))
        above[id(module)] = path
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)
        del above[id(module)]

    visit(model, "")
