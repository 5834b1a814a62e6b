"""`python -m benchmarks.fuzz --seconds 60`: break memsize, and count what comes of it."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from random import Random

import torch
from tabulate import tabulate

from benchmarks.fuzz import checkpoints, commands, saved_runs
from benchmarks.fuzz.trial import Outcome, Trial, attempt
from benchmarks.zoo.operators import declare

KINDS: dict[str, Callable[[Random], Trial]] = {
    "checkpoint": checkpoints.trials,
    "saved": saved_runs.trials,
    "options": commands.option_trials,
    "models": commands.model_trials,
}
MOST_SECONDS, MOST_MEMORY = 5.0, 300.0
"""What reading a small checkpoint may take: CPU seconds, and MiB."""


@dataclass(slots=True)
class Tally:
    """What came of the trials of one kind."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def row(self) -> tuple[object, ...]:
        outcomes = self.outcomes
        return (
            len(outcomes),
            sum(outcome.status == 0 for outcome in outcomes),
            sum(outcome.status == 2 for outcome in outcomes),
            sum(bool(outcome.faults) for outcome in outcomes),
            f"{max((outcome.seconds for outcome in outcomes), default=0):.2f} s",
            f"{max((outcome.memory for outcome in outcomes), default=0):.0f} MiB",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    kinds = chosen.kinds or list(KINDS)
    tallies = {kind: Tally() for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="memsize-fuzz-") as folder:
        _warm_up(Path(folder))
        for kind, number in _numbers(kinds, chosen):
            trial = KINDS[kind](Random(f"{chosen.seed}:{kind}:{number}"))
            outcome = attempt(trial, Path(folder) / "trial")
            outcome = _judged(outcome, trial)
            tallies[kind].outcomes.append(outcome)
            if outcome.faults:
                _tell(kind, number, trial, outcome, chosen)
                if chosen.keep:
                    shutil.copytree(
                        Path(folder) / "trial", chosen.keep / f"{kind}-{number}", dirs_exist_ok=True, symlinks=True
                    )
    titles = ("", "runs", "answered", "refused", "faults", "longest", "most memory")
    print(tabulate([(kind, *tally.row) for kind, tally in tallies.items()], titles, "simple"))
    return 1 if any(outcome.faults for tally in tallies.values() for outcome in tally.outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.partition(": ")[2])
    parser.add_argument(
        "kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help=f"{', '.join(KINDS)} (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on (default: 60)")
    parser.add_argument("--trials", type=int, help="how many of each kind, instead of a time")
    parser.add_argument("--seed", default="0", help="where to begin: the same seed makes the same trials")
    parser.add_argument("--only", type=int, help="the number of one trial, to run it again")
    parser.add_argument("--keep", type=Path, help="a folder for the files of trials with faults")
    return parser


def _numbers(kinds: Sequence[str], chosen: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Which trials to run, one of each kind in turn."""
    end = time.monotonic() + chosen.seconds
    for number in count() if chosen.only is None else (chosen.only,):
        for kind in kinds:
            if number == chosen.trials or (chosen.trials is None and time.monotonic() > end):
                return
            yield kind, number


def _warm_up(folder: Path) -> None:
    """Import all that commands import, so that a trial which reads data has no reason to import anything."""
    declare()
    importlib.import_module("encodings.raw_unicode_escape")  # how old pickles write text
    # A pool of threads does not live on in a forked process, which would wait for it.
    torch.set_num_threads(1)
    sound: list[tuple[tuple[str, ...], str, bytes]] = [
        *((("checkpoint",), name, content) for name, content in checkpoints.seeds()),
        *((saved_runs.COMMANDS[kind], f"{kind}.memsize", content) for kind, content in saved_runs.seeds()),
    ]
    for readers, name, content in sound:
        for reader, form in product(readers, checkpoints.FORMATS):
            command = (reader, "-f", form, *saved_runs.files_of(reader, name))
            trial = Trial("warm-up", command, lambda folder, n=name, c=content: _put(folder / n, c))
            _run_here(trial, folder / "warm")


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _run_here(trial: Trial, folder: Path) -> None:
    import contextlib
    import io
    import os

    from memsize.cli import run

    folder.mkdir(parents=True, exist_ok=True)
    trial.prepare(folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(trial.arguments)
    finally:
        os.chdir(before)


def _judged(outcome: Outcome, trial: Trial) -> Outcome:
    """`outcome` with the faults of a checkpoint that took too long or too much."""
    if not trial.strict:
        return outcome
    faults = [*outcome.faults]
    if outcome.seconds > MOST_SECONDS:
        faults.append(f"takes {outcome.seconds:.1f} s")
    if outcome.memory > MOST_MEMORY:
        faults.append(f"takes {outcome.memory:.0f} MiB")
    return Outcome(outcome.status, tuple(faults), outcome.seconds, outcome.memory)


def _tell(kind: str, number: int, trial: Trial, outcome: Outcome, chosen: argparse.Namespace) -> None:
    print(f"{kind} --seed {chosen.seed} --only {number}: memsize {' '.join(map(ascii, trial.arguments))}")
    for fault in outcome.faults:
        print(f"    {fault!a}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
