"""Saving and loading by a program: values of stand-ins are not written, and weights for the GPU are not read.

The program may load again what it gives `torch.save`: that is in a temporary file with holes in place of the weights.
Until it ends, an empty file stands where it was to be written. Files that were there before are left as they are
(`FileGuard`).

Of sharded checkpoints, what this rank would write is counted, and what it would read is not: all ranks together make
their plans, of which one is here. What is loaded goes into tensors that are there, from the memory of the CPU.

Experiment trackers are switched off, since the program would log placeholders to somebody's dashboard. Each has an
environment variable for it in its documentation, except MLflow, which gets a folder that is removed afterwards.
TensorBoard writes new files, as the program asks.

Checkpoints are loaded to the GPU by their headers alone: nobody reads the bytes of a tensor that becomes a stand-in, so
files are mapped instead of read. What lands on the CPU has its values, in memory of its own.

Known limit: a mode that the program passes itself (``wandb.init(mode="online")``) wins.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch.serialization import _get_restore_location

from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import LatePatches, Patch, calling, environment, wrapping
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import tensors_in
from memsize.units import format_bytes
from memsize.virtual.guards.file_guard import FileGuard, shown


class Files(FileGuard):
    """The files of a program: besides what is guarded, those that it saved weights of the GPU to."""

    def __init__(self, allowed: bool = False) -> None:
        super().__init__(allowed)
        self.saved: dict[str, int] = {}
        """Bytes of stand-ins that would have been written, by path."""
        self.mapped: dict[str, int] = {}
        """Bytes of the files of safetensors that were opened, by path: they are read by way of the page cache."""
        self._saved_files: dict[str, Path] = {}
        """The files with what `torch.save` was given, by the path that it was given."""
        self._numbers = count()
        self._writing = threading.local()
        """Has `holes` while a thread writes a file that may have them."""
        self._empty: set[str] = set()
        """Files that stand where weights would have been written."""
        self.missing: Callable[[Any, Any], Any] = lambda file, map_location: None
        """Returns the stand-in for a file that is to be loaded and is not there; None where it has none."""
        self.loaded: Callable[[Any], None] = lambda state: None
        """Called with each state that was loaded."""
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

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While open, files that were there before are left as they are; the empty ones are removed at its end."""
        try:
            with super().guarded():
                yield
        finally:
            self._saved_files.clear()
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
        yield wrapping(torch, "save", self._save)
        yield wrapping(torch.serialization, "_save", self._write)
        yield wrapping(torch.UntypedStorage, "cpu", self._to_cpu)
        yield torch, "load", calling(self._load, calling(_load_mapped, torch.load))
        yield wrapping(torch, "from_file", self._from_file)
        yield torch.UntypedStorage, "from_file", staticmethod(calling(self._from_file, torch.UntypedStorage.from_file))
        if find_spec("safetensors"):
            import safetensors.torch

            yield wrapping(safetensors.torch, "save_file", self._save_file)
            for owner in (safetensors, safetensors.torch):
                yield owner, "safe_open", calling(self._safe_open, safetensors.safe_open)

    def _save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        size, has_path = stand_in_bytes(obj), isinstance(f, (str, os.PathLike))
        if not (size and has_path):
            if has_path:
                f = self.own(f, "wb")
                self.check_open(f)  # C++ opens it, without an audit event
            elif size:
                self.counted_in(f, size)
            return original(obj, f, *args, **kwargs)
        file = Path(self._folder) / f"{next(self._numbers)}.pt"
        self._writing.holes = True
        try:
            original(obj, file, *args, **kwargs)
        finally:
            self._writing.holes = False
        self._saved_files[os.path.abspath(f)] = file
        self.left_out(f, size)
        return None

    def _write(self, original: Callable[..., Any], obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._writing, "holes", False):
            zip_file = _WriterWithHoles(zip_file)
        return original(obj, zip_file, *args, **kwargs)

    def _to_cpu(self, original: Callable[..., Any], storage: torch.UntypedStorage) -> torch.UntypedStorage:
        is_left_out = storage.device.type == "meta" and getattr(self._writing, "holes", False)
        return storage if is_left_out else original(storage)

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

    def _load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        contents = self._saved_files.get(os.path.abspath(f)) if isinstance(f, (str, os.PathLike)) else None
        if contents is None:
            missing = self.missing(f, args[0] if args else kwargs.get("map_location"))
            if missing is not None:
                return missing
        state = original(contents or self.own(f), *args, **kwargs)
        self.loaded(state)
        return state

    def _save_file(self, original: Callable[..., Any], tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        size = stand_in_bytes(tensors)
        if not size:
            self.check_open(filename)  # Rust opens it
            return original(tensors, filename, *args, **kwargs)
        self.left_out(filename, size)
        return None

    def _from_file(self, original: Callable[..., Any], filename: Any, *args: Any, **options: Any) -> Any:
        if options.get("shared", args and args[0]):
            self.check_open(filename)  # C++ opens it, and what is written to the tensor is in the file
        return original(filename, *args, **options)

    def _safe_open(
        self, original: Callable[..., Any], filename: Any, framework: Any, device: Any = "cpu", **options: Any
    ) -> Any:
        """`safetensors.safe_open`, which reads what it opens for a GPU: the CPU's tensors are mapped, and go there."""
        on_gpu = isinstance(device, int) or str(device).startswith("cuda")
        opened = original(filename, framework, "cpu" if on_gpu else device, **options)
        self.mapped[os.fspath(filename)] = os.path.getsize(filename)
        return _Opened(opened, torch.device(device)) if on_gpu else opened


class _WriterWithHoles:
    """Writes a checkpoint with holes in place of weights on the GPU: they take no room in memory or on the disk."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage) and data.device.type == "meta":
            self._writer.write_record_metadata(name, size)
        else:
            self._writer.write_record(name, data, size)


def stand_in_bytes(value: Any) -> int:
    """The bytes of the GPU that a state holds, each storage once; of what is sharded, this rank's."""
    storages = {
        piece.untyped_storage()._cdata: piece.untyped_storage().nbytes()
        for piece in _pieces(value.state_dict() if isinstance(value, torch.nn.Module) else value)
        if is_meta(piece) and piece.layout is torch.strided
    }
    return sum(storages.values())


# -- checkpoints that a program loads to the GPU --------------------------------------------------------------------


def _load_mapped(
    load: Callable[..., Any], f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any
) -> Any:
    to_meta = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "meta"
    is_archive = isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f)
    if options.get("mmap") or to_meta or not is_archive:
        return load(f, map_location, pickle_module, **options)
    with zipfile.ZipFile(f) as archive:
        entries = archive.infolist()
    is_code = any(entry.filename.endswith("/constants.pkl") for entry in entries)
    if is_code or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        return load(f, map_location, pickle_module, **options)
    restore = _get_restore_location(map_location)

    def placed(storage: Any, location: str) -> Any:
        restored = restore(storage, location)
        return restored.clone() if restored.device.type == "cpu" else restored

    return load(f, placed, pickle_module, **options | {"mmap": True})


