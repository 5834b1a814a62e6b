"""Attributes and methods of `Tensor` on a virtual GPU, where stand-ins say that they are CUDA tensors.

A stand-in is a `meta` tensor. Above autograd its Python attributes answer as a CUDA tensor's would; inside an op,
where PyTorch's own kernels in Python read them, they tell the truth.

``model.cuda()`` moves a module in place, and a stand-in has no values. `CpuRestore` puts the original tensors back
after a block of code, so that its weights are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import TensorWeakRef

from memsize.known_values.propagation import carry_over
from memsize.known_values.values import CONSTANT
from memsize.processes.patches import Patch, calling, wrapping
from memsize.torch_internals.meta import is_meta
from memsize.tracing.saved_tensors import read_saved
from memsize.virtual.device_assignment import HOST, claim, devices, is_own_meta, is_own_storage
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.ledger.gpu_storages import below_autograd

_TYPES: Final = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
_CPU = torch.device("cpu")
_FAKES: Final = (
    "memsize runs no fake tensors, which torch.export and FakeTensorMode make: leave that call out, or let it follow "
    "the training steps, after which the script is ended"
)
_STANDS_FOR = "_memsize_stands_for"
"""The attribute of a gradient that is not where its tensor is, which keeps the one that is meant."""
_TO_COPY: Any = torch.ops.aten._to_copy.default
_base = torch._C.TensorBase
_device: Any = vars(_base)["device"]
_is_cuda: Any = vars(_base)["is_cuda"]
_is_cpu: Any = vars(_base)["is_cpu"]
_data: Any = vars(_base)["data"]
_grad: Any = vars(_base)["grad"]
_lazy: Any = nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]


def replacements(ledger: VirtualLedger) -> Iterator[Patch]:
    """Patch the attributes of `Tensor` for a run that `ledger` records."""
    host_memory = ledger.host_memory
    yield Tensor, "device", property(lambda t: devices().device_of(t) if is_stand_in(t) else _device.__get__(t))
    yield Tensor, "is_meta", property(lambda t: is_meta(t) and not is_stand_in(t))
    yield Tensor, "is_cuda", property(lambda t: _is_on_gpu(t) or _is_cuda.__get__(t))
    yield Tensor, "is_cpu", property(lambda t: not _is_on_gpu(t) if is_stand_in(t) else _is_cpu.__get__(t))
    yield wrapping(Tensor, "numpy", _numpy)
    yield Tensor, "data", property(_data.__get__, partial(_set_data, ledger))
    yield Tensor, "grad", property(_grad.__get__, partial(_set_grad, ledger), _grad.__delete__)
    yield torch.autograd.function.BackwardCFunction, "saved_tensors", property(read_saved)
    moves = {"to": calling(partial(_to, ledger), Tensor.to), "cuda": calling(_cuda, Tensor.cuda)}
    moves["get_device"] = lambda t: devices().number_of(t) if _is_on_gpu(t) else _base.get_device(t)
    yield from ((Tensor, name, move) for name, move in moves.items())
    yield wrapping(nn.Module, "to", _move_module, ledger)
    yield wrapping(nn.Module, "cuda", _module_to_gpu, ledger)
    compatible = calling(
        lambda original, old, new: is_meta(old) != is_meta(new) or original(old, new),
        torch._has_compatible_shallow_copy_type,
    )
    yield torch, "_has_compatible_shallow_copy_type", compatible
    yield _lazy, "_allowed_methods", [*_lazy._allowed_methods, *moves.values(), compatible]
    yield wrapping(_lazy, "materialize", _materialize, ledger)
    yield Tensor, "data_ptr", _tensor_address
    storage = torch.UntypedStorage
    yield wrapping(storage, "data_ptr", lambda read, s: s._cdata if s.device.type == "meta" else read(s))
    yield wrapping(storage, "copy_", _copy_storage)
    yield wrapping(storage, "__getitem__", _slice_storage, ledger)
    # Memory of a GPU can be shared as it is (torch/storage.py).
    yield wrapping(
        storage, "share_memory_", lambda share, s, *a, **k: s if _is_stand_in_storage(s) else share(s, *a, **k)
    )
    yield wrapping(storage, "is_shared", lambda original, s: _is_stand_in_storage(s) or original(s))
    yield Tensor, "pin_memory", lambda t, *device: host_memory.pin(t)
    yield Tensor, "is_pinned", lambda t, *device: host_memory.holds(t)
    yield torch.autograd.graph.save_on_cpu, "__init__", _save_on_cpu
    yield Tensor, "record_stream", lambda t, stream: ledger.hand_over(t, (stream.device_index, stream.stream_id))
    yield Tensor, "type_as", lambda t, other: t.to(other)
    yield wrapping(Tensor, "type", _type)
    yield Tensor, "_make_wrapper_subclass", staticmethod(calling(_make_wrapper, Tensor._make_wrapper_subclass))
    yield FakeTensor, "__new__", staticmethod(calling(_make_fake, FakeTensor.__new__))
    yield wrapping(torch._C._nn, "_parse_to", _parse_to)
    yield torch, "Generator", Generator
    yield from ((torch.cuda, name, _OldType(name, (), {"dtype": dtype})) for name, dtype in _TYPES.items())
    yield wrapping(torch, "set_default_tensor_type", _set_default_type)
    # These read numbers, and there are none: the first would draw again for ever.
    draw = "_no_grad_trunc_normal_"
    yield wrapping(nn.init, draw, lambda fill, t, *args, **kwargs: t if is_stand_in(t) else fill(t, *args, **kwargs))
    text = "..., size={}"
    yield wrapping(
        torch._tensor_str,
        "_tensor_str",
        lambda show, t, indent: text.format(tuple(t.shape)) if is_stand_in(t) else show(t, indent),
    )
    yield wrapping(torch._utils, "_get_obj_state", _state_to_pickle)


def is_stand_in(tensor: Tensor) -> bool:
    """Whether the user's code is to see `tensor` elsewhere than on `meta`: on the GPU, or on the host."""
    return is_meta(tensor) and not below_autograd() and not is_own_meta(tensor)


