"""How single values are drawn as text, the same in every format that people read."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from memsize.documents import Document
from memsize.documents.sections import Phrase, Strip, Title
from memsize.printable import LONGEST, printable, printable_lines
from memsize.records.fields import Cell, Change, Column, Label, Missing, Path, Share, Signed, Sized, Specs, Words
from memsize.records.gpu import Interval
from memsize.records.trace import Failure, TensorSpec
from memsize.render import WHOLE, Screen
from memsize.units import AUTO, Bytes, Unit, format_bytes, unit_for

UNKNOWN = "–"
MINUS = "−"
MODEL = "(model)"
"""How the model's own path, which is empty, is drawn."""

_LINE: Final = re.compile(r":\d+$")
"""The number of a line behind its file."""
_CLAUSE: Final = re.compile(r"[;,:]? \(|[;,:] ")

_SIZE: Final = re.compile(
    r"(?<=[\d,]) (?=[KMG]?i?B\b)|(?:tensors|allocated|reserved) (?=\d)"
    r"|nvidia-smi (?:up to )?[\d.,–]+(?: [KMG]iB)? of [\d.,]+"
)
"""Spaces at which no line ends: before a unit, and within a figure of the strip."""

LEFT = ("name", "text", "specs", "words")
"""The kinds of cell that stand at the left of their column; numbers stand at the right."""


def draw_cell(cell: Cell, unit: Unit) -> str:
    """A cell as text. Bytes are drawn without their unit: it stands once, in the column's title."""
    match cell:
        case None:
            return ""
        case Missing():
            return UNKNOWN
        case Label():
            return printable(cell.text)
        case Path():
            return printable(cell) or MODEL
        case Specs():
            return printable(draw_specs(cell))
        case Words():
            return printable(", ".join(cell))
        case Share():
            return f"{cell:.0%}"
        case Change():
            return f"{cell:+.2%}".replace("-", MINUS) if cell else "0"
        case Signed():
            return f"{'+' if cell > 0 else ''}{draw_bytes(cell, unit)}"
        case Sized():
            return format_bytes(cell, AUTO if unit.rounded else unit.name)
        case Bytes():
            return draw_bytes(cell, unit)
        case int():
            return f"{cell:,}"
    return printable(str(cell))


def draw_bytes(count: int, unit: Unit) -> str:
    """`count` in `unit`, without the unit's name; exactly nothing is ``0``. In a rounded unit, a size that would look
    like nothing has a smaller one, which it names: ``512 B``.
    """
    size = unit.amount(abs(count))
    if count and unit.rounded and not size.strip("0."):
        size = format_bytes(abs(count))
    return f"{MINUS if count < 0 else ''}{size}"


_MOST_RUNS: Final = 6
"""How many entries a list of tensors in order may have: the caches of layers of several kinds have some fifty."""


