"""Where a command's text goes: a file, checked before the work begins, or stdout."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from memsize.errors import OutputError
from memsize.nearest import suggestion
from memsize.render import FORMATS, format_of


@dataclass(frozen=True, slots=True)
class Destination:
    """A format, and the file that takes it (None: stdout). `width` is the terminal's, None where nobody watches."""

    format: str
    file: Path | None
    overwrite: bool = False
    width: int | None = None

    def write(self, text: str) -> None:
        """Write `text`; a file is announced on stderr. Raises `OutputError` when it cannot be written."""
        if self.file is None:
            _print(text)
            return
        try:
            with self.file.open("w" if self.overwrite else "x", encoding="utf-8", newline="") as file:
                file.write(text)
        except FileExistsError:
            raise _exists(self.file) from None
        except OSError as error:
            raise OutputError(f"cannot write {self.file}: {error.strerror}") from error
        click.echo(f"Wrote {self.file}", err=True)


def destination(file: Path | None, format: str | None, force: bool) -> Destination:
    """Where to write and how: `format` if it is given, else by the file's suffix, else text.

    Raises `OutputError` for what would only fail after the work is done.
    """
    if format is not None and format not in FORMATS:
        raise OutputError(f"no format {format!r}: {suggestion(format, FORMATS)}")
    if file is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        return Destination(format or "text", None, width=width)
    if file.is_dir():
        raise OutputError(f"{file} is a folder: name a file in it")
    if not file.parent.is_dir():
        raise OutputError(f"cannot write {file}: there is no folder {file.parent}")
    if file.exists() and not force:
        raise _exists(file)
    return Destination(format or _format_by_suffix(file), file, force)


def _format_by_suffix(file: Path) -> str:
    suffixes = [suffix for known in FORMATS.values() for suffix in known]
    if file.suffix and file.suffix.lower() not in suffixes:
        hint = suggestion(file.suffix, suffixes)
        raise OutputError(
            f"no format has the suffix {file.suffix!r} ({file.name}): {hint} (with --format any name will do)"
        )
    return format_of(file.name)


def _exists(file: Path) -> OutputError:
    return OutputError(f"{file} exists already: --force overwrites it")


def _print(text: str) -> None:
    """Print to stdout. A reader that has gone away (``| head``) raises `BrokenPipeError`, now and not at exit."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
