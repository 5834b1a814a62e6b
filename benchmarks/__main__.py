"""`python -m benchmarks [NAME …] [--quick]`: every benchmark, or those named, as one table of medians."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version

from tabulate import tabulate

from benchmarks.measure import Line
from benchmarks.zoo.operators import declare

NAMES = ("startup", "resnet", "llama", "step", "fit", "commands", "replay")
PEERS = ("torch", "torchinfo", "torchsummary", "transformers")
Lines = Callable[[bool], Iterator[Line]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="one small round of each, to see that they run")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    declare()  # transformers imports torchvision where that is installed
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {_versions()}, load {_load()}\n")
    print(table([line for name in chosen.names or NAMES for line in _lines(name)(chosen.quick)]))


def table(lines: Iterable[Line]) -> str:
    """The lines under their titles, ready to print."""
    titles = ("what", "memsize", "beside", "takes", "ratio", "at most", "met")
    rows = [
        (line.what, line.ours, line.peer, line.theirs, _ratio(line.ratio), _ratio(line.target), line.verdict)
        for line in lines
    ]
    return tabulate(rows, titles, "simple", disable_numparse=True, colalign=("left", "right", "left", *["right"] * 4))


def _lines(name: str) -> Lines:
    contents: Lines = import_module(f"benchmarks.{name}").lines
    return contents


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} ×"


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in PEERS)


def _load() -> str:
    """What else the machine does: figures taken under load are worth little."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


if __name__ == "__main__":
    main()
