"""Overrides of PyTorch's Python functions that act before an op is dispatched: numbers from lists, and named devices
(`named_devices`).

``torch.tensor([1, 2], device=x.device)`` and ``x[:, [0, -1]]`` make their tensor below the dispatcher, where a dispatch
mode does not see it: on `meta` the numbers would be lost. Only threads of a run notice the overrides.

Known limits: names that a module imported from torch itself (``from torch import zeros``) are not replaced, nor are
``torch.cuda.FloatTensor`` and generators of a CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from memsize.cuda import autocast
from memsize.kernels.attention import UNCOMPILED_FLEX, flex_attention
from memsize.known_values.data_dependent import CPU_AUTOCAST, MASKS_COVER_IMAGE, mixed_devices
from memsize.known_values.values import ConstantState, constant_of, set_constant
from memsize.processes.simulation import Function, Override, ThreadPatches, current_part
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import map_tensors, tensors_in
from memsize.torch_internals.sparse_tensors import is_in_coordinates
from memsize.tracing.control_flow import dispatched
from memsize.tracing.named_devices import by_device, means_stand_ins, named_gpu, on_meta, place_of

_RECURRENT = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
_MASKS: Final = (torch.bool, torch.uint8)
_UNREADABLE = "item() cannot be called on meta tensors"
"""What PyTorch says where it reads the numbers of tensors in a list below the dispatcher."""
_DETECTION = "torchvision.models.detection.transform"
FLEX: Final = "torch.nn.attention.flex_attention"


class _Notes:
    def __init__(self, remarks: dict[str, None]) -> None:
        self.remarks = remarks


@contextmanager
def overridden(notes: dict[str, None]) -> Iterator[None]:
    """While open, a run is under way in this thread; remarks for the reader are added to `notes`."""
    with _overrides.active() as simulation, simulation.with_part(_Notes, _Notes(notes)), _uncompiled():
        yield


def _note(remark: str) -> None:
    if notes := current_part(_Notes):
        notes.remarks[remark] = None


def override_imported(module: Any) -> tuple[()]:
    """Let runs that are under way override a `module` that was imported since they began, such as `FLEX`; returns no
    further patches.
    """
    _overrides.renew()
    return ()


class Compiles:
    """A part of simulations in which code that the user compiles is compiled.

    `traced` and `lowered` restore PyTorch's functions, which the compiler knows by their identity, while Dynamo runs
    and while what comes after it does. `stands_for` is the device that code sees its tensors on, if not their own.
    """

    def __init__(
        self,
        traced: Callable[[], AbstractContextManager[None]] | None = None,
        lowered: Callable[[], AbstractContextManager[None]] | None = None,
        stands_for: torch.device | None = None,
        inline: Callable[[Any], None] = lambda module: None,
    ) -> None:
        self.traced = traced or suspended_overrides
        self.lowered = lowered or suspended_overrides
        self.stands_for = stands_for
        self.inline = inline
        """Called with each module whose call is traced."""
        self.is_tracing = False
        """Whether Dynamo is tracing, and not what comes after it."""
        self.leaves_cycles = False
        """Whether a frame was traced since the last collection."""


def compilation() -> Compiles | None:
    """The part of this thread's simulation in which `torch.compile` compiles, if it does."""
    return current_part(Compiles)


