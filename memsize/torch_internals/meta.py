"""Whether a tensor is a `meta` tensor, and a memo of PyTorch's `meta` kernels, each of which runs once per op, tensor
layouts and other arguments.

Most of these kernels are written in Python and take 50 µs to several milliseconds; an answer from the memo takes 6 µs.
A `meta` tensor has no values, so the results of an op that makes new tensors depend only on the shapes, strides and
dtypes of its arguments. Everything else runs each time: ops that write into an argument or return a view of one,
arguments with values (on the CPU) or a hidden state (subclasses, lazy conjugation), and results other than tensors that
fill memory of their own.

Also the dispatch key that nothing else in PyTorch uses, for which the kernels of `memsize.cuda` are registered: they
intercept an op before autograd records it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Parameter

from memsize.torch_internals.pytree import tensors_in

_attribute: Any = vars(torch._C.TensorBase)["is_meta"]
_read: Final = _attribute.__get__
_replaced: Final = vars(torch.Tensor)
_PLAIN_TYPES: Final = (torch.Tensor, Parameter)


def is_meta(tensor: torch.Tensor) -> bool:
    """Return the original ``tensor.is_meta``, also while that attribute is replaced: stand-ins for tensors on a virtual
    GPU deny it.

    Modes and subclasses that watch PyTorch's functions would be asked first, and look the attribute up by its name.
    """
    if "is_meta" not in _replaced:
        return tensor.is_meta
    if type(tensor) in _PLAIN_TYPES and not torch._C._len_torch_function_stack():
        return bool(_read(tensor))
    with torch._C.DisableTorchFunction():
        return bool(_read(tensor))


_COMPILER: Final = "torch._dynamo"
"""A module that some kernels written in Python import when they first run."""
_PLAIN = frozenset({int, float, bool, str, type(None)})
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_META = torch.device("meta")
_empty_strided = torch.empty_strided
"""PyTorch's own function, even while `memsize.tracing.overrides` replaces it: these calls name their device."""


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        return _empty_strided(self.shape, self.strides, dtype=self.dtype, device=_META)


class _UnkeyedError(Exception):
    """An argument that affects the result in ways that a key cannot express."""


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call PyTorch's kernel for meta tensors, and free what an import of the compiler in it leaves behind."""
    is_imported = _COMPILER in sys.modules
    # Autocast has already acted above autograd: what a kernel written in Python calls must not be cast again.
    with suspended():
        result = func(*args, **kwargs)
    if not is_imported and _COMPILER in sys.modules:
        gc.collect()  # cycles that the import leaves behind hold the kernel's frames, and with them its arguments
    return result


class MetaMemo:
    """Remembers at most `limit` answers; the oldest is forgotten first."""

    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._answers: dict[Hashable, tuple[type, tuple[_Layout | None, ...]]] = {}
        self._pure: dict[Any, bool] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func`'s kernel, from the memo if possible; raise the kernel's errors."""
        key = self._key(func, args, kwargs)
        answer = None if key is None else self._answers.get(key)
        if answer is not None:
            kind, layouts = answer
            results = [None if layout is None else layout.empty() for layout in layouts]
            return results[0] if kind is torch.Tensor else kind(results)
        result = run_kernel(func, args, kwargs)
        if key is not None:
            self._remember(func, key, result, (args, kwargs))
        return result

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        pure = self._pure.get(func)
        if pure is None:
            # Only ATen's schemas are trusted to promise new tensors that depend on the arguments alone.
            schema = func._schema
            pure = self._pure[func] = (
                func.namespace == "aten"
                and all(a.alias_info is None and a.name != "storage_offset" for a in schema.arguments)
                and all(result.alias_info is None for result in schema.returns)
            )
        if not pure or torch.are_deterministic_algorithms_enabled():  # some kernels warn or raise then
            return None
        try:
            return func, torch.get_default_dtype(), *_described(args), *kwargs, *_described(kwargs.values())
        except _UnkeyedError:
            return None

    def _remember(self, func: Any, key: Hashable, result: Any, arguments: Any) -> None:
        kind = type(result)
        if kind not in (torch.Tensor, tuple, list):
            return
        results = (result,) if kind is torch.Tensor else result
        tensors = [result for result in results if result is not None]
        if not all(map(_is_plain, tensors)):
            return
        taken = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments)}
        new_storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        if new_storages & taken:
            self._pure[func] = False  # as with `_unsafe_view`, whose schema conceals it
        if len(new_storages) < len(tensors) or new_storages & taken:
            return
        if len(self._answers) >= self._limit:
            del self._answers[next(iter(self._answers))]
        layouts = (
            None if result is None else _Layout(result.shape, result.stride(), result.dtype) for result in results
        )
        self._answers[key] = kind, tuple(layouts)


def _described(values: Iterable[Any]) -> Iterator[Hashable]:
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is Parameter:
            if not value.is_meta or value.layout is not torch.strided or value.is_conj() or value.is_neg():
                raise _UnkeyedError
            yield value.shape, value.stride(), value.dtype
        elif kind in _PLAIN:
            yield kind, value  # 1, 1.0 and True are equal, and promote differently
        elif kind is list or kind is tuple:
            yield tuple(_described(value))
        else:
            raise _UnkeyedError


def _is_plain(result: Any) -> bool:
    """Whether `result` is a strided `meta` tensor that fills its memory."""
    if type(result) is not torch.Tensor or not result.is_meta or result.layout is not torch.strided:
        return False
    if result.storage_offset() or result.is_conj() or result.is_neg():
        return False
    reach = sum((size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True)) + 1
    return result.untyped_storage().nbytes() == (reach if result.numel() else 0) * result.element_size()


Kernel = Callable[..., Any]

KEY: torch._C.DispatchKey = torch._C.DispatchKey.__members__["AutocastIPU"]
NAMESPACE = "aten"
exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
include = torch._C._dispatch_tls_set_dispatch_key_included
is_included = torch._C._dispatch_tls_is_dispatch_key_included
is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class _KeyExcluded:
    """Excludes the key while open. It needs no state, as a kernel runs only where the key is not excluded."""

    __slots__ = ()

    def __enter__(self) -> None:
        exclude(KEY, True)

    def __exit__(self, *_: object) -> None:
        exclude(KEY, False)


key_excluded: Final = _KeyExcluded()
"""Inside a kernel of the key: the ops that it calls go on to autograd and do not come back to the key."""


class suspended:  # noqa: N801 - reads as the context manager that it is
    """Call PyTorch without the kernels of the key: below autograd, CUDA's choices have been made already."""

    __slots__ = ("_was_excluded",)

    def __enter__(self) -> None:
        self._was_excluded = is_excluded(KEY)
        exclude(KEY, True)

    def __exit__(self, *_: object) -> None:
        exclude(KEY, self._was_excluded)


def overload(name: str) -> Any:
    """The callable of an operator (``"softmax.int"``, ``"torchvision::nms"``), without its Python wrapper's checks."""
    namespace, _, own = name.rpartition("::")
    packet, _, variant = own.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or NAMESPACE), packet), variant or "default")._op
