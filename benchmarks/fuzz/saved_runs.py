"""Damaged saved runs: one of every kind, with bytes of its file changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.fuzz.checkpoints import mutate
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
    """A command line, and the content of the file `NAME` that it reads, one in five of them without damage."""
    kind, content = random.choice(list(seeds()))
    command = random.choice(COMMANDS[kind])
    content = mutate(random, content) if random.random() < 0.8 else content
    return (command, "--format", random.choice(FORMATS), *files_of(command, NAME)), content


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