class _Opened:
    """An open file of safetensors, or a tensor of which parts may be asked for; its tensors go to `device`."""

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

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self._file[part].to(self._device)  # type: ignore[no-any-return]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(self._device)  # type: ignore[no-any-return]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._file.offset_keys()}

    def get_slice(self, name: str) -> _Opened:
        return _Opened(self._file.get_slice(name), self._device)


# -- checkpoints of `torch.distributed.checkpoint` ---------------------------------------------------------------------

_PACKAGE = "torch.distributed.checkpoint"
_METADATA = ".metadata"
"""The file that is written last, by one rank."""


def later(files: Files) -> dict[str, LatePatches]:
    """Return the patches of the modules that save and load, by module name, for when they are imported."""

    return {
        f"{_PACKAGE}.state_dict_saver": lambda module: (
            wrapping(module, "_save_state_dict", _save_sharded, files),
            (module, "DefaultStager", _Stager),
        ),
        f"{_PACKAGE}.state_dict_loader": lambda module: (wrapping(module, "_load_state_dict", _load_sharded, files),),
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


def _save_sharded(
    files: Files, original: Callable[..., Any], state_dict: Any, storage_writer: Any, *args: Any, **options: Any
) -> Any:
    if not _stands_aside(state_dict):
        return original(state_dict, storage_writer, *args, **options)
    from torch.distributed.checkpoint.metadata import Metadata

    files.counted(_path(storage_writer), sum(piece.nbytes for piece in _pieces(state_dict)))
    if isinstance(folder := getattr(storage_writer, "path", None), (str, os.PathLike)):
        files.stand_in(Path(folder) / _METADATA, folders=True)  # by which programs know a checkpoint
    return Metadata({})


def _load_sharded(
    files: Files, original: Callable[..., Any], state_dict: Any, storage_reader: Any, *args: Any, **options: Any
) -> Any:
    path = _path(storage_reader)
    there = shown(path) in files.saved or (Path(path) / _METADATA).is_file()
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