@contextmanager
def suspended_overrides() -> Iterator[None]:
    """Restore PyTorch's functions while open: the compiler knows them by their identity."""
    with _overrides.suspended():
        yield


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run code as it is written: `torch.compile` steps aside, and TorchScript neither fuses nor reorders."""
    dynamo = None if compilation() else sys.modules.get("torch._dynamo")
    optimizes = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        with nullcontext() if dynamo is None else torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch._C._set_graph_executor_optimize(optimizes)


_COMPILE: Final = torch.compile


def _as_written(original: Function, model: Any = None, **options: Any) -> Any:
    """`torch.compile` in code that is run as it is written, where Dynamo was not imported before."""
    if compilation() or original is not _COMPILE:
        return original(model, **options)
    return (lambda later: later) if model is None else model


def _patches() -> tuple[Override, ...]:
    detection, flex = sys.modules.get(_DETECTION), sys.modules.get(FLEX)
    patches = list(_patches_of_torch())
    if hasattr(detection, "paste_masks_in_image"):
        patches.append(Override(detection, "paste_masks_in_image", _masks_cover_image))
    if hasattr(flex, "flex_attention_hop"):
        patches.append(Override(flex, "flex_attention_hop", _fused_attention))
        patches.append(Override(flex, "_validate_device", _any_device))
        patches.append(Override(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", _InRuns))
    return tuple(patches)


@cache
def _patches_of_torch() -> tuple[Override, ...]:
    # PyTorch builds a table of its factories, by identity, on first use: that must not happen while they are replaced.
    _device_constructors()
    from_numbers = [(torch, "tensor"), (torch, "as_tensor"), (torch, "asarray")]
    return (
        *(Override(owner, name, _from_numbers) for owner, name in from_numbers),
        *by_device(),
        Override(Tensor, "new", _new),
        Override(Tensor, "new_tensor", _new_tensor),
        Override(Tensor, "__getitem__", _indexed),
        Override(Tensor, "__setitem__", _assigned),
        Override(Tensor, "__format__", _formatted),
        *(Override(torch._VF, name, _with_states_moved) for name in _RECURRENT.split()),
        Override(OpOverloadPacket, "__call__", _given_numbers),
        Override(HigherOrderOperator, "dispatch", partial(dispatched, _note)),
        Override(torch, "compile", _as_written),
        Override(torch._C, "_InferenceMode", lambda _, mode: _InferenceMode(mode)),
        Override(torch.autocast, "__enter__", _casting_on_the_cpu),
        Override(torch.cuda, "synchronize", lambda *_, **__: None),
        Override(torch.cuda, "current_device", lambda _: 0),
    )


# -- numbers from Python ----------------------------------------------------------------------------------------------


def _from_numbers(original: Function, *args: Any, **kwargs: Any) -> Any:
    """``torch.tensor`` and its like: made on the CPU, where numbers are real, and moved from there to `meta`."""
    if not args:
        args = tuple(kwargs.pop(name) for name in ("data", "obj") if name in kwargs)
    if not args:
        return original(**kwargs)
    data, more = args[0], args[1:]
    device = kwargs.get("device") or next(  # else that of ``with torch.device(...)`` or `torch.set_default_device`
        (mode.device for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, DeviceContext)), None
    )
    if isinstance(data, Tensor) or not means_stand_ins(device):
        try:
            return original(data, *more, **on_meta(kwargs))
        except RuntimeError as error:
            if isinstance(data, Tensor) or _UNREADABLE not in str(error):
                raise
            return original(_numbers(data), *more, **kwargs)
    return _moved_from_cpu(original, data, more, kwargs | {"device": device})


def _new_tensor(original: Function, tensor: Tensor, data: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device") or tensor.device
    if isinstance(data, Tensor) or not means_stand_ins(device):
        return original(tensor, data, *args, **on_meta(kwargs))
    return _moved_from_cpu(torch.tensor, data, args, {"dtype": tensor.dtype} | kwargs | {"device": device})


def _new(original: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The old constructor knows no sparse `meta` tensors. `SparseAdam` makes its updates by it."""
    if not is_in_coordinates(tensor):
        return original(tensor, *args, **kwargs)
    if args and isinstance(args[0], Tensor):
        return torch.sparse_coo_tensor(*args, check_invariants=False, **kwargs)
    return torch.empty(args or (0,), dtype=tensor.dtype, layout=torch.sparse_coo, device=place_of(tensor))


def _moved_from_cpu(make: Function, data: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    wants = kwargs.get("requires_grad", False)
    device = named_gpu(kwargs["device"]) or kwargs["device"]
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "requires_grad")}
    moved: Tensor = make(_numbers(data), *args, device="cpu", **kwargs).to(device)
    return moved.requires_grad_() if wants else moved


def _numbers(data: Any) -> Any:
    """`data` with its tensors' own numbers: PyTorch would read them below the dispatcher too."""
    if isinstance(data, Tensor):
        return data.tolist() if is_meta(data) else data
    return type(data)(map(_numbers, data)) if type(data) in (list, tuple) else data


def _indexed(original: Function, tensor: Tensor, index: Any, *value: Any) -> Any:
    if is_meta(tensor):
        if type(index) is list:
            index = _index(index, tensor)
        elif type(index) is tuple and any(type(part) is list for part in index):
            index = tuple(_index(part, tensor) if type(part) is list else part for part in index)
    return original(tensor, index, *value)


def _assigned(original: Function, tensor: Tensor, index: Any, value: Any) -> Any:
    """``x[:3] = 1``: the number is on the host for CUDA's tensors, where others make a tensor of it on their device
    (torch/csrc/autograd/python_variable_indexing.cpp). Where places are listed, the kernel copies it to the device.
    """
    if is_meta(tensor) and isinstance(value, (int, float, complex)):
        parts = index if type(index) is tuple else (index,)
        # A mask lists no places: what is under it is filled with the number.
        if not any(isinstance(p, list) or (isinstance(p, Tensor) and p.dtype not in _MASKS) for p in parts):
            value = torch.tensor(value, dtype=tensor.dtype, device="cpu")
    return _indexed(original, tensor, index, value)


