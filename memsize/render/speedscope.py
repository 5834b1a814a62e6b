"""The live bytes at one moment of a run, by the calls that made them, as a profile for https://www.speedscope.app.

Its samples are stacks, outermost call first, whose weights are bytes. Source of the fields:
https://github.com/jlfwong/speedscope/blob/main/src/lib/file-format-spec.ts
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from memsize.documents import Document
from memsize.documents.sections import Chart
from memsize.errors import OutputError
from memsize.records.roles import noun
from memsize.render import WHOLE, Screen
from memsize.render.cell_text import MODEL
from memsize.version import VERSION

_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_UNKNOWN: Final = "(no line recorded)"


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """The profile of the picture of `document`; raises `OutputError` where that is not a run over time."""
    chart = document.picture()
    if not isinstance(chart, Chart) or not len(chart.timeline):
        raise OutputError(f"this {document.answer.kind} records no run whose calls speedscope could show")
    stacks = Counter[tuple[str, ...]]()
    for storage, size in _alive(chart):
        stacks[tuple(_calls(chart, storage))] += size
    frames = {name: number for number, name in enumerate(dict.fromkeys(name for stack in stacks for name in stack))}
    profile = {
        "type": "sampled",
        "name": chart.timeline.model,
        "unit": "bytes",
        "startValue": 0,
        "endValue": stacks.total(),
        "samples": [[frames[name] for name in stack] for stack in stacks],
        "weights": list(stacks.values()),
    }
    content = {
        "$schema": _SCHEMA,
        "exporter": f"memsize {VERSION}",
        "name": chart.timeline.model,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": [profile],
    }
    return json.dumps(content, ensure_ascii=False) + "\n"


def _alive(chart: Chart) -> Iterable[tuple[int, int]]:
    """The storages that are alive at the chart's moment, with their bytes."""
    run = chart.timeline
    last = run.peak.event if chart.moment is None else chart.moment
    sizes = Counter[int]()
    for storage, change in zip(run.storage[: last + 1], run.delta, strict=False):
        sizes[storage] += change
    return ((storage, size) for storage, size in sizes.items() if size)


def _calls(chart: Chart, number: int) -> Iterator[str]:
    """The calls that made a storage: those of its stack, or its lines, its module and its op; last its role."""
    run = chart.timeline
    storage = run.storages[number]
    line = run.lines[storage.line] if storage.line >= 0 else ""
    stack = chart.stacks[storage.line] if chart.stacks and storage.line >= 0 else ()
    yield from stack or (line.split(" > ") if line else [_UNKNOWN])
    if storage.layer >= 0:
        yield run.layers[storage.layer] or MODEL
    if storage.op and not stack:
        yield storage.op
    yield noun(storage.role)
