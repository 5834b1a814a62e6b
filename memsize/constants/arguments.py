"""An op's arguments with their real values in place of `meta` tensors, and real results back on `meta`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memsize.constants.assumptions import assumed_of
from memsize.constants.known import ASSUMED_ELEMENTS, cell_of, is_small, known, remember
from memsize.internals.pytree import map_tensors, tensors_in


def assumed_by(args: Any, kwargs: Any) -> str | None:
    """What was assumed to know the arguments, if anything."""
    cells = [cell_of(item) for item in args if isinstance(item, torch.Tensor)]
    nested = [item for item in args if isinstance(item, (list, tuple))]
    if nested or kwargs:
        cells += [cell_of(tensor) for tensor in tensors_in((nested, kwargs))]
    return assumed_of(cells)


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor as a meta tensor. There are no quantized meta tensors: these stay where they are."""
    return tensor if tensor.is_meta or tensor.is_quantized else tensor.to("meta")


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor as a meta tensor whose values stay known where it is small."""
    emptied = blank(tensor)
    return emptied if emptied is tensor or not is_small(tensor) else remember(emptied, tensor.detach())


def on_host(value: Any) -> Any:
    """Arguments as they can be computed with on the CPU: zeros stand for values that are not known."""
    if isinstance(value, dict) and isinstance(value.get("device"), torch.device):
        value = value | {"device": torch.device("cpu")}
    return map_tensors(_stand_in, value)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    value = known(tensor)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if value is None else value


def real_arguments(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments with each tensor's known values in its place; None when one is unknown."""
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "meta":
        kwargs = kwargs | {"device": torch.device("cpu")}
    flat = _real_flat(args, kwargs)
    if flat is not NotImplemented:
        return flat  # type: ignore[no-any-return]
    if any(known(tensor) is None for tensor in tensors_in((args, kwargs))):
        return None
    swap: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: known(tensor)  # type: ignore[assignment,return-value]  # noqa: E731
    return map_tensors(swap, args), map_tensors(swap, kwargs)


def _real_flat(args: Any, kwargs: Any) -> Any:
    """`real_arguments` for the common case that no argument is a sequence; NotImplemented otherwise."""
    real = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        value = item
        if isinstance(item, torch.Tensor):
            value = known(item)
            if value is None:
                return None
        elif isinstance(item, (list, tuple, dict)):
            return NotImplemented
        real.append(value)
    count = len(args)
    return tuple(real[:count]), dict(zip(kwargs, real[count:], strict=True)) if kwargs else kwargs


def mixes_devices(args: Any, kwargs: Any) -> bool:
    """Whether tensors of two devices meet, single numbers of the CPU apart, which go with any."""
    devices = {tensor.device.type for tensor in _with_size(args, kwargs)}
    return len(devices) > 1


def _with_size(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() or tensor.is_meta)


def sampled_share(func: Any, real: tuple[Any, Any], shape: tuple[int, ...]) -> float:
    """How large a part of an elementwise op's result is true, by its first rows; evenly spread ones are all alike."""
    rows = max(1, min(shape[0], ASSUMED_ELEMENTS // max(math.prod(shape[1:]), 1))) if shape else 1

    def begin(value: torch.Tensor) -> torch.Tensor:
        return value[:rows] if value.dim() == len(shape) and value.shape[0] == shape[0] else value

    sample: torch.Tensor = func(*map_tensors(begin, real[0]), **real[1])
    return int(sample.count_nonzero()) / max(sample.numel(), 1)
