"""Constructors run without the memory of their weights: large floating tensors come out as `meta` tensors.

Shapes, dtypes, strides, ties and everything that a constructor decides stay real; only numbers that nobody needs are
never made, so initialising them costs nothing either. Small and integer tensors stay real, because constructors look
at them: drop-path rates from ``linspace(…).tolist()``, lengths, index tables.

Reading a value of a `meta` tensor raises, and so does filling a real integer tensor from one. Known limit: a small real
floating tensor that is filled from one keeps its old values.

A constructor that creates a tensor on the device of a weight means the CPU: once a weight is on `meta`, new tensors on
`meta` are made on the CPU if they are small. A constructor that itself asks for `meta` gets it only before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memsize.errors import DataDependentError

SMALLEST = 4096
"""Floating tensors with this many elements or more are made on `meta`."""

SMALLEST_INTEGER = 2**20
"""The same for integers and booleans: causal masks and packed weights are large, index tables are not."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_META = torch.device("meta")
_CPU = torch.device("cpu")


class Weightless(TorchDispatchMode):
    """A mode in which new large CPU tensors are `meta` tensors, and ops may mix small tensors with them.

    `left_out` says that there are such tensors already, as when a model runs that was built in this mode.
    """

    def __init__(self, left_out: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left_out = left_out
        """Whether some tensor that was asked for on the CPU is on `meta` already."""
        self.values_missed = False
        """Whether an op failed on `meta`, or left a real tensor with its old values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: a mode that says True is wrapped by torch._dynamo, whose import takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on `meta` where its result is large or an argument is already there; else as it is."""
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a wrapper subclass first takes itself apart; its parts come here
        kwargs = dict(kwargs or {})
        if _any_meta(args) or _any_meta(kwargs.values()):
            if _only_fills(func) and args:
                return args[0]
            written = [tensor for tensor in _written(func, args, kwargs) if not tensor.is_meta]
            self.values_missed |= bool(written)
            try:
                shape_rule = _SHAPE_RULES.get(func)
                return shape_rule(*args, **kwargs) if shape_rule else _run_on_meta(func, args, kwargs, written)
            except Exception:
                self.values_missed = True
                raise
        if _makes_tensors(func):
            if self.left_out and kwargs.get("device") == _META:
                kwargs["device"] = _CPU
            if _is_cpu(kwargs.get("device")):
                result = _try_on_meta(func, args, kwargs)
                if isinstance(result, torch.Tensor):
                    floating = result.is_floating_point() or result.is_complex()
                    if result.numel() >= (SMALLEST if floating else SMALLEST_INTEGER):
                        self.left_out = True
                        return result
        return func(*args, **kwargs)


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
    """Run `func` with every tensor moved to `meta`. Real tensors that it would have `written` stay as they are."""
    if any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in written):
        raise DataDependentError(f"{func} fills a real {written[0].dtype} tensor from weights that were not made")
    result = func(*map(_to_meta, args), **_for_meta(func, kwargs))
    return written[0] if len(written) == 1 and isinstance(result, torch.Tensor) else result


def _indexed(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """`tensor[indices]`. A mask selects by its values, which `meta` lacks, so real masks become indices first."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and not index.is_meta and index.dtype in (torch.bool, torch.uint8)
        places += index.nonzero().unbind(1) if is_mask and index is not None else (index,)
    indexed: torch.Tensor = torch.ops.aten.index.Tensor(_to_meta(tensor), _to_meta(places))
    return indexed


_SHAPE_RULES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.index.Tensor: _indexed,
    torch.ops.aten.tril.default: lambda tensor, *_: torch.empty_like(tensor),
    torch.ops.aten.triu.default: lambda tensor, *_: torch.empty_like(tensor),
    torch.ops.aten.norm.ScalarOpt_dim: lambda tensor, _, dim, keepdim=False: tensor.sum(dim, keepdim),
}
"""Shape rules of ops that `meta` cannot run, or runs in Python by way of sympy (a second)."""

_RESHAPING = ("aten::resize_", "aten::resize_as_", "aten::set_")


@cache
def _only_fills(func: Any) -> bool:
    """Whether `func` writes numbers into its first tensor and has no other: `normal_`, `zero_`, `clamp_` …

    There is nothing to write on `meta`, and `normal_` there is Python that imports torch._dynamo.
    """
    first, *others = func._schema.arguments or (None,)
    in_place = first is not None and first.name == "self" and _written_arguments(func) == ((0, "self"),)
    alone = not any("Tensor" in str(argument.type) for argument in others)
    return in_place and alone and torch.Tag.inplace_view not in func.tags and func._schema.name not in _RESHAPING


def _try_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        if func._schema.name == "aten::arange" and all(isinstance(bound, int) for bound in args):
            # On `meta` it is Python that imports torch._dynamo.
            return torch.empty(len(range(*args)), dtype=kwargs.get("dtype") or torch.int64, device=_META)
        return func(*map(_to_meta, args), **_for_meta(func, kwargs))
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def _for_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` as `func` takes them on `meta`: that device, no pinned memory, no generator of another device."""
    if _makes_tensors(func) and _is_cpu(kwargs.get("device")):
        kwargs = kwargs | {"device": _META}
    return {name: _to_meta(value) for name, value in kwargs.items() if name not in ("pin_memory", "generator")}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        items = value if isinstance(value, (list, tuple)) else [value]
        yield from (item for item in items if isinstance(item, torch.Tensor))


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((position, a.name) for position, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether the caller says on which device the result of `func` is: `empty`, `randn`, `new_zeros`, `_to_copy` …"""
    return any(argument.name == "device" for argument in func._schema.arguments)


def _to_meta(value: Any) -> Any:
    """`value` with stand-ins for its small real tensors. Single numbers stay: PyTorch mixes them with any device."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta or value.dim() == 0 else value.to(_META)
    return list(map(_to_meta, value)) if isinstance(value, (list, tuple)) else value


def _is_cpu(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _any_meta(values: Iterable[Any]) -> bool:
    """Whether a tensor among `values`, or in a list among them, is on `meta`: asked for every op of a constructor."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return True
        elif isinstance(value, (list, tuple)) and _any_meta(value):
            return True
    return False
