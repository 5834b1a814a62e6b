"""What a workload came to on one GPU and stack, and the file that holds them all.

A file keeps no logs of allocations: only how many there were, a digest of their sizes, and the first that were not as
predicted on the day of the measurement. One outcome stands on one line, so that a difference between two files reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from memsize.analysis.verify.alignment import align
from memsize.errors import InputError
from memsize.records.codec import coder, plain
from memsize.records.measurement import AllocationLog, Measurement, Peaks, SoftwareStack
from memsize.records.verification import AllocationDifference, Prediction, VerifiedRun

SCHEMA: Final = "memsize.truth/1"
FOLDER: Final = Path(__file__).resolve().parents[2] / "tests" / "truth"
MOST_DIFFERENCES: Final = 12


@dataclass(frozen=True, slots=True)
class Said:
    """The prediction as it was when the workload was measured."""

    least: Peaks
    most: Peaks
    device: tuple[int, int]
    convolutional: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """The last step's allocations beside the predicted ones: counts, kinds of differences, the first of them.

    `digest` is that of the sizes in order, to tell whether two measurements saw the same.
    """

    predicted: int
    real: int
    matched: int
    differing: int
    at_peak: int
    digest: str
    first: tuple[AllocationDifference, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One workload of the suite, by name. Without a measurement, `failure` says what went wrong."""

    name: str
    benchmark: bool
    measurement: Measurement | None = None
    said: Said | None = None
    compared: Compared | None = None
    failure: str | None = None

    @property
    def key(self) -> tuple[str, bool]:
        """What tells it from the others of its file."""
        return self.name, self.benchmark


@dataclass(frozen=True, slots=True)
class Truth:
    """The outcomes on one GPU and stack, and the command that made them."""

    stack: SoftwareStack
    date: str
    command: str
    memsize: str
    outcomes: tuple[Outcome, ...] = ()

    def with_outcome(self, outcome: Outcome) -> Truth:
        """The same with one more outcome, in place of an earlier one of the same workload."""
        others = [outcome_before for outcome_before in self.outcomes if outcome_before.key != outcome.key]
        return replace(self, outcomes=(*others, outcome))

    @property
    def done(self) -> set[tuple[str, bool]]:
        """Workloads that need not be measured again."""
        return {outcome.key for outcome in self.outcomes if outcome.measurement is not None}


def outcome_of(name: str, checked: VerifiedRun) -> Outcome:
    """What is kept of a workload that was run."""
    seen, said = checked.measurement, checked.prediction
    return Outcome(
        name,
        seen.workload.benchmark,
        replace(seen, log=None),
        Said(said.least, said.most, (said.device.low, said.device.high), said.convolutional),
        None if seen.log is None else _compared(said, seen.log),
    )


def _compared(said: Prediction, log: AllocationLog) -> Compared:
    alignment = align(said.log, log)
    # What is alive at the peak is told first: it is what the peak is off by.
    ordered = sorted(alignment.differences, key=lambda difference: not difference.at_peak)
    sizes = ",".join(str(entry.delta) for entry in log.entries)
    return Compared(
        alignment.predicted,
        alignment.real,
        alignment.matched,
        len(alignment.differences),
        sum(difference.at_peak for difference in alignment.differences),
        hashlib.sha256(sizes.encode()).hexdigest()[:16],
        tuple(ordered[:MOST_DIFFERENCES]),
    )


def path_of(stack: SoftwareStack, folder: Path = FOLDER) -> Path:
    """Where the truth of a GPU and stack lies: ``nvidia-h100-80gb-hbm3-torch-2.11.json``."""
    release = re.match(r"\d+\.\d+", stack.torch)
    name = f"{stack.gpu}-torch-{release[0] if release else stack.torch}"
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')}.json"


def paths(folder: Path = FOLDER) -> list[Path]:
    """The files of measurements that there are."""
    return sorted(folder.glob("*.json"))


def write(truth: Truth, path: Path) -> None:
    """Write the file in one go: what a run that is cut off leaves behind is whole."""
    empty = json.dumps({"schema": SCHEMA, **plain(replace(truth, outcomes=()))})
    lines = ",\n".join(json.dumps(plain(outcome)) for outcome in truth.outcomes)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(f"{empty.removesuffix('[]}')}[\n{lines}\n]}}\n", encoding="utf-8")
    os.replace(unfinished, path)


def read(path: Path) -> Truth:
    """The truth in a file; raises `InputError` where it holds none of this version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA!r}, found {data.get('schema')!r}")
        truth: Truth = coder(Truth).read({name: value for name, value in data.items() if name != "schema"})
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path.name} holds no measured truth: {error}") from error
    return truth
