"""What differs in logs of allocations that `python -m benchmarks.gpu_truth --logs` kept, beside today's prediction.

    python -m benchmarks.truth.explain LOGS.jsonl.gz [PATTERN …]

No GPU is needed: a rule that is changed shows at once which operations it brings nearer.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.truth.suite import SUITE
from memsize.analysis.verify.verification import verify_measurements
from memsize.records.codec import coder
from memsize.records.measurement import Measurement
from memsize.records.verification import AllocationDifference
from memsize.render import render


def logs(path: Path) -> Iterator[tuple[str, list[Measurement]]]:
    """The workloads of a file with their measurements, logs and all."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            data = json.loads(line)
            yield data["name"], [coder(Measurement).read(measurement) for measurement in data["measurements"]]


def summary(differences: Sequence[AllocationDifference]) -> list[str]:
    """How often each operation differs, and by how many bytes in all: the largest first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for difference in differences:
        key = (difference.kind, difference.place.phase, difference.place.op)
        counts[key] += 1
        sizes[key] += abs(difference.bytes)
    ordered = sorted(counts, key=lambda key: -sizes[key])
    return [
        f"  {kind:15} {phase:10} {op:40} {counts[kind, phase, op]:5} × {sizes[kind, phase, op]:16,} B"
        for kind, phase, op in ordered
    ]


def main(arguments: Sequence[str]) -> None:
    file, *patterns = arguments
    for name, saved in logs(Path(file)):
        if patterns and not any(fnmatch(name, pattern) for pattern in patterns):
            continue
        verification = verify_measurements(SUITE[name].case, saved)
        print(render(verification, "text", width=None if patterns else 160))
        if verification.alignment is not None:
            print("\n".join(summary(verification.alignment.differences)), "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
