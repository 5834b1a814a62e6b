"""The command: predict the published rows, each with the releases it was measured with, and write the tables."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.published.environments import ENVIRONMENTS, UnbuiltError, ready
from benchmarks.published.rows import Row, read, rows, write
from benchmarks.published.shared import Gap
from benchmarks.published.table import keep, update
from memsize.records.gpu import Interval

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where a row could not be predicted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="rows or sources by name, as in 'opt-350m/*'"
    )
    parser.add_argument("--list", action="store_true", help="list the rows and end")
    parser.add_argument("--shared", action="store_true", help="predict the data sets that are not part of the project")
    parser.add_argument("--tables", action="store_true", help="only write the tables, from the stored predictions")
    options = parser.parse_args(arguments)
    chosen = rows(options.only or ["*"])
    if options.list or not chosen:
        print("\n".join(row.name for row in chosen) or "no row has such a name")
        return 0 if chosen else 2
    failed = 0
    if options.shared:
        keep(_shared_gaps())
    elif not options.tables:
        failed = _predict(chosen)
    for path in update(ROOT):
        print(f"Wrote {path.relative_to(ROOT)}")
    return 1 if failed else 0


def _predict(chosen: Sequence[Row]) -> int:
    """Predict the rows and store what was said after each environment; the number of rows that could not be."""
    stored, failed = read(), 0
    by_environment = sorted(chosen, key=lambda row: row.source.environment or "")
    for name, group in groupby(by_environment, key=lambda row: row.source.environment):
        wanted = {row.name: row for row in group}
        try:
            for answer in _printed(filter(None, [name]), "benchmarks.published.worker", list(wanted)):
                row = wanted[answer["row"]]
                if "error" in answer:
                    failed += 1
                    print(f"{row.name}: {answer['error']}", file=sys.stderr)
                    continue
                predicted, least, most = answer["predicted"]
                stored[row.name] = (predicted, Interval(least, most))
                print(f"{row.name}: {row.measured:,} measured, {predicted / row.measured - 1:+.2%}", flush=True)
        except UnbuiltError as error:
            failed += len(wanted)
            print(f"{error}\n  left out: {len(wanted)} rows, from {next(iter(wanted))!r} on", file=sys.stderr)
        write(stored)
    return failed


def _shared_gaps() -> list[Gap]:
    """The errors of the shared data sets' rows, each set with the releases that it needs."""
    sets = {"a100_mlp.csv": "", "gpumemnet_cnn.csv": "cudnn-9.1", "xmem_sample.csv": "transformers-4.50.3 cudnn-9.1"}
    module = "benchmarks.published.shared"
    return [Gap(**gap) for name, needed in sets.items() for gap in _printed(needed.split(), module, [name])]


def _printed(environments: Iterable[str], module: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The lines of JSON that a module prints, run with the releases of some environments."""
    folders = [str(ready(ENVIRONMENTS[name])) for name in environments]
    paths = os.pathsep.join([*folders, str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
