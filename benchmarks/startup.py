"""The whole of `memsize report` on the toy CNN, from the shell, beside `import torch`, which it cannot do without."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measure import Line, compared, processes_in_turn

REPORT = ("-m", "memsize", "report", "notebooks/model.py:Test", "--input", "3,64,64")
IMPORT = ("-c", "import torch")
HELP = ("-m", "memsize", "--help")


def lines(quick: bool) -> Iterator[Line]:
    """One process of each kind after the other, the first round only to fill the file cache."""
    commands = (REPORT, IMPORT, HELP)
    if not quick:
        processes_in_turn(commands, 1)
    report, torch, help_ = processes_in_turn(commands, 1 if quick else 9)
    yield compared("report on the toy CNN, CPU of the whole process", report.cpu, "import torch", torch.cpu, 1.05)
    yield compared("memsize --help, CPU of the whole process", help_.cpu, "import torch", torch.cpu)
