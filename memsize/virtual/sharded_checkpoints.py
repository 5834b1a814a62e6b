"""Checkpoints of `torch.distributed.checkpoint`: what this rank would write is counted, and what it would read is not.

Their plans are made by all ranks together, of which one is here. What is loaded goes into tensors that are there, from
the memory of the CPU: nothing of it is on the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import LatePatches, wrapping
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import tensors_in
from memsize.virtual.saved_weights import Files

_PACKAGE = "torch.distributed.checkpoint"
_METADATA = ".metadata"
"""The file that is written last, by one rank."""


def later(files: Files) -> dict[str, LatePatches]:
    """Return the patches of the modules that save and load, by module name, for when they are imported."""

    return {
        f"{_PACKAGE}.state_dict_saver": lambda module: (
            wrapping(module, "_save_state_dict", _save, files),
            (module, "DefaultStager", _Stager),
        ),
        f"{_PACKAGE}.state_dict_loader": lambda module: (wrapping(module, "_load_state_dict", _load, files),),
    }


class _Stager:
    """Copies a state to the CPU before it is saved in the background: nobody reads what stands for it here."""

    should_synchronize_after_execute = False

    def __init__(self, options: Any) -> None:
        self.options = options

    def stage(self, state_dict: Any, **options: Any) -> Any:
        return state_dict

    def close(self) -> None:
        """Nothing was begun."""


def _save(
    files: Files, original: Callable[..., Any], state_dict: Any, storage_writer: Any, *args: Any, **options: Any
) -> Any:
    if not _stands_aside(state_dict):
        return original(state_dict, storage_writer, *args, **options)
    from torch.distributed.checkpoint.metadata import Metadata

    files.counted(_path(storage_writer), sum(piece.nbytes for piece in _pieces(state_dict)))
    if isinstance(folder := getattr(storage_writer, "path", None), (str, os.PathLike)):
        files.stand_in(Path(folder) / _METADATA, folders=True)  # by which programs know a checkpoint
    return Metadata({})


def _load(
    files: Files, original: Callable[..., Any], state_dict: Any, storage_reader: Any, *args: Any, **options: Any
) -> Any:
    path = _path(storage_reader)
    there = files.has_counted(path) or (Path(path) / _METADATA).is_file()
    if not there or not _stands_aside(state_dict):
        return original(state_dict, storage_reader, *args, **options)
    return None


def _stands_aside(state: Any) -> bool:
    """Whether some of `state` stands for what is on the GPU, or other ranks have to take part."""
    others = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return others or any(map(is_meta, _pieces(state)))


def _pieces(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state; of what is sharded, this rank's parts."""
    return (piece for tensor in tensors_in(state) for piece in plain_tensors(tensor))


def _path(storage: Any) -> str:
    """Where a writer or a reader has its files, or what it is called."""
    path = getattr(storage, "path", None) or getattr(storage, "checkpoint_id", None) or type(storage).__name__
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
