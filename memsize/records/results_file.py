"""The results file of a sweep: a line of JSON for each cell, added when it is done.

A process that is killed while it writes leaves a last line without an end; it is cut off when the file is opened again.
A cell's line says what it was made with: memsize, torch, and the model's code as far as it is one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from memsize.errors import OutputError
from memsize.records.codec import coder
from memsize.records.sweep import SweepRow

SCHEMA: Final = "memsize.sweep-results/1"
_HEAD: Final = f'{{"schema": "{SCHEMA}", '.encode()


class ResultsFile:
    """The lines that a file has, and a way to add some."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._rows: dict[str, SweepRow] = {}
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not (rest := content[len(whole) :]).startswith(_HEAD) and not _HEAD.startswith(rest):
            raise _foreign(str(path))
        for number, line in enumerate(whole.splitlines(), 1):
            key, row = _read(line, f"{path}:{number}")
            self._rows[key] = row
        file.truncate(len(whole))
        file.seek(len(whole))

    def find(self, settings: Mapping[str, object], versions: Mapping[str, str]) -> SweepRow | None:
        """The row of a cell, if the file has one that was made with the same."""
        return self._rows.get(_key(settings, versions))

    def add(self, rows: Iterable[tuple[SweepRow, Mapping[str, str]]]) -> None:
        """Write rows, each with what it was made with, to the file's end. They are on the disk when this returns."""
        lines = (
            json.dumps({"schema": SCHEMA, "made": {**versions}, "row": _CODER.write(row)}) for row, versions in rows
        )
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())


_CODER: Final = coder(SweepRow)


def _key(settings: Mapping[str, object], versions: Mapping[str, str]) -> str:
    return json.dumps([settings, versions], sort_keys=True, default=str)


def _read(line: bytes, where: str) -> tuple[str, SweepRow]:
    try:
        match json.loads(line):
            case {"schema": str(schema), "made": dict(versions), "row": dict(data)} if schema == SCHEMA:
                row: SweepRow = _CODER.read(data)
                return _key(row.settings, versions), row
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise _foreign(where)


def _foreign(where: str) -> OutputError:
    return OutputError(f"{where} is no result of a sweep: name another file with --results")


@contextmanager
def results_file(path: Path, *, fresh: bool = False) -> Iterator[ResultsFile]:
    """The file at `path`, made where there is none; `fresh` forgets what it has.

    Raises `OutputError` where it cannot be written, holds something else, or another sweep has it open.
    """
    try:
        file: Any = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
    with file:
        _lock(file, path)
        results = ResultsFile(file, path)
        if fresh:
            file.truncate(0)
            file.seek(0)
            results = ResultsFile(file, path)
        yield results


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock the file against other sweeps until it is closed or the process ends, on systems that have such locks."""
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"another sweep writes to {path}: wait for it, or name another file") from None
        except OSError:
            pass  # a file system without locks