def _index(numbers: list[Any], tensor: Tensor) -> Any:
    plain = numbers and all(isinstance(number, (int, bool)) for number in numbers)
    return torch.tensor(numbers, device=place_of(tensor)) if plain else numbers


def _given_numbers(original: Function, packet: OpOverloadPacket, *args: Any, **kwargs: Any) -> Any:
    """Quantized ops want their scale as a number, where torch.fx passes the tensor that holds it."""
    if packet._qualified_op_name.startswith("quantized::"):
        args = tuple(_number(argument) for argument in args)
    return original(packet, *args, **kwargs)


def _number(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and is_meta(value) and not value.dim() and constant_of(value) is not None
    return value.item() if is_number else value


def _formatted(original: Function, tensor: Tensor, spec: str) -> str:
    """Format a known value as its number, in f-strings; with a format, PyTorch copies any single one from the GPU."""
    number = _number(tensor)
    if number is tensor and spec and is_meta(tensor) and not tensor.dim() and type(tensor) is Tensor:
        number = tensor.to("cpu").item()
    text: str = original(tensor, spec) if number is tensor else format(number, spec)
    return text


class _InferenceMode:
    """Takes as much memory as PyTorch's own, and is `torch.no_grad` beside what autocast does: that one skips autograd
    altogether, and with it the step that takes composite ops apart, so that a dispatch mode would get them whole.
    """

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled(), autocast.region.is_inference
        torch._C._set_grad_enabled(not self._mode)
        autocast.region.is_inference = self._mode

    def __exit__(self, *error: object) -> None:
        gradients, autocast.region.is_inference = self._before
        torch._C._set_grad_enabled(gradients)


# -- devices mixed ----------------------------------------------------------------------------------------------------


def _with_states_moved(original: Function, tensor: Tensor, *args: Any) -> Any:
    """A recurrent net refuses hidden states that were made on the CPU, before any op of it is dispatched."""
    position = int(isinstance(args[0], Tensor) and args[0].dim() == 1)  # the batch sizes of a packed sequence
    states = args[position]
    if is_meta(tensor) and any(not is_meta(state) for state in tensors_in(states)):
        _note(mixed_devices())
        moved = map_tensors(lambda state: state.to(place_of(tensor)), states)
        args = (*args[:position], moved, *args[position + 1 :])
    return original(tensor, *args)


def _casting_on_the_cpu(original: Function, region: torch.autocast) -> Any:
    """A region for the CPU leaves a GPU's tensors alone, and so it does here."""
    if region.device == "cpu" and region._enabled:
        _note(CPU_AUTOCAST)
    return original(region)


# -- torchvision ------------------------------------------------------------------------------------------------------


def _masks_cover_image(
    original: Function, masks: Tensor, boxes: Tensor, img_shape: tuple[int, int], *args: Any, **kwargs: Any
) -> Any:
    """Mask R-CNN pastes the mask of each object into a picture of the image, by the corners of its box, which are read
    as numbers. Boxes that are data are taken to cover the image.
    """
    if is_meta(boxes) and constant_of(boxes) is None:
        height, width = img_shape
        corners = torch.tensor([0, 0, width, height], dtype=boxes.dtype, device="cpu")
        corners = corners.repeat(len(boxes), 1)
        boxes = set_constant(boxes.detach(), corners, ConstantState(MASKS_COVER_IMAGE))
    return original(masks, boxes, img_shape, *args, **kwargs)


# -- FlexAttention ----------------------------------------------------------------------------------------------------


class _InRuns:
    """True in threads of a run, elsewhere the original: FlexAttention calls its operator itself, not a compiled one."""

    def __init__(self, original: object) -> None:
        self.original = original

    def __bool__(self) -> bool:
        return bool(_overrides.is_inside() or self.original)


def _any_device(original: Function, query: Tensor, *others: Tensor) -> None:
    """FlexAttention refuses `meta` before it does anything."""
    if not is_meta(query):
        original(query, *others)


def _fused_attention(original: Function, query: Tensor, *args: Any) -> Any:
    if not is_meta(query):
        return original(query, *args)
    _note(UNCOMPILED_FLEX)
    return flex_attention(query, *args)


_overrides = ThreadPatches(_patches)