def _is_on_gpu(tensor: Tensor) -> bool:
    return is_stand_in(tensor) and not devices().is_on_host(tensor)


def _numpy(original: Callable[..., Any], tensor: Tensor, **options: Any) -> Any:
    """An array of a stand-in on the host has memory: whoever asks for one reads it."""
    is_there = is_stand_in(tensor) and devices().is_on_host(tensor)
    return original(_TO_COPY(tensor.detach(), device=_CPU) if is_there else tensor, **options)


def _to(ledger: VirtualLedger, original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``x.to("meta")`` of a tensor on the GPU is another, which takes nothing there; there is no way back.

    Only the name is that of the program: as an object, `meta` may be where memsize itself moves a stand-in.
    """
    if is_meta(tensor) and not below_autograd():
        if is_own_meta(tensor):
            other = args[0] if args and isinstance(args[0], Tensor) else None
            device = torch._C._nn._parse_to(*args, **kwargs)[0] if other is None else None
            if (device is not None and device.type == "cuda") or (other is not None and _is_on_gpu(other)):
                return _cuda(original, tensor)
        elif any(type(named) is str and named == "meta" for named in (*args[:1], kwargs.get("device"))):
            named = (value.dtype if isinstance(value, Tensor) else value for value in (*args, *kwargs.values()))
            return _off_gpu(ledger, tensor, next((value for value in named if isinstance(value, torch.dtype)), None))
    return original(tensor, *args, **kwargs)


def _cuda(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's error where the program's own `meta` tensors are moved to the GPU; `Module.to` explains it further."""
    if is_own_meta(tensor) and not below_autograd():
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    return original(tensor, *args, **kwargs)


def _off_gpu(ledger: VirtualLedger, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    with ledger.aside():
        kind = tensor.dtype if dtype is None else dtype
        return claim(torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="meta"))  # type: ignore[no-any-return]


def _move_module(
    ledger: VirtualLedger, original: Callable[..., nn.Module], module: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    """``model.to("meta")`` takes a model off the GPU, which is how programs let go of its memory."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)

    def left(tensor: Tensor) -> Tensor:
        kind = dtype if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()) else tensor.dtype
        return _off_gpu(ledger, tensor, kind) if is_stand_in(tensor) else tensor.to(device, kind)

    leaves = device is not None and device.type == "meta"
    with ledger.host_memory.moving(module):
        return module._apply(left) if leaves else original(module, *args, **kwargs)


def _module_to_gpu(
    ledger: VirtualLedger, original: Callable[..., nn.Module], module: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    with ledger.host_memory.moving(module):
        return original(module, *args, **kwargs)


def _materialize(ledger: VirtualLedger, original: Callable[..., None], tensor: Any, *args: Any, **options: Any) -> None:
    """A lazy module gets its parameters and buffers in its first forward."""
    original(tensor, *args, **options)
    ledger.mark(tensor, "parameter" if isinstance(tensor, nn.Parameter) else "buffer")


def _tensor_address(tensor: Tensor) -> int:
    """Where `tensor` would be: `meta` tensors are all at 0, and whoever compares addresses takes them for shared."""
    address: int = _base.data_ptr(tensor)
    if is_stand_in(tensor):
        address = tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return address


def _make_wrapper(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """A wrapper around stand-ins is where they are: autograd asks each tensor's device for its streams."""
    meta = torch.device("meta")
    options |= {name: meta for name, value in options.items() if name == "device" and _names_gpu(value)}
    return original(*(meta if _names_gpu(value) else value for value in args), **options)


def _names_gpu(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (torch.device, str)) else False


def _make_fake(
    original: Callable[..., Tensor], kind: type[Tensor], mode: Any, data: Tensor, *args: Any, **options: Any
) -> Tensor:
    """A fake tensor of CUDA asks the driver, in C++ code that may not fail."""
    if is_stand_in(data):
        raise RuntimeError(_FAKES)
    return original(kind, mode, data, *args, **options)


def _save_on_cpu(hooks: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
    """PyTorch's own hooks copy into new pinned memory, row by row, which would be written here. Copies are only brought
    back: small ones too are stand-ins, without values to make and to look at.
    """

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        is_copied = is_meta(tensor) and not is_own_meta(tensor) and tensor.layout is torch.strided
        layout = torch.contiguous_format if pin_memory and is_copied else torch.preserve_format
        where = torch.device("meta", HOST) if is_copied else "cpu"
        return tensor.device, tensor.to(where, non_blocking=pin_memory, memory_format=layout)

    super(torch.autograd.graph.save_on_cpu, hooks).__init__(
        pack, lambda packed: packed[1].to(packed[0], non_blocking=pin_memory)
    )


def _copy_storage(original: Callable[..., Any], storage: Any, source: Any, *options: Any, **named: Any) -> Any:
    """Deep copies go through storages, and have no device that would tell the GPU's from the program's own `meta`."""
    stand_in = source if source.device.type == "meta" else storage
    if stand_in.device.type != "meta" or is_own_storage(stand_in):
        return original(storage, source, *options, **named)
    return storage.fill_(0) if storage.device.type == "cpu" else storage


def _is_stand_in_storage(storage: Any) -> bool:
    return storage.device.type == "meta" and not is_own_storage(storage)


def _slice_storage(ledger: VirtualLedger, original: Callable[..., Any], storage: Any, index: Any) -> Any:
    """On the GPU a slice of a storage is another one with the same memory; `meta` has none."""
    if not isinstance(index, slice) or not _is_stand_in_storage(storage):
        return original(storage, index)
    begin, end, step = index.indices(storage.nbytes())
    if step != 1:
        raise RuntimeError(f"Trying to slice with a step of {step}, but only a step of 1 is supported")
    sliced = torch.UntypedStorage(max(0, end - begin), device="meta")
    ledger.share(sliced, storage)
    return sliced


def _set_data(ledger: VirtualLedger, tensor: Tensor, value: Tensor) -> None:
    """``p.data = p.data.cuda()`` keeps the object on CUDA, and so all that optimizers hold of it. PyTorch takes tensors
    of the CPU and of CUDA for the same type, but not those of `meta`: here the two exchange what they are made of. A
    gradient stays where it is, which PyTorch's own are not asked to here: another stands for it until its data is
    replaced too, or the tensor is back. What is known of the values is what is known of the new ones.
    """
    vars(tensor).pop(_STANDS_FOR, None)
    vars(tensor).pop(CONSTANT, None)
    carry_over(value, tensor)
    if is_meta(tensor) == is_meta(value):
        _data.__set__(tensor, value)
        return
    fresh, grad = value.detach().requires_grad_(tensor.requires_grad), tensor.grad
    torch._C._swap_tensor_impl(tensor, fresh)
    if grad is not None:
        gradient = vars(grad).get(_STANDS_FOR)
        if gradient is None or is_meta(gradient) != is_meta(value):
            gradient = torch.empty((), dtype=grad.dtype, device=value.device).expand(grad.shape)
            vars(gradient)[_STANDS_FOR] = grad
        # Of any shape: a flat parameter of FSDP is whole at times, and its gradient is not.
        data = gradient.detach()
        _data.__set__(gradient, tensor.detach())
        _grad.__set__(tensor, gradient)
        _data.__set__(gradient, data)
    if is_meta(tensor) and isinstance(tensor, nn.Parameter):
        ledger.mark(tensor, "parameter")


def _set_grad(ledger: VirtualLedger, tensor: Tensor, gradient: Tensor | None) -> None:
    """``x.grad = y``; where only one has memory, as the other came from the GPU, both are stand-ins from here on."""
    if gradient is not None and is_meta(tensor) != is_meta(gradient):
        standing, real = (tensor, gradient) if is_meta(tensor) else (gradient, tensor)
        if devices().is_on_host(standing) and _is_cpu.__get__(real):
            ledger.stand_in(real)
    if gradient is not None and is_stand_in(tensor):
        ledger.mark_gradient(tensor, gradient)
    _grad.__set__(tensor, gradient)


def _parse_to(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    named = args[0] if args else kwargs.get("device")
    if type(named) is int:
        kwargs.pop("device", None)
        args = (torch.device("cuda", named), *args[1:])
    return original(*args, **kwargs)


def _type(original: Callable[..., Any], tensor: Tensor, dtype: Any = None, **options: Any) -> Any:
    """``x.type()`` names the type, ``x.type(torch.cuda.FloatTensor)`` converts to one of the GPU."""
    if dtype is None:
        name: str = original(tensor)
        module = "torch.cuda." if _is_on_gpu(tensor) else "torch."
        return name.replace("torch.meta.", module) if is_stand_in(tensor) else name
    kind = _old_type(dtype)
    return original(tensor, dtype, **options) if kind is None else tensor.to(devices().device, kind)


class _OldType(type):
    """``torch.cuda.FloatTensor``: makes tensors, and tells whether something is one of its own."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Tensor:
        sizes = len(args) == 1 and isinstance(args[0], torch.Size)
        if sizes or all(isinstance(size, int) for size in args):
            return torch.empty(*args or (0,), dtype=cls.dtype, device=devices().device)
        return torch.as_tensor(args[0], dtype=cls.dtype).to(devices().device)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype is cls.dtype


def _old_type(named: Any) -> torch.dtype | None:
    """The dtype of one of the old types on a GPU, by itself or by its name; None for anything else."""
    if isinstance(named, _OldType):
        return named.dtype
    module, _, kind = str(named).rpartition(".")
    return _TYPES.get(kind) if module == "torch.cuda" else None


def _set_default_type(original: Callable[[Any], None], named: Any) -> None:
    kind = _old_type(named)
    torch.set_default_device(None if kind is None else devices().device)
    if kind is None:
        original(named)
    elif kind.is_floating_point:
        torch.set_default_dtype(kind)


def _state_to_pickle(original: Callable[[Any], Any], value: Any) -> Any:
    state = original(value)
    return {name: item for name, item in state.items() if name != CONSTANT} if isinstance(state, dict) else state


class Generator(torch._C.Generator):
    """A generator of random numbers that says it is the GPU's, where one was asked for; it counts on the CPU."""

    _on_gpu = False

    def __new__(cls, device: Any = "cpu") -> Generator:
        generator: Generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        named = torch.device(device)
        generator._on_gpu = named.type == "cuda"
        if generator._on_gpu:
            devices().check_index(-1 if named.index is None else named.index)
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its numbers are drawn."""
        return devices().device if self._on_gpu else torch.device("cpu")


# -- tensors that return to the CPU -----------------------------------------------------------------------------------


class CpuRestore:
    """The tensors of the CPU that became stand-ins while this was open, but for those that the program drops."""

    def __init__(self) -> None:
        self._swapped: list[tuple[Callable[[], Tensor | None], Tensor]] = []
        self._buffers: list[tuple[ReferenceType[nn.Module], str, Tensor]] = []

    def replacements(self) -> Iterator[Patch]:
        """Patch the functions that move a tensor or a module in place."""
        yield wrapping(torch._C, "_swap_tensor_impl", self._swapping)
        yield wrapping(nn.Module, "_apply", self._applying)

    def _swapping(self, original: Callable[[Tensor, Tensor], None], one: Tensor, other: Tensor) -> None:
        original(one, other)
        if is_meta(one) and not is_meta(other):
            # PyTorch exchanges no wrapper that has weak references, and a later move of the module would do so.
            is_wrapper: bool = is_traceable_wrapper_subclass(one)
            self._swapped.append(((lambda: one) if is_wrapper else TensorWeakRef(one), other))

    def _applying(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_meta(buffer):
                self._buffers.append((ReferenceType(module), name, buffer))
        return original(module, *args, **kwargs)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back at the end."""
        try:
            yield
        finally:
            for stand_in, other in reversed(self._swapped):
                one = stand_in()
                if one is not None and is_meta(one):
                    torch._C._swap_tensor_impl(one, other)
            for owner, name, buffer in reversed(self._buffers):
                buffers = getattr(owner(), "_buffers", {})
                if buffers.get(name) is not None and is_meta(buffers[name]):
                    buffers[name] = buffer
