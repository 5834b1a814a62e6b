"""What PyTorch asks about the device before it acts, answered as on a machine with CUDA.

`torch.autocast("cuda")` and `GradScaler` disable themselves where CUDA is missing, `custom_fwd` casts only CUDA
tensors, checkpointing restores autocast for the device of its tensors, and no region can be opened for ``meta`` by
name. The answers change only while `cuda_semantics` is open, and only for the threads that opened it.

Source: torch/amp/autocast_mode.py, torch/amp/grad_scaler.py, torch/utils/checkpoint.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from memsize.semantics.key import current

Function = Callable[..., Any]
"""A function of PyTorch, or what stands in for it."""


class _Question(NamedTuple):
    """A function of PyTorch that asks about the device, and what makes its answer out of the original."""

    owner: Any
    name: str
    answer: Callable[[Function], Function]


_lock = threading.Lock()
_open = 0
_originals: list[tuple[_Question, Function]] = []


@contextlib.contextmanager
def answered_as_cuda() -> Iterator[None]:
    """Answer as on CUDA while any thread is inside; the originals are back when the last one leaves."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            for question in _questions():
                original = getattr(question.owner, question.name)
                _originals.append((question, original))
                setattr(question.owner, question.name, _answering(original, question.answer(original)))


def _leave() -> None:
    global _open
    with _lock:
        _open -= 1
        while not _open and _originals:
            question, original = _originals.pop()
            setattr(question.owner, question.name, original)


def _answering(original: Function, answer: Function) -> Function:
    """`answer` for the threads that have CUDA semantics switched on, `original` for all others."""

    @functools.wraps(original)
    def answered(*args: Any, **kwargs: Any) -> Any:
        return (original if current() is None else answer)(*args, **kwargs)

    return answered


def _questions() -> tuple[_Question, ...]:
    common: Any = torch.cuda.amp.common
    mode: Any = torch.amp.autocast_mode
    renamed = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
    return (
        _Question(common, "amp_definitely_not_available", _always(False)),
        _Question(torch.cuda, "is_bf16_supported", _always(True)),
        *(_Question(torch, name, _by_name) for name in renamed),
        _Question(torch.amp, "is_autocast_available", _by_name),
        _Question(mode, "is_autocast_available", _by_name),
        _Question(mode.autocast, "__init__", _by_name_in_method),
        _Question(mode, "_cast", _casting_stand_ins),
        _Question(torch, "clear_autocast_cache", _dropping_copies),
        _Question(torch.utils.checkpoint, "_infer_device_type", _inferring_cuda),
    )


def _always(answer: bool) -> Callable[[Function], Function]:
    return lambda _: lambda *args, **kwargs: answer


def _by_name(original: Function) -> Function:
    """Code that opens a region for ``x.device.type`` says ``meta`` here and ``cuda`` there."""

    def answer(device_type: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
        return original("cuda" if device_type == "meta" else device_type, *args, **kwargs)

    return answer


def _by_name_in_method(original: Function) -> Function:
    def answer(instance: Any, device_type: Any, *args: Any, **kwargs: Any) -> Any:
        return original(instance, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    return answer


def _casting_stand_ins(original: Function) -> Function:
    """`custom_fwd(cast_inputs=...)` casts the arguments that are CUDA tensors; containers come back here."""

    def answer(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        semantics = current()
        if not isinstance(value, Tensor) or device_type != "cuda" or semantics is None:
            return original(value, device_type, dtype)
        is_cast = value.is_floating_point() and value.dtype is not torch.float64 and semantics.stands_for_cuda(value)
        return value.to(dtype) if is_cast else original(value, device_type, dtype)

    return answer


def _dropping_copies(original: Function) -> Function:
    """PyTorch clears its cache when the outermost region ends: ours goes with it."""

    def answer() -> None:
        original()
        semantics = current()
        if semantics is not None:
            semantics.copies.clear()

    return answer


def _inferring_cuda(original: Function) -> Function:
    """Checkpointing restores this device's autocast in its recomputation.

    It touches no generator of CUDA: it saves those of its tensors' devices, and none of them is a CUDA device.
    """

    def answer(*args: Any) -> str:
        semantics = current()
        inferred: str = original(*args)
        is_stand_in = semantics is not None and {"meta": semantics.meta, "cpu": semantics.cpu}.get(inferred, False)
        return "cuda" if is_stand_in else inferred

    return answer
