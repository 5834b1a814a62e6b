"""The user's files while a program runs: those that were there before are not changed. And the network, while it runs
with ``--offline``: connections to other machines are refused.

What the program writes to a file that was there, such as its log, goes to a copy, which the program reads from then on.
Python announces to audit hooks what changes a file otherwise, and connections: those raise an error. This module does
not need torch: processes that a program starts are guarded too, whatever they import. This machine's own addresses and
sockets of files stay open: launchers and data loaders use them. Hugging Face's libraries are switched to what they have
on disk, which they look for at once then.

Known limit: what opens files in C, such as HDF5 and LMDB, announces nothing.
"""

from __future__ import annotations

import builtins
import io
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from memsize.processes.patches import Patch, environment, wrapping
from memsize.processes.simulation import Guard, install_guard, open_simulation

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_PASSING: Final = ("__pycache__", "/dev/", "/proc/")
_LARGEST_COPY: Final = 64 << 20
"""Bytes of a file of which a copy is made for what the program appends."""


class _Change(NamedTuple):
    """An event's effect on a file: a verb, and which arguments are its path and the folder that this is relative to."""

    verb: str
    path: int = 0
    folder: int | None = None


_CHANGES: Final = {
    "os.chmod": (_Change("change", folder=2),),
    "os.chown": (_Change("change", folder=3),),
    "os.remove": (_Change("remove", folder=1),),
    "os.removexattr": (_Change("change"),),
    "os.rename": (_Change("move", folder=2), _Change("replace", 1, folder=3)),
    "os.rmdir": (_Change("remove", folder=1),),
    "os.setxattr": (_Change("change"),),
    "os.truncate": (_Change("write"),),
    "os.utime": (_Change("change", folder=3),),
    "shutil.move": (_Change("move"),),
    "shutil.rmtree": (_Change("remove", folder=1),),
}
"""Events after which a file is no longer what it was."""


