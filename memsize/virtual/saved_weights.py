"""Saving and loading by a program: values of stand-ins are not written, and weights for the GPU are not read.

`torch.save` and its like keep them in memory, from where the program may load them again; until it ends, an empty file
stands where it was to be written. Files that were there before are left as they are (`FileGuard`).

Experiment trackers are switched off, since the program would log placeholders to somebody's dashboard. Each has an
environment variable for it in its documentation, except MLflow, which gets a folder that is removed afterwards.
TensorBoard writes new files, as the program asks.

Known limit: a mode that the program passes itself (``wandb.init(mode="online")``) wins.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import Patch, environment
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import tensors_in
from memsize.units import format_bytes
from memsize.virtual.checkpoints import mapped, opened
from memsize.virtual.file_guard import FileGuard, shown


class Files(FileGuard):
    """The files of a program: besides what is guarded, those that it saved weights of the GPU to."""

    def __init__(self, allowed: bool = False) -> None:
        super().__init__(allowed)
        self.saved: dict[str, int] = {}
        """Bytes of stand-ins that would have been written, by path."""
        self._saved_files: dict[str, bytes] = {}
        """What `torch.save` was given, by path: without weights."""
        self._empty: set[str] = set()
        """Files that stand where weights would have been written."""
        self._folders: list[Path] = []
        """Those that were made for them, each before the ones that it is in."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """One line for each thing that was not written."""
        saved = (f"{format_bytes(size)} to {path}" for path, size in self.saved.items())
        return (*saved, *self.refused)

    def counted(self, path: Any, size: int) -> None:
        """Note that `size` bytes of stand-ins would have been written to `path`."""
        self.saved[shown(path)] = size

    def has_counted(self, path: str) -> bool:
        """Whether some would have been written there."""
        return shown(path) in self.saved

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While open, files that were there before are left as they are; the empty ones are removed at its end."""
        try:
            with super().guarded():
                yield
        finally:
            for path in filter(os.path.isfile, self._empty):
                if not os.path.getsize(path):
                    os.remove(path)
            for folder in self._folders:
                with suppress(OSError):  # the program has put something there, or moved it
                    folder.rmdir()

    def renamed(self, old: str, new: str) -> None:
        for path in [path for path in self._empty if path == old or path.startswith(f"{old}{os.sep}")]:
            moved = new + path.removeprefix(old)
            self._empty.add(moved)
            if path in self._saved_files:
                self._saved_files[moved] = self._saved_files[path]

    def replacements(self) -> Iterator[Patch]:
        """The functions that save and load, and those that open a file in C++."""
        yield torch, "save", self._saving(torch.save)
        yield torch, "load", self._loading(mapped(torch.load))
        yield torch, "from_file", self._mapping(torch.from_file)
        yield torch.UntypedStorage, "from_file", staticmethod(self._mapping(torch.UntypedStorage.from_file))
        if find_spec("safetensors"):
            import safetensors.torch

            yield safetensors.torch, "save_file", self._saving_named(safetensors.torch.save_file)
            for owner in (safetensors, safetensors.torch):
                yield owner, "safe_open", opened(safetensors.safe_open)

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            size = stand_in_bytes(obj)
            if not size or not isinstance(f, (str, os.PathLike)):
                if isinstance(f, (str, os.PathLike)):
                    self.check_open(f)  # C++ opens it, without an audit event
                elif size:
                    self.counted_in(f, size)
                return original(obj, f, *args, **kwargs)
            buffer = io.BytesIO()
            original(obj, buffer, *args, **kwargs)
            self._saved_files[os.path.abspath(f)] = buffer.getvalue()
            self.left_out(f, size)
            return None

        return save

    def counted_in(self, file: Any, size: int) -> None:
        """Note `size` bytes of weights that an open file gets, or a buffer that may be written later."""
        name = getattr(file, "name", None)
        if isinstance(name, str):
            self.counted(name, size)
        else:
            self.saved["a buffer in memory"] = size

    def left_out(self, path: Any, size: int) -> None:
        """Note `size` bytes of weights; a file without them is there for programs that move it or look at it."""
        self.counted(path, size)
        self.stand_in(Path(os.fsdecode(path)))

    def stand_in(self, path: Path, folders: bool = False) -> None:
        """Let an empty file be there until the program ends, on demand with the `folders` that it is in."""
        if os.path.lexists(path):
            return
        if folders:
            missing = [folder for folder in path.absolute().parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders[:0] = missing
        path.touch()
        self._empty.add(os.path.abspath(path))

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            contents = self._saved_files.get(os.path.abspath(f)) if isinstance(f, (str, os.PathLike)) else None
            if contents is None:
                return original(f, *args, **kwargs)
            kwargs.pop("mmap", None)
            return original(io.BytesIO(contents), *args, **kwargs)

        return load

    def _saving_named(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            size = stand_in_bytes(tensors)
            if not size:
                self.check_open(filename)  # Rust opens it
                return original(tensors, filename, *args, **kwargs)
            self.left_out(filename, size)
            return None

        return save_file

    def _mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def from_file(filename: Any, *args: Any, **options: Any) -> Any:
            if options.get("shared", args and args[0]):
                self.check_open(filename)  # C++ opens it, and what is written to the tensor is in the file
            return original(filename, *args, **options)

        return from_file


def stand_in_bytes(value: Any) -> int:
    """The bytes of the GPU that a state holds, each storage once; of what is sharded, this rank's."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    storages = {
        piece.untyped_storage()._cdata: piece.untyped_storage().nbytes()
        for tensor in tensors_in(value)
        for piece in plain_tensors(tensor)
        if is_meta(piece) and piece.layout is torch.strided
    }
    return sum(storages.values())


# -- experiment trackers ---------------------------------------------------------------------------------------------

_OFF: Final = {
    "WANDB_MODE": "disabled",
    "COMET_AUTO_LOG_DISABLE": "1",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
_ELSEWHERE: Final = "MLFLOW_TRACKING_URI"


@contextmanager
def trackers_off() -> Iterator[None]:
    """While open, trackers that the program imports keep what they are told to themselves."""
    with (
        TemporaryDirectory(prefix="memsize-", ignore_cleanup_errors=True) as folder,
        environment({**_OFF, _ELSEWHERE: Path(folder).as_uri()}),
    ):
        yield
