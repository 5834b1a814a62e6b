"""Devices that a program names where tensors are made and moved.

``x.cuda()`` and ``device="cuda"`` ask for a device that a machine without a GPU refuses and on which a machine with one
would really allocate: during a run they mean the device of the run's tensors. Tensors that a program puts on a GPU, or
on the host of one, are on `meta`, with a number that says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from memsize.processes.simulation import Function, Override, current_part
from memsize.torch_internals.meta import is_meta

_device: Any = vars(torch._C.TensorBase)["device"]
_FACTORIES: Final = """
    arange empty empty_like empty_strided eye full full_like linspace logspace normal ones ones_like rand rand_like
    randint randint_like randn randn_like randperm scalar_tensor tril_indices triu_indices zeros zeros_like
    hann_window hamming_window blackman_window bartlett_window kaiser_window sparse_coo_tensor"""
_METHODS: Final = "new_empty new_full new_ones new_zeros new_empty_strided"


def by_device() -> Iterator[Override]:
    """The functions that take a device: those that make tensors, and those that move them."""
    yield from (Override(torch, name, _like if name.endswith("_like") else _on_device) for name in _FACTORIES.split())
    yield from (Override(Tensor, name, _beside) for name in _METHODS.split())
    yield from (Override(Tensor, "to", _moved), Override(Tensor, "cuda", _moved_to_cuda))
    yield Override(Tensor, "cpu", _moved_to_cpu)


def on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of such a function, with the place of stand-ins for a GPU that they name."""
    device = kwargs.get("device")
    stand_in_device = None if device is None else named_gpu(device)
    return kwargs if stand_in_device is None else kwargs | {"device": stand_in_device}


def _on_device(original: Function, *args: Any, **kwargs: Any) -> Any:
    """A function that takes its device by keyword only."""
    return original(*args, **(on_meta(kwargs) if "device" in kwargs else kwargs))


def _like(original: Function, *args: Any, **kwargs: Any) -> Any:
    """``empty_like(x, device=…)``: on the host, it is a stand-in where a copy of `x` would be one."""
    if kwargs.get("device") is None:
        return original(*args, **kwargs)
    if args:
        args = (_model_of_meta(args[0], kwargs["device"]), *args[1:])
    stand_in_device = place_on(args[0] if args else kwargs["input"], kwargs["device"])
    return original(*args, **(kwargs | {"device": stand_in_device} if stand_in_device else kwargs))


def _beside(original: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``x.new_empty(sizes, device=…)``: on the host, it is a stand-in where `x` is one there."""
    function = _like if host_place(tensor) == place_of(tensor) else _on_device
    return function(original, _model_of_meta(tensor, kwargs.get("device")), *args, **kwargs)


def _model_of_meta(tensor: Tensor, device: Any) -> Tensor:
    """The tensor to make another like: where a program names `meta`, it is none on a GPU, so that the other isn't."""
    names_meta = isinstance(device, (str, torch.device)) and torch.device(device) == _META
    return tensor.to("meta") if names_meta and type(tensor) in (Tensor, nn.Parameter) and is_meta(tensor) else tensor


def _moved(original: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``x.to(device)``, the device in front or by keyword."""
    if args and isinstance(args[0], Tensor) and is_meta(args[0]):
        tensor, target = _towards(tensor, place_of(args[0]))
        args = (target, args[0].dtype, *args[1:])
    elif args and not isinstance(args[0], (torch.dtype, Tensor)) and (gpu := place_on(tensor, args[0])):
        tensor, target = _towards(tensor, gpu)
        args = (target, *args[1:])
    elif kwargs.get("device") is not None and (gpu := place_on(tensor, kwargs["device"])):
        tensor, target = _towards(tensor, gpu)
        kwargs = kwargs | {"device": target}
    return original(tensor, *args, **kwargs)


def _towards(tensor: Tensor, gpu: torch.device) -> tuple[Tensor, torch.device]:
    """The tensor and device to move, to have `tensor` on `gpu`: PyTorch returns one unchanged that is there."""
    if not is_meta(tensor):
        return tensor, gpu
    if place_of(tensor) == gpu:
        return tensor, _own_device(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        moved: Tensor = _ToOther.apply(tensor, gpu)  # type: ignore[no-untyped-call]
        return moved, _own_device(moved)
    return tensor, gpu


def _own_device(tensor: Tensor) -> torch.device:
    """The device that PyTorch compares with: a stand-in's has no number, a `FakeTensor` keeps its own."""
    with torch._C.DisableTorchFunction():
        device: torch.device = _device.__get__(tensor)
    return device


class _ToOther(torch.autograd.Function):
    """A tensor on another GPU, whose gradient goes back to where it was: PyTorch's own would not know where that is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gpu: torch.device) -> Tensor:
        ctx.origin = place_of(tensor)
        return tensor.to(gpu)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.origin), None


def _moved_to_cuda(_: Function, tensor: Tensor, device: Any = None, *__: Any, **___: Any) -> Tensor:
    tensor, target = _towards(tensor, (device is not None and named_gpu(device)) or gpu_place(None))
    return tensor.to(target)


def _moved_to_cpu(original: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    host = host_place(tensor)
    if host is not None:
        tensor, target = _towards(tensor, host)
        return tensor.to(target, **kwargs)
    copy: Tensor = original(tensor, *args, **kwargs)
    return copy


_CPU = torch.device("cpu")
_META = torch.device("meta")


class Gpus:
    """The GPUs that a program may name by their numbers. Here there is one, whatever number is named."""

    def named(self, number: int | None) -> int:
        """Return the GPU that a device of this number, or of none, means; it may raise."""
        return 0

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the GPU that a stand-in is on; the host has a number of its own."""
        return 0

    def number_on_host(self, tensor: Tensor) -> int | None:
        """Return the host's number if a copy of `tensor` there is a stand-in, and `None` if it has memory."""
        return None


_ONE_GPU: Final = Gpus()


def _gpus() -> Gpus:
    return current_part(Gpus) or _ONE_GPU


def gpu_place(number: int | None) -> torch.device:
    """Where stand-ins for tensors on a GPU are. Tensors forget the number: it says which GPU is meant, and tells what
    is asked for here from the `meta` that a program names itself.
    """
    return torch.device("meta", _gpus().named(number))


def named_gpu(device: Any) -> torch.device | None:
    """Where stand-ins are for a CUDA device, named by name, as an object or by its number; None for any other."""
    if type(device) is int:
        return gpu_place(device)
    if isinstance(device, str) and device.startswith("cuda"):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return gpu_place(device.index)
    return None


def place_of(tensor: Tensor) -> torch.device:
    return torch.device("meta", _gpus().number_of(tensor))


def place_on(tensor: Tensor, device: Any) -> torch.device | None:
    """Where a stand-in for `tensor` is on `device`; None where that is no GPU, and where there is none on the host."""
    on_cpu = isinstance(device, (str, torch.device)) and torch.device(device) == _CPU
    return host_place(tensor) if on_cpu else named_gpu(device)


def host_place(tensor: Tensor) -> torch.device | None:
    """Where a stand-in for what `tensor` is on the host is; None where that has memory."""
    number = _gpus().number_on_host(tensor) if is_meta(tensor) else None
    return None if number is None else torch.device("meta", number)


def means_stand_ins(device: Any) -> bool:
    """Whether tensors on `device` are stand-ins."""
    return device is not None and (named_gpu(device) is not None or torch.device(device).type == "meta")
