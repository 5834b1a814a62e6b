"""Where a command's output goes: a file, checked before the work begins, or stdout."""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from memsize import files
from memsize.cli.working import interrupts_raised, say
from memsize.errors import OutputError, UnknownOutputError, suggestion
from memsize.interrupt import Interrupted
from memsize.records.answer import Renderable, Saveable
from memsize.records.run_file import check_writable
from memsize.render import FORMATS, IMAGES, Screen, check_images, format_of, image, pieces
from memsize.units import AUTO, DECIMAL, UNITS


@dataclass(frozen=True, slots=True)
class Destination:
    """A format, and the file that takes it (None: stdout). `width` is the terminal's, None where nobody watches; `unit`
    is what sizes are drawn in, None for what suits them. `saved` is the file that the run itself is saved to, if any.
    `height` is the terminal's where the answer is to fit it; `colour` says whether it gets colours.
    """

    format: str
    file: Path | None
    overwrite: bool = False
    width: int | None = None
    unit: str | None = None
    saved: Path | None = None
    height: int | None = None
    colour: bool = False

    def keep(self, answer: Saveable) -> None:
        """Save `answer` where that was asked for, and say so on stderr."""
        if self.saved is not None:
            with interrupts_raised():
                answer.save(self.saved, overwrite=self.overwrite)
            say(f"Wrote {self.saved}")

    def drawn(self, answer: Renderable, **view: Any) -> files.Content:
        """`answer` in this format, drawn piece by piece as it is written; `view` as `memsize.render.render` takes it.
        What is chosen is shown however long.
        """
        if self.format in IMAGES:
            return image(answer, self.format, unit=self.unit, **view)
        chosen = any(choice is not None for choice in view.values())
        height = None if chosen else self.height
        return pieces(answer, self.format, Screen(self.width, height, self.colour), unit=self.unit, **view)

    @contextlib.contextmanager
    def shown_if_interrupted(self, **view: Any) -> Iterator[None]:
        """Where Ctrl-C ends what is in here, print what was found until then. A file is for a complete answer alone."""
        try:
            yield
        except Interrupted as ended:
            self._show(ended.answer, **view)
            raise

    def _show(self, part: Any, **view: Any) -> None:
        for file in filter(None, (self.file, self.saved)):
            say(f"{file} was not written")
        output = self if self.file is None else destination(None, None, False, unit=self.unit)
        if output.format in _WORDLESS:
            say(part.findings[0].text(self.unit or AUTO))
        else:
            output.write(output.drawn(part, **view))

    def write(self, content: files.Content) -> None:
        """Write `content`; a file is announced on stderr. Raises `OutputError` when it cannot be written."""
        if self.file is None:
            _print(content)
            return
        with interrupts_raised():
            files.write(self.file, content, overwrite=self.overwrite)
        say(f"Wrote {self.file}")


Color = Literal["auto", "always", "never"]

Formats = Mapping[str, tuple[str, ...]]
"""What a command can write: each format with the suffixes of its files."""

BINARY = ("snapshot", "parquet", "png")
"""Formats that are no text."""
_WORDLESS = ("csv", "parquet", *IMAGES)
"""Formats that have no place to say that an answer is not complete."""


def destination(
    file: Path | None,
    format: str | None,
    force: bool,
    formats: Formats = FORMATS,
    unit: str | None = None,
    saved: Path | None = None,
    full: bool = False,
    color: Color = "auto",
) -> Destination:
    """Where to write and how: `format` (one of `formats`) if it is given, else by the file's suffix, else text.

    Raises `OutputError` for what would only fail after the work is done.
    """
    unit = _unit_called(unit)
    if saved is not None:
        check_writable(saved, overwrite=force)
    if format is not None and format not in formats:
        raise UnknownOutputError("format", format, formats)
    if file is None:
        _check_stdout(format, formats)
        form = format or "text"
    else:
        if file == saved:
            raise OutputError(f"{file} cannot hold both the output and the saved run: give them different names")
        files.check_writable(file, overwrite=force)
        form = format or _format_by_suffix(file, formats)
    if form in IMAGES:
        check_images()
    if file is None:
        terminal = shutil.get_terminal_size() if sys.stdout.isatty() else None
        return Destination(
            form,
            None,
            force,
            width=terminal and terminal.columns,
            unit=unit,
            saved=saved,
            height=None if full or terminal is None else terminal.lines,
            colour=form == "text" and _coloured(color),
        )
    return Destination(form, file, force, unit=unit, saved=saved)


def _unit_called(name: str | None) -> str | None:
    """The unit of this name, in upper case or lower. Raises `OutputError` where there is none."""
    if name in (None, AUTO, *UNITS, *DECIMAL):
        return name
    match = next((unit for unit in (*UNITS, *DECIMAL) if unit.lower() == str(name).lower()), None)
    if match is None:
        raise UnknownOutputError("unit", str(name), (*UNITS, *DECIMAL))
    return match


def _check_stdout(format: str | None, formats: Formats) -> None:
    if sys.stdout is None:
        raise OutputError("cannot write to stdout, which is closed: name a file with -o")
    if format in BINARY and sys.stdout.isatty():
        raise OutputError(f"a {format} is not text: name a file for it, such as -o {format}{formats[format][0]}")


def _format_by_suffix(file: Path, formats: Formats) -> str:
    suffixes = [suffix for endings in formats.values() for suffix in endings]
    if file.suffix and file.suffix.lower() not in suffixes:
        hint = f"{suggestion(file.suffix, suffixes)} (with --format any name will do)"
        raise OutputError(f"no format has the suffix {file.suffix!r} ({file.name}): {hint}")
    return format_of(file.name, formats)


def _coloured(color: Color) -> bool:
    """Whether stdout gets colours: what is asked for, else by the conventions of no-color.org and force-color.org."""
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


_STAND_INS: Final = dict(zip("█░▒▓▚▞▌▄▀▐▙▜▟▖▘▛▗▝▁▂▃▅▆▇→–−×÷…│┃▼", "#.:%/\\|=^]LJTo'&,`_.-+*%>--x/~||v", strict=True))
"""For terminals that lack what bars, charts and sentences are drawn with: one character for one, so columns stay."""


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_STAND_INS.get(character, "?") for character in error.object[error.start : error.end]), error.end


def _print(content: files.Content) -> None:
    """Print to stdout. A reader that has gone away (``| head``) raises `BrokenPipeError`, now and not at exit."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        if isinstance(content, bytes):
            sys.stdout.buffer.write(content)
        else:
            pieces = (content,) if isinstance(content, str) else content
            codecs.register_error("memsize", _stand_in)
            sys.stdout.writelines(piece.encode(encoding, "memsize").decode(encoding) for piece in pieces)
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"cannot write to stdout: {error.strerror}") from error
