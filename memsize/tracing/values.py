"""Runs ops where values matter: keeps known values up to date, answers `.item()`, and computes what `meta` cannot.

What has to be taken for granted is written into `assumptions`, what a reader should know into `notes`; both are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memsize.semantics import suspended
from memsize.tracing.known import cell_of, is_small, is_uniform, known, remember, uniform
from memsize.tracing.nest import map_tensors, tensors_in

_aten = torch.ops.aten
_ITEM = _aten._local_scalar_dense.default
_TO = _aten._to_copy.default
_EQUAL = _aten.equal.default
_FINITE = {_aten.isnan.default: False, _aten.isinf.default: False, _aten.isposinf.default: False}
_FINITE |= {_aten.isneginf.default: False}
_HOST_LIMIT = 2**31
"""Bytes of stand-in arguments that an op without a meta kernel may take on the CPU."""


class UnknownValueError(RuntimeError):
    """The model's control flow or an output's shape depends on a value that only real data has."""


class _Op:
    """What one overload does to its arguments; looked up once per overload."""

    __slots__ = ("aliases", "dynamic", "mutates", "pointwise")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.mutates = schema.is_mutable
        self.aliases = not self.mutates and any(r.alias_info is not None for r in schema.returns)
        self.pointwise = torch.Tag.pointwise in func.tags
        self.dynamic = torch.Tag.dynamic_output_shape in func.tags


class Values:
    """The known values of one run. Everything it learns is on the tensors themselves."""

    def __init__(self) -> None:
        self.assumptions: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self._ops: dict[Any, _Op] = {}

    def carry(self, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`result` is `source` under another name: what is known of one is known of the other."""
        cell = cell_of(source)
        value = None if cell is None else known(source)
        return result if value is None else remember(result, value, cell)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result on `meta`, by PyTorch's own kernel or, where it has none, by one run on the CPU."""
        if func is _ITEM:
            return self._item(args[0])
        if func is _EQUAL:
            return self._equal(args[0], args[1])
        if func is _TO and _leaves_meta(args[0], kwargs):
            return self._to_host(args[0], kwargs)
        try:
            # Below autograd autocast has had its say: a kernel written in Python must not be cast again.
            with suspended():
                return func(*args, **kwargs)
        except NotImplementedError:
            return self._on_cpu(func, args, kwargs)
        except RuntimeError as error:
            if not _mixes_devices(args, kwargs):
                raise
            return self._with_host_tensors_moved(func, args, kwargs, error)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep the values of `result` beside it when they follow from known ones."""
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = _Op(func)
        if not isinstance(first, torch.Tensor) or first.device.type != "meta":
            if op.mutates:
                self._forget(args)
            return
        if op.mutates:
            self._follow_write(func, args, kwargs)
        elif not first.numel():
            return
        elif func in _FINITE:
            self._assume_finite(func, args, first)
        elif is_small(first) or first.dtype is torch.bool:
            self._follow_new(func, op, args, kwargs, result)

    # -- known values -------------------------------------------------------------------------------------------------

    def _follow_new(self, func: Any, op: _Op, args: Any, kwargs: Any, result: Any) -> None:
        real = _real_arguments(args, kwargs)
        if real is None:
            return
        first = result[0] if isinstance(result, (tuple, list)) else result
        if not is_small(first):
            if op.pointwise and all(is_uniform(value) for value in tensors_in(real)):
                scalars = map_tensors(lambda value: value.as_strided((), ()), real)
                remember(first, func(*scalars[0], **scalars[1]).expand(first.shape))
            return
        if any(value.numel() > 2**20 and not is_uniform(value) for value in tensors_in(real)):
            return
        if all(is_uniform(value) for value in tensors_in(real)) and any(v.numel() > 2**20 for v in tensors_in(real)):
            # any() or all() of a value that is the same everywhere.
            real = map_tensors(lambda value: value.as_strided((1,) * value.dim(), (0,) * value.dim()), real)
            if first.numel() != 1:
                return
        values = func(*real[0], **real[1])
        cell = cell_of(args[0]) if op.aliases and args and isinstance(args[0], torch.Tensor) else None
        for tensor, value in zip(tensors_in(result), tensors_in(values), strict=False):
            if tensor.is_meta and tensor.shape == value.shape:
                remember(tensor, value, cell)

    def _follow_write(self, func: Any, args: Any, kwargs: Any) -> None:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None or cell_of(target) is None:
            self._forget(args)
            return
        real = _real_arguments(args, kwargs)
        if real is None or (is_uniform(real[0][0]) and target.numel() > 1):
            self._forget(args)
        else:
            func(*real[0], **real[1])

    def _forget(self, args: Any) -> None:
        """Something unknown was written: the first argument's memory is no longer known."""
        for item in args[:1]:
            for tensor in tensors_in(item):
                cell = cell_of(tensor)
                if cell is not None:
                    cell.valid = False

    def _assume_finite(self, func: Any, args: Any, result: torch.Tensor) -> None:
        self.assumptions["every value is finite (isnan and isinf answer no)"] = None
        uniform(result, _FINITE[func])

    # -- questions about values ---------------------------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Any:
        value = known(tensor)
        if value is not None:
            return value.item()
        if tensor.is_floating_point():
            self.assumptions["a number read out of an activation (.item()) is taken to be 1.0"] = None
            return 1.0
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UnknownValueError(
            f"the model reads a value that depends on the data out of a {dtype} tensor (bool(), int() or .item())"
        )

    def _equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        left, right = known(a), known(b)
        if left is None or right is None:
            raise UnknownValueError("the model compares two tensors whose values depend on the data (torch.equal)")
        return torch.equal(left, right)

    def _to_host(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        value = known(tensor)
        if value is None:
            self.assumptions["values that the model copies to the CPU are taken to be zero"] = None
            value = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        dtype = kwargs.get("dtype")
        return value.to(dtype) if dtype is not None and dtype is not value.dtype else value.clone()

    # -- what meta cannot do ------------------------------------------------------------------------------------------

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        op = self._ops.setdefault(func, _Op(func))
        tensors = list(tensors_in((args, kwargs)))
        self._check_possible(func, op, tensors)
        if sum(t.numel() * t.element_size() for t in tensors if t.is_meta) > _HOST_LIMIT:
            raise NotImplementedError(
                f"{func} has no meta kernel, and its arguments are too large to run it on the CPU instead"
            ) from None
        result = func(*_on_host(args), **_on_host(kwargs))
        self.notes[
            f"{func._overloadpacket} was run on the CPU: PyTorch cannot tell its output without computing it"
        ] = None
        return map_tensors(_moved, result)

    def _check_possible(self, func: Any, op: _Op, tensors: list[torch.Tensor]) -> None:
        decides = [t for t in tensors if op.dynamic and (len(tensors) == 1 or not t.is_floating_point())]
        if any(known(t) is None for t in decides):
            raise UnknownValueError(f"the output shape of {func._overloadpacket} depends on the data")

    def _with_host_tensors_moved(self, func: Any, args: Any, kwargs: Any, error: RuntimeError) -> Any:
        moved = map_tensors(lambda t: t if t.is_meta else _moved(t), (args, kwargs))
        try:
            result = func(*moved[0], **moved[1])
        except RuntimeError:
            raise error from None
        self.notes["the forward makes a tensor on the CPU and mixes it with the model's; on a GPU that line fails"] = (
            None
        )
        return result


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor as a meta tensor; small ones stay known."""
    if tensor.is_meta or tensor.is_quantized:
        return tensor
    twin = tensor.to("meta")
    return remember(twin, tensor.detach()) if is_small(tensor) else twin


def _on_host(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("device"), torch.device):
        value = value | {"device": torch.device("cpu")}
    return map_tensors(_stand_in, value)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    value = known(tensor)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if value is None else value


def _real_arguments(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments with each tensor's known values in its place; None when one is unknown."""
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "meta":
        kwargs = kwargs | {"device": torch.device("cpu")}
    if not any(isinstance(item, (list, tuple, dict)) for item in (*args, *kwargs.values())):
        return _real_flat(args, kwargs)
    if any(known(tensor) is None for tensor in tensors_in((args, kwargs))):
        return None
    swap: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: known(tensor)  # type: ignore[assignment,return-value]  # noqa: E731
    return map_tensors(swap, args), map_tensors(swap, kwargs)


def _real_flat(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """`_real_arguments` for the common case that no argument is a sequence."""
    real = []
    for item in (*args, *kwargs.values()):
        value = known(item) if isinstance(item, torch.Tensor) else item
        if value is None and item is not None:
            return None
        real.append(value)
    count = len(args)
    return tuple(real[:count]), dict(zip(kwargs, real[count:], strict=True))


def _leaves_meta(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return tensor.is_meta and isinstance(device, torch.device) and device.type == "cpu"


def _mixes_devices(args: Any, kwargs: Any) -> bool:
    devices = {tensor.device.type for tensor in _with_size(args, kwargs)}
    return len(devices) > 1


def _with_size(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() or tensor.is_meta)
