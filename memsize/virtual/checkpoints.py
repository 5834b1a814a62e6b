"""Checkpoints that a program loads to the GPU: by their headers alone.

Nobody reads the bytes of a tensor that becomes a stand-in, so files are mapped instead of read. What lands on the CPU
has its values, in memory of its own.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch.serialization import _get_restore_location


def mapped(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that reads of a file what lands on the CPU."""

    def loaded(f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any) -> Any:
        to_meta = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "meta"
        if options.get("mmap") or to_meta or not _can_be_mapped(f):
            return load(f, map_location, pickle_module, **options)
        restore = _get_restore_location(map_location)

        def placed(storage: Any, location: str) -> Any:
            restored = restore(storage, location)
            return restored.clone() if restored.device.type == "cpu" else restored

        return load(f, placed, pickle_module, **options | {"mmap": True})

    return loaded


def _can_be_mapped(f: Any) -> bool:
    """Whether `f` is a file as `torch.save` writes it: an archive of state, in which nothing is compressed."""
    if not isinstance(f, (str, os.PathLike)) or not zipfile.is_zipfile(f):
        return False
    with zipfile.ZipFile(f) as archive:
        entries = archive.infolist()
    is_code = any(entry.filename.endswith("/constants.pkl") for entry in entries)
    return not is_code and all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def opened(original: Callable[..., Any]) -> Callable[..., Any]:
    """`safetensors.safe_open`, which reads what it opens for a GPU: the CPU's tensors are mapped, and go there."""

    def safe_open(filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
        if not (isinstance(device, int) or str(device).startswith("cuda")):
            return original(filename, framework, device, **options)
        return _Opened(original(filename, framework, "cpu", **options), torch.device(device))

    return safe_open


class _Opened:
    """An open file of safetensors whose tensors go to `device`."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file = file
        self._device = device

    def __enter__(self) -> _Opened:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._there(self._file.get_tensor(name))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._file.offset_keys()}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), self._there)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


class _Slice:
    """A tensor of an open file, of which a part may be asked for; `there` takes it to its device."""

    def __init__(self, whole: Any, there: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._whole = whole
        self._there = there

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self._there(self._whole[part])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
