"""Files: written whole or not at all, and read no further than their kind can be.

Every file that memsize writes goes through `write`, every one that it reads whole through `read`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from errno import EINVAL
from pathlib import Path
from typing import Any, BinaryIO, Final

from memsize.errors import OutputError

MOST_VALUES: Final = 2_000_000
"""JSON values that are parsed at once. One takes up to a hundred bytes of memory; a tensor in a header of safetensors
has twelve to fourteen."""

Pairs = Callable[[list[tuple[str, Any]]], Any]
"""Makes a value of the names and values of a JSON object."""

_LONGEST_VALUE: Final = 64
"""Bytes of memory that the text itself may take for each value that is allowed, on average."""


# -- writing -----------------------------------------------------------------------------------------------------------


Content = str | bytes | Iterable[str]
"""The content of a file. Texts may come piece by piece, and are written as they come."""


def write(path: str | os.PathLike[str], content: Content, *, overwrite: bool = False) -> None:
    """Write `content` to `path`, whole or not at all: after a failure, an old file is unchanged, and no other is left.

    A symbolic link stays, and its target is replaced. A pipe or a device is written in place. Raises
    `OutputError` where the file exists, unless `overwrite` is set, and where it cannot be written.
    """
    target = Path(path)
    check_writable(target, overwrite=overwrite)
    pieces = (content,) if isinstance(content, str | bytes) else content
    data = (piece.encode() if isinstance(piece, str) else piece for piece in pieces)
    try:
        if _is_stream(target):
            _append(target, data)
        else:
            _put(Path(os.path.realpath(target)), data, overwrite)
    except BrokenPipeError:
        raise
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        raise _unwritable(target, error) from error


def check_writable(path: Path, *, overwrite: bool = False) -> None:
    """Raise the `OutputError` of writing to `path` before the work for its content is done, if it shows by then."""
    try:
        if path.is_dir():
            raise OutputError(f"{path} is a folder: name a file in it")
        if not path.parent.is_dir():
            raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
        if _is_stream(path):
            return
        if path.exists() and not overwrite:
            raise _exists(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    except ValueError as error:  # a null byte, which no file's name has
        raise OutputError(f"cannot write {path}: {error}") from error
    real = Path(os.path.realpath(path))
    # Renaming would replace even a file that its owner made read-only.
    if not os.access(real.parent, os.W_OK) or (real.exists() and not os.access(real, os.W_OK)):
        raise OutputError(f"cannot write {path}: Permission denied")


def _is_stream(path: Path) -> bool:
    """Whether `path` is written in place: a pipe, a device, or the file of stdout or stderr."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(status.st_mode) or any(_is_open_as(status, descriptor) for descriptor in (1, 2))


def _is_open_as(status: os.stat_result, descriptor: int) -> bool:
    try:
        return os.path.samestat(status, os.fstat(descriptor))
    except OSError:  # the descriptor is closed
        return False


def _append(path: Path, data: Iterable[bytes]) -> None:
    # Not truncated: after ``>> log -o /dev/stdout`` the log must still have what it had.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)), "wb") as file:
        file.writelines(data)


def _put(target: Path, data: Iterable[bytes], overwrite: bool) -> None:
    """Write beside `target`, then give that file its name."""
    beside = target.with_name(f".memsize-{secrets.token_hex(8)}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            if target.exists():
                shutil.copymode(target, beside)
            os.replace(beside, target)
        else:
            _name(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _name(beside: Path, target: Path) -> None:
    """Rename `beside`; raises FileExistsError where a file has appeared at `target` meanwhile."""
    try:
        os.link(beside, target)
    except FileExistsError:
        raise
    except OSError:  # no hard links: exFAT, some network shares
        if target.exists():
            raise FileExistsError from None
        os.replace(beside, target)
    else:
        beside.unlink()


def _exists(path: Path) -> OutputError:
    return OutputError(f"{path} exists already: --force overwrites it")


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {path}: {error.strerror}")


# -- reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open the file at `path` for reading. Raises OSError, also for a device, which has no end, or a pipe."""
    # Not blocking, so that a pipe which nobody writes to is refused and not waited for.
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # a null byte, which no file's name has
        raise OSError(EINVAL, str(error)) from None
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is not a file")
        with os.fdopen(handle, "rb", buffering=1 << 16, closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a file of at most `most` bytes; raises OSError for anything else."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
        if max(size, len(content)) > most:
            raise OSError(EINVAL, f"it has {max(size, len(content)):,} bytes, more than memsize reads ({most:,})")
        return content


def parse_json(content: bytes, most: int = MOST_VALUES, pairs: Pairs | None = None) -> Any:
    """The value of a JSON text with at most about `most` values in it; `pairs` makes each object of it.

    Raises ValueError in a few words for text that is not JSON, too long, or nested too deeply: the value has to fit
    into memory, where it takes many times the bytes of its text.
    """
    count = sum(map(content.count, (b",", b":", b"[", b"{")))
    if count > most:
        raise ValueError(f"it holds about {count:,} values, more than memsize reads ({most:,})")
    # Bytes that Python takes for each character of the text.
    width = 4 if re.search(rb"[\xf0-\xff]", content) else 2 if re.search(rb"[\xc4-\xef]", content) else 1
    if len(content) * width > most * _LONGEST_VALUE:
        raise ValueError(f"its text is too long: {len(content):,} bytes")
    try:
        text = content.decode("utf-8-sig")
        del content  # where the caller keeps it neither, two copies less of a long text
        return json.loads(text, object_pairs_hook=pairs)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