def draw_specs(specs: Sequence[TensorSpec]) -> str:
    """Draw tensor specs in order. Consecutive repeats are drawn once with their count: ``(a, b ×2) ×3``. A longer list
    than that makes has each spec once: ``a, b ×20, c ×10``.
    """
    texts = [str(spec) for spec in specs]
    for period in range(1, len(texts) // 2 + 1):
        times, rest = divmod(len(texts), period)
        if not rest and texts == texts[:period] * times:
            once = _runs(texts[:period])
            return f"({once}) ×{times}" if period > 1 else f"{once} ×{times}"
    return _runs(texts)


def _runs(texts: Sequence[str]) -> str:
    runs = [(text, sum(1 for _ in group)) for text, group in groupby(texts)]
    if len(runs) > _MOST_RUNS:
        runs = [*Counter(texts).items()]
    return ", ".join(text if count == 1 else f"{text} ×{count}" for text, count in runs)


def draw_title(column: Column, unit: Unit) -> str:
    """A column's title on one line, with the unit where its cells are bytes."""
    return f"{column.title}, {unit.name}" if column.kind == "bytes" else column.title


def draw_phrases(title: Title, unit: str) -> tuple[str, ...]:
    return tuple(draw_phrase(phrase, unit) for phrase in title.phrases)


def one_line(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """The subject of an answer and its first figures, in a line."""
    title = document.in_short()
    return f"{printable(title.name)}: {', '.join(draw_phrases(title, unit))}\n"


def draw_phrase(phrase: Phrase, unit: str) -> str:
    """Words and sizes as one text."""
    return " ".join(
        draw_strip(word, unit)
        if isinstance(word, Strip)
        else format_bytes(word, unit)
        if isinstance(word, Bytes)
        else printable(word)
        for word in phrase
    )


def draw_strip(strip: Strip, unit: str) -> str:
    """The peak of a run in all ways to count, each figure in the unit that sentences have it in, the last in that of
    the card. A unit stands once behind figures that share it. Where the workspaces of convolutions are estimates, a GPU
    may show less than what is reserved with them: only the upper end of its interval is drawn.
    """
    names, amounts = [name for name, _ in strip.amounts], [sizes for _, sizes in strip.amounts]
    units = [unit_for(max(sizes), unit) for sizes in amounts[:-1]]
    units.append(unit_for(max(amounts[-1]), unit, beside=strip.card))
    if strip.card:
        names, amounts = [*names, "of"], [*amounts, Interval(strip.card, strip.card)]
        units.append(unit_for(strip.card, unit))
    parts: list[str] = []
    smallest = 0
    for name, sizes, own, after in zip(names, amounts, units, [*units[1:], None], strict=True):
        if name != "of" and sizes.low < smallest:
            figures = f"up to {draw_bytes(sizes.high, own)}"
        else:
            figures = "–".join(dict.fromkeys(draw_bytes(size, own) for size in sizes))
        smallest = max(smallest, sizes.low)
        arrow = "→ " if parts and name != "of" else ""
        parts.append(f"{arrow}{name} {figures}{'' if after and own.name == after.name else f' {own.name}'}")
    return " ".join(parts)


def draw_failure(failure: Failure) -> tuple[str, ...]:
    """Where the forward stopped, why (which may be several lines), and how to read what follows."""
    module = f"{failure.layer} ({failure.type})" if failure.layer else failure.type
    at = f", at {failure.op}" if failure.op else ""
    inputs = f", given {', '.join(failure.inputs)}" if failure.inputs else ""
    return (
        printable(f"The forward stopped in {module}{at}{inputs}:", LONGEST),
        printable_lines(failure.reason, LONGEST),
        "Below are the layers up to there. Outputs and bytes kept for backward are counted until the failure; stored "
        "bytes are complete.",
    )


def wrapped(text: str, width: int | None, first: str = "", rest: str = "", style: str = "") -> list[Text]:
    """`text` in lines of at most `width` columns, the `first` and the `rest` indented so."""
    text = printable(text)
    if width is None:
        return [Text(first + text, style)]
    together = _SIZE.sub(lambda match: match[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(
        together, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return [Text(line.replace("\xa0", " "), style) for line in lines]


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` columns of a terminal, cut at the end."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"


def shorten_text(text: str, width: int) -> str:
    """A text in at most `width` columns, cut behind a clause where one ends behind a third of that, or before the
    number of a line.
    """
    if cell_len(text) <= width:
        return text
    if line := _LINE.search(text):
        return f"{shorten(text[: line.start()], width - len(line[0]))}{line[0]}"
    clauses = [match.start() for match in _CLAUSE.finditer(text) if width // 3 <= match.start() <= width - 2]
    return f"{text[: clauses[-1]]} …" if clauses else shorten(text, width)


def shorten_path(text: str, width: int) -> str:
    """A path in at most `width` characters: names from the left shrink to a letter, then the last loses its middle.

    Numbers stay, because they tell repeated blocks apart: ``m.l.layers.7.self_attention.query``. A target, which has
    no such names, loses its middle: ``timm:…patch16_224``.
    """
    parts = text.split(".") if {":", "/"}.isdisjoint(text) else [text]
    for position, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= width:
            break
        parts[position] = part if part.isdecimal() else part[:1]
    whole = ".".join(parts)
    if cell_len(whole) > len(whole):
        return shorten(whole, width)
    if len(whole) <= width:
        return whole
    head = max(len(whole) - len(parts[-1]), 0)
    room = width - head - 1
    if room < 3:
        return f"…{whole[len(whole) - width + 1 :]}"
    return f"{whole[: head + room // 3]}…{whole[len(whole) - room + room // 3 :]}"
