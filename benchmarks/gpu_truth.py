"""Measure the suite of workloads on this machine's GPU and write what memsize is held to.

    python -m benchmarks.gpu_truth --resume

writes tests/truth/GPU-torch-VERSION.json, a workload at a time: a run that is cut off can be resumed. It stops by
itself before its time limit. What fails is recorded with its error and does not end the run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.truth import worker
from benchmarks.truth.lanes import CUDA, LaneError, Lanes
from benchmarks.truth.outcomes import FOLDER, Outcome, Truth, path_of, read, write
from benchmarks.truth.suite import SUITE
from memsize import __version__
from memsize.errors import InputError
from memsize.records.measurement import SoftwareStack
from memsize.units import format_bytes

_FIRST = 180.0
"""Seconds that reading the GPU may take: the first process loads torch, from a disk that may be slow."""
_LEAST = 10.0
"""Seconds that must be left for another workload to be begun."""


@dataclass(frozen=True)
class Options:
    """What to measure, where to write it, and in which time. `logs` is a file for whole logs of allocations."""

    names: tuple[str, ...]
    folder: Path = FOLDER
    seconds: float = 540.0
    workload_seconds: float = 60.0
    resume: bool = False
    logs: Path | None = None
    command: str = ""
    memory: str = CUDA
    lanes: int = max(1, (os.cpu_count() or 2) * 3 // 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_truth", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="workloads by name, as in 'gpt2/*' (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="list the workloads and end")
    parser.add_argument("--resume", action="store_true", help="keep what the file has, and measure the rest")
    parser.add_argument("--time-limit", type=float, default=540, metavar="SECONDS", help="for all of it (default: 540)")
    parser.add_argument("--each", type=float, default=60, metavar="SECONDS", help="for one workload (default: 60)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the file goes (default: tests/truth)")
    parser.add_argument("--logs", type=Path, metavar="FILE.jsonl.gz", help="also append every whole log of allocations")
    chosen = parser.parse_args(arguments)
    names = tuple(
        name for name in SUITE if not chosen.patterns or any(fnmatch(name, pattern) for pattern in chosen.patterns)
    )
    if chosen.list or not names:
        print("\n".join(names) or "no workload has such a name")
        return 0 if names else 2
    command = shlex.join(["python", "-m", "benchmarks.gpu_truth", *(sys.argv[1:] if arguments is None else arguments)])
    options = Options(names, chosen.folder, chosen.time_limit, chosen.each, chosen.resume, chosen.logs, command)
    try:
        path = collect(options)
    except (LaneError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Wrote {path}")
    return 0


def collect(options: Options) -> Path:
    """Measure what is asked and return the file that holds it.

    Raises `LaneError` where there is no GPU, `InputError` where the file to be resumed is of another stack.
    """
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name:
        lanes, stack = Lanes(Path(name), options.memory).stack(min(_FIRST, options.seconds))
        where: SoftwareStack = worker.read(stack)
        path = path_of(where, options.folder)
        truth = _begun(options, where, path)
        wanted = [name for name in options.names if (name, False) not in truth.done or _once_more(name, truth)]
        report(f"{where.gpu}, torch {where.torch}: {len(wanted)} workloads to measure, children by {lanes.method}")
        predictions = _predicted(lanes, wanted, stack, (end - time.monotonic()) / 3, options.lanes)
        for outcome in _measured(options, lanes, wanted, predictions, truth, end):
            truth = truth.with_outcome(outcome)
            write(truth, path)
            report(_line(outcome))
    left = len(options.names) - len({key[0] for key in truth.done if key[0] in options.names})
    report(f"{left} workloads are left: run the same with --resume" if left else "every workload is measured")
    return path


def _begun(options: Options, stack: SoftwareStack, path: Path) -> Truth:
    fresh = Truth(stack, datetime.now(UTC).date().isoformat(), options.command, __version__)
    if not (options.resume and path.exists()):
        return fresh
    saved = read(path)
    if saved.stack != replace(stack, total=saved.stack.total):  # which is not the same to the byte on every such card
        raise InputError(f"{path.name} was measured on another stack: move it away, or leave out --resume")
    return saved


def _once_more(name: str, truth: Truth) -> bool:
    """Whether a workload that is measured still lacks its run with cuDNN's benchmark."""
    done = [outcome for outcome in truth.outcomes if outcome.name == name]
    convolutional = any(outcome.said is not None and outcome.said.convolutional for outcome in done)
    return convolutional and (name, True) not in truth.done


def _predicted(
    lanes: Lanes, names: Sequence[str], stack: Path, limit: float, count: int
) -> dict[str, Path | LaneError]:
    start = time.monotonic()
    predictions = dict(lanes.predictions(names, stack, limit, count))
    failed = {name: error for name, error in predictions.items() if isinstance(error, LaneError)}
    report(f"predicted in {time.monotonic() - start:.0f} s" + (f", {len(failed)} failed" if failed else ""))
    return predictions


def _measured(
    options: Options,
    lanes: Lanes,
    names: Sequence[str],
    predictions: dict[str, Path | LaneError],
    truth: Truth,
    end: float,
) -> Iterator[Outcome]:
    """The outcomes one after the other, those with cuDNN's benchmark last, until there is no time for another."""
    benchmarked = [name for name in names if _has(predictions[name], True)]
    for name, benchmark in [*((name, False) for name in names), *((name, True) for name in benchmarked)]:
        if (name, benchmark) in truth.done:
            continue
        left = end - time.monotonic()
        if left < _LEAST:
            return
        said = predictions[name]
        prediction = None if isinstance(said, LaneError) else said
        arguments = (options.memory, name, benchmark, prediction, options.logs)
        try:
            outcome: Outcome = worker.read(
                lanes.run(worker.write_outcome, arguments, min(options.workload_seconds, left))
            )
        except LaneError as error:
            outcome = Outcome(name, benchmark, failure=str(error))
        if isinstance(said, LaneError) and outcome.measurement is not None:
            outcome = Outcome(name, benchmark, outcome.measurement, failure=f"the prediction failed: {said}")
        yield outcome


def _has(prediction: Path | LaneError, benchmark: bool) -> bool:
    return not isinstance(prediction, LaneError) and benchmark in worker.read(prediction)


def _line(outcome: Outcome) -> str:
    """One workload in one line: predicted and measured, what differs, and how long it took."""
    name = f"{outcome.name}{' +benchmark' if outcome.benchmark else ''}"
    seen, said, compared = outcome.measurement, outcome.said, outcome.compared
    if seen is None or seen.error or seen.peaks is None or said is None:
        return f"{name:56} {outcome.failure or (seen and seen.error) or 'no figures'}"
    parts = []
    for figure in ("requested", "allocated", "reserved"):
        measured, low = getattr(seen.peaks, figure), getattr(said.least, figure)
        parts.append(f"{figure} {format_bytes(measured)} {(low - measured) / max(measured, 1):+.3%}")
    steps = f"{compared.differing} of {compared.real} differ" if compared else ""
    return f"{name:56} {'  '.join(parts)}  {steps}  {seen.seconds:.1f} s"


def report(text: str) -> None:
    """Tell the reader, at once: the run may be cut off."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
