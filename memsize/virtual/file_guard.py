"""The user's files while a program runs: existing files are not written, and the values of stand-ins are not saved.

Python announces file operations to audit hooks; one that raises prevents the operation. A hook cannot be removed, so
the process has one hook, which does nothing while no program runs.

Experiment trackers are switched off, since the program would log placeholders to somebody's dashboard. Each has an
environment variable for it in its documentation, except MLflow, which gets a folder that is removed afterwards.
TensorBoard writes new files, as the program asks.

Known limit: a mode that the program passes itself (``wandb.init(mode="online")``) wins.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import Patch
from memsize.processes.simulation import open_simulation, running
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import tensors_in
from memsize.units import format_bytes
from memsize.virtual.checkpoints import mapped, opened

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_GONE: Final = {"os.remove": 0, "os.rmdir": 0, "os.truncate": 0, "os.rename": 0, "shutil.rmtree": 0, "shutil.move": 0}
"""Events after which a file is no longer what it was: the place of its path among their arguments."""
_MOVES: Final = ("os.rename", "shutil.move")
_WATCHED: Final = frozenset({"open", "os.mkdir", *_GONE})
_PASSING: Final = ("__pycache__", "/dev/", "/proc/")


class Files:
    """The file guard of a program: its new files, and the writes that were refused. `allowed` permits all writes."""

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self.refused: dict[str, None] = {}
        self.saved: dict[str, int] = {}
        """Bytes of stand-ins that would have been written, by path."""
        self._new: set[str] = set()
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
        self.saved[_shown(path)] = size

    def has_counted(self, path: str) -> bool:
        """Whether some would have been written there."""
        return _shown(path) in self.saved

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While open, files that were there before are left as they are."""
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked.append(True)
        try:
            with open_simulation() as simulation, simulation.with_part(Files, self):
                yield
        finally:
            for path in filter(os.path.isfile, self._empty):
                if not os.path.getsize(path):
                    os.remove(path)
            for folder in self._folders:
                with suppress(OSError):  # the program has put something there, or moved it
                    folder.rmdir()

    def check(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise PermissionError for an event that would change a file that was there before."""
        if not self.allowed:
            self._check_event(event, args)
        if event == "os.rename":
            self._renamed(*map(os.path.abspath, map(os.fsdecode, args[:2])))

    def _check_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, (str, bytes, os.PathLike)) and (flags or 0) & _WRITING:
                self._check(path, "write", _holds_something)
        elif event == "os.mkdir":
            self._new.add(os.path.abspath(os.fsdecode(args[0])))
        elif event in _GONE:
            self._check(args[_GONE[event]], "move" if event in _MOVES else "remove", os.path.lexists)
            if event == "os.rename":
                self._check(args[1], "replace", _holds_something)

    def _check(self, path: Any, what: str, matters: Callable[[str], bool]) -> None:
        name = os.path.abspath(os.fsdecode(path))
        if name in self._new or any(part in name for part in _PASSING):
            return
        if not os.path.lexists(name):
            self._new.add(name)
        elif matters(name) and not any(name.startswith(f"{new}{os.sep}") for new in self._new):
            self.refused[f"{what} {_shown(name)}: it was there before (--allow-writes lets the program)"] = None
            raise PermissionError(13, "memsize run leaves files that were there before as they are", name)

    def _renamed(self, old: str, new: str) -> None:
        if old in self._new:
            self._new.add(new)
        for path in [path for path in self._empty if path == old or path.startswith(f"{old}{os.sep}")]:
            moved = new + path.removeprefix(old)
            self._empty.add(moved)
            if path in self._saved_files:
                self._saved_files[moved] = self._saved_files[path]

    # -- weights ------------------------------------------------------------------------------------------------------

    def replacements(self) -> Iterator[Patch]:
        """`torch.save` and its like: stand-ins are kept in memory, from where the program may load them again."""
        yield torch, "save", self._saving(torch.save)
        yield torch, "load", self._loading(mapped(torch.load))
        if find_spec("safetensors"):
            import safetensors.torch

            yield safetensors.torch, "save_file", self._saving_named(safetensors.torch.save_file)
            for owner in (safetensors, safetensors.torch):
                yield owner, "safe_open", opened(safetensors.safe_open)

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            size = _stand_in_bytes(obj)
            if not size or not isinstance(f, (str, os.PathLike)):
                if isinstance(f, (str, os.PathLike)):
                    self.check("open", (f, "wb", os.O_WRONLY))  # C++ opens it, without an audit event
                elif size:
                    self._counted_in(f, size)
                return original(obj, f, *args, **kwargs)
            buffer = io.BytesIO()
            original(obj, buffer, *args, **kwargs)
            self._saved_files[os.path.abspath(f)] = buffer.getvalue()
            self._left_out(f, size)
            return None

        return save

    def _counted_in(self, file: Any, size: int) -> None:
        """Note `size` bytes of weights that an open file gets, or a buffer that may be written later."""
        name = getattr(file, "name", None)
        if isinstance(name, str):
            self.counted(name, size)
        else:
            self.saved["a buffer in memory"] = size

    def _left_out(self, path: Any, size: int) -> None:
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
            size = _stand_in_bytes(tensors)
            if not size:
                self.check("open", (filename, "wb", os.O_WRONLY))  # Rust opens it
                return original(tensors, filename, *args, **kwargs)
            self._left_out(filename, size)
            return None

        return save_file


def _holds_something(name: str) -> bool:
    """Whether a file is there that would lose what it holds; `tempfile` opens the folder in which it makes one."""
    return os.path.isfile(name) and os.path.getsize(name) > 0


def _stand_in_bytes(value: Any) -> int:
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


def _shown(path: Any) -> str:
    name = Path(os.fsdecode(path)).absolute()
    here = Path.cwd()
    return str(name.relative_to(here)) if name.is_relative_to(here) else str(name)


_hooked: list[bool] = []
"""Whether the process has the hook: it cannot be removed, and does nothing where no program runs."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _WATCHED and (simulation := running()) and (files := simulation.get(Files)):
        files.check(event, args)


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
    with TemporaryDirectory(prefix="memsize-", ignore_cleanup_errors=True) as folder:
        switches = {**_OFF, _ELSEWHERE: Path(folder).as_uri()}
        before = {name: os.environ.get(name) for name in switches}
        os.environ.update(switches)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
