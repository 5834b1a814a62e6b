"""The accuracy table of docs/accuracy.md: predictions compared with measurements, for every GPU and stack.

python -m benchmarks.truth.table
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.truth.figures import Figure, Replayed, figures, replayed
from benchmarks.truth.outcomes import Truth, paths, read

NOT_YET: Final = "not measured yet"
_COUNTED: Final = "underestimated"


Measured = tuple[Truth, Sequence[Replayed]]
"""A file of measurements, and its runs beside today's predictions."""


def table(files: Sequence[Measured]) -> str:
    """The targets and what is reached, as Markdown; without a measurement one sentence."""
    return "\n".join(_block(truth, rows) for truth, rows in files) if files else f"The suite is {NOT_YET}.\n"


def _block(truth: Truth, rows: Sequence[Replayed]) -> str:
    stack = truth.stack
    libraries = [("CUDA", stack.cuda), ("cuDNN", stack.cudnn), ("cuBLAS", stack.cublas), ("driver", stack.driver)]
    named = ", ".join(f"{name} {version}" for name, version in libraries if version)
    failed = len([outcome for outcome in truth.outcomes if outcome.measurement is None or outcome.measurement.error])
    measured = f"{len(rows)} runs" + (f", {failed} more failed" if failed else "")
    head = f"{stack.gpu}, torch {stack.torch}, {named}; measured on {truth.date}, {measured}."
    return f"{head}\n\n{_rows(figures(rows))}"


def _rows(rows: Sequence[Figure]) -> str:
    lines = ["| | workloads | to reach | memsize | MemTracker |", "| --- | ---: | ---: | ---: | ---: |"]
    for figure in rows:
        reached = NOT_YET if figure.value is None else _value(figure, figure.value)
        reached += "" if figure.value is None or figure.reached else " (missed)"
        peer = "–" if figure.value is None or figure.tracked is None else _value(figure, figure.tracked)
        sign = "≥" if figure.sense == "at least" else "≤"
        lines.append(f"| {figure.what} | {figure.count} | {sign} {_value(figure, figure.limit)} | {reached} | {peer} |")
    return "\n".join(lines) + "\n"


def _value(figure: Figure, value: float) -> str:
    return (
        f"{value:.0f}" if figure.what.startswith(_COUNTED) else f"{value:.2%}".replace(".00%", "%").replace("%", " %")
    )


def main() -> None:
    truths = [read(path) for path in paths()]
    print(table([(truth, replayed(truth)) for truth in truths]), end="")


if __name__ == "__main__":
    main()
