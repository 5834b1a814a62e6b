"""Saved runs: one answer in a file, with everything that it is drawn from.

A file is gzipped JSON: an object with its `schema`, the `kind` of answer, the `memsize` that wrote it, and the `answer`
as the codec writes it. Reading needs no torch. A file that is newer, damaged or not ours is refused in one line, and
never overwritten.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from memsize import files
from memsize.errors import InputError, OutputError
from memsize.printable import shortened
from memsize.records.codec import coder
from memsize.version import VERSION

SUFFIX: Final = ".memsize"
SCHEMA: Final = "memsize.run"
NEWEST: Final = 1
"""The version of the schema that is written; older ones are read."""
_HEAD: Final = f'{{"schema":"{SCHEMA}/'.encode()
_MOST_BYTES: Final = 1 << 30
"""Unpacked bytes beyond which a file is no saved run: that of a 70 B Llama in seven scenarios has 100 MB."""
_UNPACKED: Final = 16 << 20
_BEST_PACKING: Final = 32
"""A file may unpack to `_UNPACKED` and to `_BEST_PACKING` times its size. Runs have 14 times theirs, what has more was
made to fill the memory."""
_PACKING: Final = 20
"""JSON values for each byte of the packed file that are read; a run has two, and what has many was made to."""


def is_run_file(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is meant as a saved run: it has its suffix, or begins as one does."""
    if os.fspath(path).endswith(SUFFIX):
        return True
    try:
        with files.opened(path) as packed, gzip.open(packed) as file:
            return file.read(len(_HEAD)) == _HEAD
    except (OSError, ValueError, EOFError, zlib.error):
        return False


def write_run(path: str | os.PathLike[str], answer: Any, *, overwrite: bool = False) -> None:
    """Save `answer` to `path`, whole or not at all.

    Raises `OutputError` where the file exists, unless `overwrite` is set and it is a saved run that this version reads;
    and where it cannot be written.
    """
    check_writable(Path(path), overwrite=overwrite)
    record: Any = type(answer)
    head = {"schema": f"{SCHEMA}/{NEWEST}", "kind": record.kind, "memsize": VERSION}
    data = head | {"answer": coder(record).write(answer)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # A time stamp in the header would make two files of one run differ.
    content = text.encode(
        "utf-8", "backslashreplace"
    )  # a lone surrogate, as in a file's name, is an escape in JSON too
    files.write(path, gzip.compress(content, compresslevel=6, mtime=0), overwrite=overwrite)


def check_writable(path: Path, *, overwrite: bool) -> None:
    """Raise the `OutputError` that saving to `path` would end in, as far as that shows before the work is done."""
    files.check_writable(path, overwrite=overwrite)
    if not path.exists():
        return
    try:
        read_data(path)
    except InputError as error:
        raise OutputError(f"{error}; it is not overwritten") from None


def read_run(path: str | os.PathLike[str], record_of: Callable[[str], type | None]) -> Any:
    """The answer in a saved run; `record_of` gives the record of its kind.

    Raises `InputError` for a file that is none, that is damaged, or that a newer memsize wrote.
    """
    data = read_data(path)
    record = record_of(data["kind"])
    if record is None:
        raise InputError(f"{path} holds a {data['kind']!r}, which this memsize does not know: a newer one wrote it")
    try:
        return coder(record).read(data["answer"])
    except (KeyError, TypeError, ValueError, RecursionError, InputError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is damaged: {why}") from None


def read_data(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a saved run as JSON data, its header checked."""
    try:
        with files.opened(path) as packed, gzip.open(packed) as file:
            size = os.fstat(packed.fileno()).st_size
            most, most_bytes = files.MOST_VALUES + _PACKING * size, min(_MOST_BYTES, _UNPACKED + _BEST_PACKING * size)
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except gzip.BadGzipFile:
        raise InputError(f"{path} is not a saved run of memsize") from None
    except (EOFError, zlib.error):
        raise InputError(f"{path} is damaged: it ends too early, or its bytes have changed") from None
    except OSError as error:
        raise InputError(f"cannot read {shortened(str(path), 200)}: {error.strerror}") from None
    try:
        data: Any = files.parse_json(content, most) if len(content) <= most_bytes else None
    except ValueError:
        data = None
    match data:
        case {"schema": str(schema), "kind": str(), "memsize": str(version)}:
            name, _, number = schema.partition("/")
        case _:
            name = number = version = ""
    if name != SCHEMA or not re.fullmatch("[0-9]{1,9}", number):
        raise InputError(f"{path} is not a saved run of memsize")
    if int(number) > NEWEST:
        raise InputError(f"{path} was saved by memsize {version:.20}, which is newer than this one ({VERSION})")
    return cast(dict[str, Any], data)
