"""Damaged saved runs: one of every kind, with values of its JSON or bytes of its file changed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.fuzz.checkpoints import HOSTILE, mutate
from benchmarks.fuzz.trial import Trial

SAVED: Final = Path(__file__).parents[2] / "tests" / "saved"
"""Saved runs of every kind, whose names begin with it."""
COMMANDS: Final = {
    "check": ("check",),
    "checkpoint": ("checkpoint", "diff"),
    "comparison": ("diff",),
    "error": ("explain",),
    "explanation": ("explain",),
    "fit": ("fit",),
    "generation": ("generate", "timeline"),
    "layout": ("layout",),
    "program": ("run", "timeline", "diff"),
    "ranks": ("run", "diff"),
    "report": ("report", "timeline", "diff"),
    "serving": ("serve",),
    "step": ("timeline", "diff"),
    "sweep": ("sweep",),
    "verification": ("verify",),
}
"""The commands that read each kind."""
FORMATS: Final = ("text", "json", "csv", "markdown", "html")
NAME: Final = "run.memsize"
_VALUES: Final = (
    None, True, False, -1, 0, 1, 2, 7, 255, -(2**31), 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**200, 10**400, 0.5,
    -0.0, 1e308, float("nan"), float("inf"), "", "0", "x", "fp32", "forward", "backward 1", "step 3", "\0", "\u202e",
    "\udcff", "{", "{0}", "{x}", "{x!z}", "{size:%}", "{size:>999999999}", HOSTILE, "x" * 300, [], {}, [[]], [None], 
    {"x": 1}, {"bytes": -1}, {"bytes": 2**80}, {"tuple": []},
    '{"memory_fraction": 0.0}', '{"roundup_divisions": [1]}', '{"large_segment_size": 1}', '{"max_split_size": 0}', "[",
)  # fmt: skip


def seeds() -> Iterator[tuple[str, bytes]]:
    """Saved runs without damage: the kind, and the file's content."""
    for path in sorted(SAVED.glob("*.memsize")):
        yield path.name.partition(".")[0], path.read_bytes()


def files_of(command: str, name: str) -> tuple[str, ...]:
    """The files that a command line names: `diff` compares one with itself."""
    return (name, name) if command == "diff" else (name,)


def trials(random: Random) -> Trial:
    """A command that shows a damaged saved run in one of the formats."""
    arguments, content = damaged_run(random)
    return Trial("saved", arguments, lambda folder: _write(folder / NAME, content))


def damaged_run(random: Random) -> tuple[tuple[str, ...], bytes]:
    """A command line, and the content of the file `NAME` that it reads."""
    kind, content = random.choice(list(seeds()))
    command = random.choice(COMMANDS[kind])
    files = files_of(command, NAME)
    if random.random() < 0.1:
        return (command, "--format", random.choice(FORMATS), *files), mutate(random, content)
    data = json.loads(gzip.decompress(content))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _damage(data, random)
    text = json.dumps(data).encode()
    if random.random() < 0.05:
        text = mutate(random, text)
    return (command, "--format", random.choice(FORMATS), *files), gzip.compress(text, compresslevel=1)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _damage(data: dict[str, Any], random: Random) -> None:
    """Change one value of the answer in `data`, or a few of one list or object."""
    slots = list(_slots(data["answer"]))
    if not slots:
        return
    names = [slot for slot in slots if isinstance(slot[0], dict)]
    # Most values are those of a trace's events, which look all alike.
    container, key = random.choice(names if names and random.random() < 0.5 else slots)
    random.choice(_DAMAGES)(container, key, slots, random)


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and object inside `value`, with each of its positions or names."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _slots(value[key])


def _replace(container: Any, key: Any, slots: list[tuple[Any, Any]], random: Random) -> None:
    alike = [value for value in _VALUES if type(value) is type(container[key])]
    container[key] = random.choice(alike if alike and random.random() < 0.7 else _VALUES)


def _delete(container: Any, key: Any, slots: list[tuple[Any, Any]], random: Random) -> None:
    del container[key]


def _repeat(container: Any, key: Any, slots: list[tuple[Any, Any]], random: Random) -> None:
    if isinstance(container, list):
        container.insert(random.randrange(len(container) + 1), container[key])
    else:
        container[f"{key}{random.choice(('', 'x', '.0'))}"] = container[key]


def _rename(container: Any, key: Any, slots: list[tuple[Any, Any]], random: Random) -> None:
    if isinstance(container, dict):
        container[random.choice((*container, "", "x"))] = container.pop(key)
    else:
        random.shuffle(container)


def _copy(container: Any, key: Any, slots: list[tuple[Any, Any]], random: Random) -> None:
    """Put a value of the same type in its place that is elsewhere in the file."""
    value = container[key]
    alike = [other[name] for other, name in slots if type(other[name]) is type(value)]
    container[key] = (
        random.choice(alike) if not isinstance(value, dict | list) else json.loads(json.dumps(random.choice(alike)))
    )


def _nudge(container: Any, key: Any, slots: list[tuple[Any, Any]], random: Random) -> None:
    """Change a number by a little or by a lot, a text by a letter, and empty what holds others."""
    match container[key]:
        case bool():
            container[key] = not container[key]
        case int() | float() as number:
            container[key] = random.choice((number + 1, number - 1, -number, number * 1000, 0))
        case str() as text:
            container[key] = random.choice((text * 2, text[:-1], text.upper(), f"{text} 2", f"{{{text}}}"))
        case dict() | list() as inner:
            inner.clear()


_DAMAGES: Final[tuple[Callable[[Any, Any, list[tuple[Any, Any]], Random], None], ...]] = (
    _replace, _replace, _delete, _repeat, _rename, _copy, _nudge, _nudge,
)  # fmt: skip