class FileGuard(Guard):
    """The files that a program makes, and the changes of others that were refused. `allowed` permits all."""

    events = frozenset({"open", "os.mkdir", *_CHANGES})

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self.refused: dict[str, None] = {}
        self.new: set[str] = set()
        """Paths that were not there before."""
        self.others_new: Callable[[], set[str]] = set
        """Returns those that processes which the program started have made since."""
        self._copies: dict[str, str] = {}
        """The copies of files that the program writes to, by their real paths."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While open, files that were there before are left as they are."""
        install_guard(FileGuard)
        with (
            TemporaryDirectory(prefix="memsize-", ignore_cleanup_errors=True) as self._folder,
            open_simulation() as simulation,
            simulation.with_part(FileGuard, self),
            simulation.patches.applied(self._openers()),
        ):
            self._copies.clear()  # those of a run before went with its folder
            yield

    def own(self, path: Any, mode: str = "r") -> Any:
        """Return the copy that the program has of a file which was there before, or makes by opening it with `mode`."""
        if self.allowed or not isinstance(path, (str, bytes, os.PathLike)):
            return path
        name = os.path.realpath(os.fsdecode(path))
        if name not in self._copies:
            keeps = "w" not in mode
            is_write = "x" not in mode and (not keeps or "+" in mode or "a" in mode)
            if not (is_write and self._is_held(name)) or (keeps and os.path.getsize(name) > _LARGEST_COPY):
                return path
            copy = os.path.join(self._folder, f"{len(self._copies)}-{os.path.basename(name)}")
            if keeps:
                shutil.copyfile(name, copy)
            self._note("write", name)
            self._copies[name] = copy
        return self._copies[name]

    def _open(self, original: Callable[..., Any], file: Any, mode: Any = "r", *args: Any, **options: Any) -> Any:
        has_opener = options.get("opener", args[5] if len(args) > 5 else None) is not None
        own = file if has_opener or not isinstance(mode, str) else self.own(file, mode)
        return original(own, mode, *args, **options)

    def _openers(self) -> Iterator[Patch]:
        """Python's own, and SQLite, which opens files in C: a database that was there before is for queries alone."""
        yield from (wrapping(module, "open", self._open) for module in (builtins, io))
        with suppress(ImportError):  # Python can be built without
            import sqlite3

            yield from (wrapping(module, "connect", self._connect) for module in (sqlite3, sqlite3.dbapi2))

    def _connect(self, original: Callable[..., Any], database: Any, *args: Any, **options: Any) -> Any:
        name = os.fsdecode(database).partition("?")[0].removeprefix("file:")
        is_old = not self.allowed and self._is_held(os.path.realpath(name))
        connection = original(database, *args, **options)
        if is_old:
            connection.execute("PRAGMA query_only = ON")
        return connection

    def check(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise PermissionError for an event that would change a file that was there before."""
        if not self.allowed:
            self._check_event(event, args)
        if event == "os.rename":
            old, new = (resolved(path) for path in args[:2])
            if old in self.new:
                self.new.add(new)
            self.renamed(old, new)

    def renamed(self, old: str, new: str) -> None:
        """Note that a file has another name."""

    def check_open(self, path: Any) -> None:
        """Raise PermissionError where writing to `path` would change a file that was there before."""
        self.check("open", (path, "wb", os.O_WRONLY))

    def _check_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, (str, bytes, os.PathLike)):
                self._check_open(os.path.realpath(os.fsdecode(path)), flags or 0)
        elif event == "os.mkdir":
            path = resolved(args[0], *args[2:3])
            if not os.path.lexists(path):  # os.makedirs tries folders that are there, too
                self.new.add(path)
        else:
            for change in _CHANGES[event]:
                path, folder = args[change.path], None if change.folder is None else args[change.folder]
                if not isinstance(path, int):  # of an open file: it was checked when it was opened
                    matters = _holds_something if change.verb == "replace" else os.path.lexists
                    self._check(resolved(path, folder), change.verb, matters)

    def _check_open(self, name: str, flags: int) -> None:
        if flags & _WRITING:
            self._check(name, "write", _holds_something)
        elif flags & os.O_CREAT and not os.path.lexists(name):  # the lock of torch.utils.cpp_extension, for one
            self.new.add(name)

    def _check(self, name: str, verb: str, matters: Callable[[str], bool]) -> None:
        if any(part in name for part in _PASSING) or self._is_new(name):
            return
        if not os.path.lexists(name):
            self.new.add(name)
        elif matters(name):
            self._note(verb, name)
            raise PermissionError(13, "memsize run leaves existing files as they are, without --allow-writes", name)

    def _note(self, verb: str, name: str) -> None:
        self.refused[f"{verb} {shown(name)}: it was there before (--allow-writes lets the program)"] = None

    def _is_held(self, name: str) -> bool:
        """Return whether a file was there before, with contents that must not be lost."""
        return _holds_something(name) and not any(part in name for part in _PASSING) and not self._is_new(name)

    def _is_new(self, name: str) -> bool:
        """Return whether a path, or a folder that it is in, was made by the program or a process that it started."""
        return _within(name, self.new) or (os.path.lexists(name) and _within(name, self.others_new()))


def _within(name: str, paths: set[str]) -> bool:
    return any(name == path or name.startswith(f"{path}{os.sep}") for path in paths)


def resolved(path: Any, folder: int | None = None) -> str:
    """Return the absolute path of a file, which may itself be a link; `folder` is the descriptor of an open folder."""
    name = os.fsdecode(path)
    if folder is not None and folder >= 0 and not os.path.isabs(name):
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    parent, last = os.path.split(os.path.abspath(name))
    return os.path.join(os.path.realpath(parent), last)


def shown(path: Any) -> str:
    """Return a path as the report shows it: relative to the working folder where it is below that."""
    name = Path(os.fsdecode(path)).absolute()
    here = Path.cwd()
    return str(name.relative_to(here)) if name.is_relative_to(here) else str(name)


def _holds_something(name: str) -> bool:
    """Whether a file is there that would lose what it holds; `tempfile` opens the folder in which it makes one."""
    return os.path.isfile(name) and os.path.getsize(name) > 0


# -- the network ------------------------------------------------------------------------------------------------------

_REACHING: Final = {"socket.connect": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0, "socket.sendto": 1}
"""Events that reach another machine: the place of its address among their arguments."""
_VARIABLES: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class NetworkGuard(Guard):
    """Refuses connections to other machines, where `when` says."""

    events = _REACHING

    def __init__(self, when: str = "memsize run --offline") -> None:
        self._when = when

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While open, the program has no network."""
        install_guard(NetworkGuard)
        with open_simulation() as simulation, simulation.with_part(NetworkGuard, self), environment(_VARIABLES):
            yield

    def check(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise ConnectionRefusedError where an operation reaches another machine."""
        address = args[_REACHING[event]]
        if isinstance(address, (bytes, str)) and os.fsdecode(address).startswith(("/", "\0")):
            return  # a socket that is a file
        host = address[0] if isinstance(address, tuple) else address
        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or name in ("", "localhost", "0.0.0.0", "::", platform.node()):
            return
        with suppress(ValueError):
            if ip_address(name.partition("%")[0]).is_loopback:
                return
        raise ConnectionRefusedError(111, f"{self._when} connects to no other machine: {name}")
