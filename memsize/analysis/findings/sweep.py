"""Rules about a sweep: what fits where, what needs most, which card is enough, and what could not be run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from memsize.records.finding import Finding, Rules, sizes
from memsize.records.roles import noun
from memsize.records.sweep import SweepRow, phrase_of, varying
from memsize.units import Bytes

Rows = Sequence[SweepRow]
RULES = Rules[Rows]()


@RULES.rule("sweep-fits")
def _what_fits(rows: Rows) -> Iterator[Finding]:
    cards: dict[str, dict[int, list[SweepRow]]] = {}
    for row in sorted(_ran(rows), key=lambda row: (row.gpu_bytes or 0, row.gpus)):
        cards.setdefault(str(row.settings["gpu"]), {}).setdefault(row.gpus, []).append(row)
    if not cards:
        return
    is_spread = any(max(counts) > 1 for counts in cards.values())
    parts: list[str] = []
    values: dict[str, object] = {}
    for number, (card, counts) in enumerate(cards.items()):
        values[f"gpu{number}"] = card
        fitting: list[str] = []
        for (fit, every), alike in groupby(counts.items(), _fitting):
            on = _gpus(*(gpus for gpus, _ in alike)) if is_spread else ""
            key = f"{number}_{len(fitting)}" if is_spread else str(number)
            values |= {f"fit{key}": fit, f"all{key}": every}
            fitting.append(f"{{fit{key}}} of {{all{key}}}{on}")
        parts.append(f"on {{gpu{number}}} {', '.join(fitting)}" if is_spread else f"{fitting[0]} on {{gpu{number}}}")
    text = f"These cells fit: {('; ' if is_spread else ', ').join(parts)}."
    yield Finding("sweep-fits", text, values, brief=text)


def _fitting(cells: tuple[int, Rows]) -> tuple[int, int]:
    return sum(row.outcome == "fits" for row in cells[1]), len(cells[1])


def _gpus(first: int, *others: int) -> str:
    if others:
        return f" each with {first:,} {'and' if len(others) == 1 else 'to'} {others[-1]:,} GPUs"
    return " with 1 GPU" if first == 1 else f" with {first:,} GPUs"


@RULES.rule("sweep-smallest-card", "sweep-no-card")
def _the_smallest_card(rows: Rows) -> Iterator[Finding]:
    ran = sorted(_ran(rows), key=lambda row: (row.gpu_bytes or 0) * row.gpus)
    # By card, and by how many such cards where trainings are spread: the least memory first.
    every: dict[str, list[SweepRow]] = {}
    for row in ran:
        every.setdefault(row.place, []).append(row)
    questions = set(map(_question, ran))
    cards = {name: cells for name, cells in every.items() if set(map(_question, cells)) == questions}
    if len(every) < 2 or not cards:
        return
    enough = next((name for name, cells in cards.items() if all(row.outcome == "fits" for row in cells)), None)
    if enough is None:
        text = "No GPU fits every cell."
        yield Finding("sweep-no-card", text, brief=text)
    else:
        several = any(row.gpus > 1 for row in rows)
        text = (
            "The fewest GPUs that fit every cell are {gpu}."
            if several
            else "The smallest GPU that fits every cell is {gpu}."
        )
        yield Finding("sweep-smallest-card", text, {"gpu": enough}, brief=text)


@RULES.rule("sweep-largest")
def _what_needs_most(rows: Rows) -> Iterator[Finding]:
    ran = _ran(rows)
    if len(ran) < 2:
        return
    row = max(ran, key=lambda cell: cell.reserved or 0)
    role = max(row.roles, key=lambda cell: row.roles[cell])
    values: dict[str, object] = {"cell": phrase_of(row.settings, varying(cell.settings for cell in rows))}
    values |= sizes(reserved=row.reserved) | {"role": noun(role), "part": Bytes(row.roles[role]), "phase": row.phase}
    text = "The highest peak is that of {cell}: {reserved} reserved, {part} of it {role}, in {phase}."
    yield Finding("sweep-largest", text, values, bytes=row.reserved, brief=text)


@RULES.rule("sweep-failed")
def _what_failed(rows: Rows) -> Iterator[Finding]:
    reasons: dict[str, list[SweepRow]] = {}
    for row in rows:
        if row.outcome == "failed":
            reasons.setdefault(row.reason or "", []).append(row)
    for number, (reason, cells) in enumerate(sorted(reasons.items(), key=lambda item: -len(item[1]))):
        targets = tuple(dict.fromkeys(row.settings["target"] for row in cells))
        failed = "1 cell" if len(cells) == 1 else f"{len(cells):,} cells"
        text = "{failed} could not be run ({targets}): {reason}" + ("" if reason.endswith("?") else ".")
        values = {"failed": failed, "targets": targets, "reason": reason}
        yield Finding("sweep-failed", text, values, brief=text if number == 0 else "")


def _question(row: SweepRow) -> frozenset[tuple[str, str]]:
    settings = {key: str(value) for key, value in row.settings.items() if key != "gpu"}
    strategy = ",".join(part.partition("=")[0] for part in settings.get("parallel", "").split(","))
    return frozenset((settings | {"parallel": strategy}).items())


def _ran(rows: Rows) -> list[SweepRow]:
    return [row for row in rows if row.outcome != "failed"]
