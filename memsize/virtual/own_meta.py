"""Tensors that the program itself puts on ``device="meta"``: they are on no GPU, and say so.

Stand-ins for tensors on the GPU are `meta` tensors too. PyTorch's own C++ code makes more of them with their options,
``device="meta"`` among them, so that what names this device is the program's own only where no module and no backward
runs. Should one of them meet a tensor on the GPU after all, it was PyTorch's, and is on the GPU from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, UntypedStorage

from memsize.torch_internals.meta import is_meta

_storages: dict[int, weakref.finalize[Any, Any]] = {}
"""The addresses of their storages; what removes each when its storage dies."""


def is_own_meta(tensor: Tensor) -> bool:
    """Whether `tensor` was put on `meta` by the program."""
    return bool(_storages) and is_meta(tensor) and _address(tensor) in _storages


def is_own_storage(storage: UntypedStorage) -> bool:
    """Whether a tensor that the program put on `meta` stores its elements in `storage`."""
    return storage._cdata in _storages


def claim(result: Any) -> Any:
    """Let the `meta` tensors of `result`, which an op returned, be the program's own; returns it."""
    for tensor in _tensors((result,)):
        address = _address(tensor)
        if is_meta(tensor) and address not in _storages:
            _storages[address] = weakref.finalize(tensor.untyped_storage(), _storages.pop, address, None)
    return result


def taken_to_gpu(args: Iterable[Any]) -> Iterator[Tensor]:
    """The arguments of an op on the GPU that were the program's own so far: they no longer are."""
    for tensor in _tensors(args) if _storages else ():
        ending = _storages.pop(_address(tensor), None)
        if ending is not None:
            ending.detach()
            yield tensor


def any_own_meta(args: Iterable[Any]) -> bool:
    """Whether any argument of an op was put on `meta` by the program."""
    return bool(_storages) and any(map(is_own_meta, _tensors(args)))


def on_gpu(args: Iterable[Any]) -> bool:
    """Whether any argument of an op is a stand-in for a tensor on the GPU."""
    for item in args:
        if isinstance(item, Tensor):
            if is_meta(item) and not is_own_meta(item):
                return True
        elif isinstance(item, (list, tuple)) and item and type(item[0]) is not int and on_gpu(item):
            return True
    return False


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for item in args:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)) and item and type(item[0]) is not int:
            yield from _tensors(item)


def _address(tensor: Tensor) -> int:
    try:
        address: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return 0
    return address
