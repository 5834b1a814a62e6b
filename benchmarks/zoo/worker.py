"""`python -m benchmarks.zoo.worker MEMORY`: cases come in, one JSON line each, and the parts of their outcomes go out.

A case ends with a line of null. MEMORY is the most bytes of data that the process may hold, 0 for no limit.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from benchmarks.zoo.case import Case


def main(memory: int) -> None:
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    # What libraries print is not ours: it goes where errors go.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    from benchmarks.zoo.trial import parts

    for line in sys.stdin:
        for part in parts(Case(**json.loads(line))):
            print(json.dumps(part), file=answers)
        print(json.dumps(None), file=answers)


if __name__ == "__main__":
    main(int(sys.argv[1]))
