"""A fit as a document: the largest sizes, by GPU where there are several, the remedies, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from memsize.analysis.fit.search import LIMIT
from memsize.documents import Document, findings_data, plain, values_of
from memsize.documents.sections import (
    Bar,
    Bars,
    Curve,
    Limit,
    Line,
    Part,
    Phrase,
    Remark,
    ScenarioView,
    Section,
    Strip,
    Table,
    Title,
)
from memsize.documents.shared import compared_collectives, listed, said_once, versions
from memsize.errors import first_line
from memsize.records.aggregates import traffic
from memsize.records.fields import SCENARIO, Cell, Column, Label, Missing
from memsize.records.finding import join_names, optimizer_in_words
from memsize.records.fit import FIT_FIELDS, REMEDY_FIELDS, Fit, FitRow, Remedied, gpus_in_words
from memsize.records.world import Traffic
from memsize.spec.vary import CONTEXT, UNITS

SCHEMA: Final = "memsize.fit/1"


class FitDocument(Document[Fit]):
    def sections(self) -> tuple[Section, ...]:
        fit = self.answer
        several, is_frontier = len(fit.budgets) > 1, any(row.batch is not None for row in fit.fit_rows)
        size = Column("size", fit.vary, "count", 98, "the size of the run")
        names = ("scenario", "gpu") if several else ("scenario",)
        collectives = (
            (
                (Label(row.scenario, hint=row.title), *((row.gpu,) if several else ()), row.size or row.next_size),
                _traffic(fit, row),
            )
            for row in fit.fit_rows
        )
        step = UNITS.get(fit.vary, "step")
        answer = f"largest {fit.vary}" if fit.asked is None else f"{fit.vary} {fit.asked:,}"
        fields = fit.row_fields.titled(size=answer, per_step=f"per {step}").drawn(size=_answer)
        if len(fit.budgets) == 1:
            fields = fields.without("gpu")
        if all(row.next_size is None for row in fit.fit_rows):
            fields = fields.without("next_size", "next_peak", "per_step")
        rows, where = sorted(fit.fit_rows, key=lambda row: row.status == "unavailable"), ("bind", "phase", "layer")
        remedied = fit.remedied
        about = f"{remedied.scenario} at {fit.vary} {remedied.size:,} on {remedied.gpu}" if remedied else ""
        return (
            fit_title(fit),
            *self.opening(),
            *([overview_table(fit)] if several and not is_frontier else []),
            Table.of("fit", "Fit", fields, rows, fit, remarks=said_once(_remarks(fit))).without_empty(*where),
            *compared_collectives((*FIT_FIELDS.only(*names), size), collectives),
            *remedy_tables(remedied, about),
            *self.reasons(),
            *listed("Notes", fit.notes),
        )

    def main_table(self) -> str:
        return "remedies" if self.answer.remedied else super().main_table()

    def bars(self) -> Bars:
        """The largest sizes; of a size that is asked about the bytes that it needs, beside the only budget's."""
        fit = self.answer
        if fit.asked is None:
            return size_bars(fit)
        rows = [(_bar_label(fit, row), {"peak": row.peak}) for row in fit.fit_rows if row.peak]
        bars = Bars.of(f"{fit.vary} {fit.asked:,} needs", [Part("peak", "needs", "activation")], rows)
        budget = fit.budgets[0]
        return bars if len(fit.budgets) > 1 else replace(bars, limit=Limit(budget.name, budget.allocator))

    def scenes(self) -> tuple[ScenarioView, ...]:
        curve = curve_of(self.answer)
        if curve is None:
            return ()
        (table,) = (part for part in self.sections() if isinstance(part, Table) and part.name == "fit")
        return (ScenarioView("fit", f"memory by {self.answer.vary}", lambda: (curve, table)),)

    def versions(self) -> tuple[Phrase, ...]:
        return versions(self.answer.traces.values(), (budget.card for budget in self.answer.budgets))

    def figures(self, unit: str) -> dict[str, Any]:
        fit = self.answer
        rows = []
        for record, row in zip(fit.tables()["rows"].records(), fit.fit_rows, strict=True):
            most = row.bind.largest if row.bind else None
            extra = {
                "roles": row.bind.roles if row.bind else None,
                "largest": most and {"tensors": most.tensors, **plain(most.spec), "bytes": most.bytes},
                "looked": row.looked,
                "step": row.step,
                "refused": dict(row.refused),
                "collectives": plain(_traffic(fit, row)),
            }
            rows.append(record | extra)
        return {
            "schema": SCHEMA,
            "model": fit.model,
            "inputs": plain(fit.inputs),
            "vary": fit.vary,
            "asked": fit.asked,
            "optimizer": fit.optimizer or None,
            "generation": fit.generation or None,
            "stack": fit.stack or None,
            "budgets": [
                values_of(budget, "name", "device", "context", "margin", "beside", "fraction", "allocator")
                | {"parallel": budget.parallel or None, "gpus": budget.gpus}
                for budget in fit.budgets
            ],
            "rows": rows,
            "peak": fit.peak and values_of(fit.peak, "requested", "allocated", "reserved", "device"),
            "remedies": plain(fit.remedied),
            "findings": findings_data(fit.findings, unit),
            **values_of(fit, "notes", "runs", "missing"),
        }


def _traffic(fit: Fit, row: FitRow) -> tuple[Traffic, ...]:
    """The collectives in a step at the row's answer, or at the next size without one; empty if that was not run."""
    trace = fit.trace_of(row)
    return traffic(trace) if trace else ()


def fit_title(fit: Fit) -> Title:
    """The model, the question, how the model is run, and the GPUs."""
    question = f"largest {fit.vary} that fits" if fit.asked is None else f"does {fit.vary} {fit.asked:,} fit?"
    how = f"training with {optimizer_in_words(fit.optimizer)}" if fit.optimizer else "inference"
    if fit.generation and not fit.optimizer:
        prompt = "" if fit.vary == CONTEXT else f" after {fit.generation['prompt']:,} of a prompt"
        how = f"generating {fit.generation['new']:,} tokens{prompt}"
    kinds = tuple(dict.fromkeys(budget.strategy for budget in fit.budgets if budget.parallel))
    how += f", by {join_names(kinds)}" if len(kinds) > 1 else f" and {kinds[0]}" if kinds else ""
    where = join_names(gpus_in_words(fit.budgets))
    stack = f" with {fit.stack}" if fit.stack else ""
    return Title(fit.model, ((question,), (how,), (f"on {where}{stack}",), *_strip(fit)))


def _strip(fit: Fit) -> Iterator[Phrase]:
    """The peak of the first answer in all ways to count, unless the size that was asked about does not fit under the
    first scenario, which the verdict is about.
    """
    row, peak = fit.first_answer, fit.peak
    ran = [row for row in fit.fit_rows if row.status != "unavailable"]
    is_other = fit.asked is not None and len(fit.budgets) == 1 and row is not next(iter(ran), None)
    if row is not None and peak is not None and not is_other:
        scenario = row.name if len({row.name for row in fit.fit_rows}) > 1 else ""
        of = f"{scenario} on {row.gpu}, ".lstrip() if len(fit.budgets) > 1 else scenario and f"{scenario}, "
        total = next(budget.device for budget in fit.budgets if budget.name == row.gpu)
        memory = Strip.of_peak(peak.requested, peak.allocated, peak.reserved, peak.device, total)
        yield (f"{of}{fit.vary} {row.size:,}:", memory)


def overview_table(fit: Fit) -> Table:
    """Scenarios down, GPUs across; if the number of GPUs varies, strategies and numbers down, and cards across."""
    cells: dict[tuple[str, str | None], Cell] = {(row.scenario, row.gpu): _answer(row, fit) for row in fit.fit_rows}
    by_number = len({budget.gpus for budget in fit.budgets}) > 1
    keys = {budget.name: (budget.strategy, budget.gpus) if by_number else () for budget in fit.budgets}
    names = {(keys[budget.name], budget.one if by_number else budget.name): budget.name for budget in fit.budgets}
    across = dict.fromkeys(across for _, across in names)
    columns: list[Column] = [SCENARIO]
    if by_number:
        columns.append(Column("strategy", "strategy", "text", 99, "how its training is spread"))
        columns.append(Column("gpus", "GPUs", "count", 98, "on how many"))
    on = "on so many" if by_number else "on"
    columns += [Column(name, name, "count", 90, f"{on} {name}") for name in across]
    unknown = Missing("not run before it was interrupted" if fit.missing else "larger or smaller than needed")
    rows = tuple(
        (
            Label(scenario, hint=title),
            *key,
            *(cells.get((scenario, names.get((key, name))), unknown) for name in across),
        )
        for scenario, title in {row.scenario: row.title for row in fit.fit_rows}.items()
        for key in dict.fromkeys(keys.values())
    )
    caption = f"Largest {fit.vary}" if fit.asked is None else f"Whether {fit.vary} {fit.asked:,} fits"
    table = Table("overview", "Overview", tuple(columns), rows, caption=caption)
    return table if not by_number or len({budget.strategy for budget in fit.budgets}) > 1 else table.without("strategy")


def curve_of(fit: Fit) -> Curve | None:
    """Memory by size for the scenarios on the first GPU; None where no two sizes of one ran."""
    first, *others = fit.budgets
    lines: list[Line] = []
    for row in fit.fit_rows:
        if row.gpu != first.name or row.batch is not None or len(row.points) < 2:
            continue
        # A scenario that needs just as much as one before it shares its line, which may have more sizes.
        same = next((n for n, line in enumerate(lines) if {*row.points} <= {*line.points}), None)
        if same is None:
            answer = (row.size, row.peak) if row.size and row.peak else None
            lines.append(Line((row.scenario,), row.points, answer))
        else:
            lines[same] = lines[same]._replace(names=(*lines[same].names, row.scenario))
    if not lines:
        return None
    limits = (Limit(budget.name, budget.allocator) for budget in (first, *(b for b in others if b.runs_as(first))))
    return Curve(f"Memory by {fit.vary}", fit.vary, tuple(lines), tuple(limits))


def size_bars(fit: Fit) -> Bars:
    """The largest size of each scenario on each GPU, where memory sets it."""
    part = Part("size", f"largest {fit.vary}", "parameter")
    alike: dict[int, list[FitRow]] = {}
    for row in fit.fit_rows:
        if row.size and (row.status in ("found", "open", "refused") or row.batch is not None):
            alike.setdefault(row.size, []).append(row)
    bars = (Bar(tuple(_bar_labels(fit, rows)), (size,)) for size, rows in alike.items())
    return Bars(part.title, (part,), tuple(bars), kind="count")


def _bar_labels(fit: Fit, rows: Sequence[FitRow]) -> Iterator[Label]:
    """A label for each row; one for numbers of GPUs that follow each other."""
    position = {budget.name: number for number, budget in enumerate(fit.budgets)}
    runs: list[list[FitRow]] = []
    for row in rows:
        last = runs[-1][-1] if runs else row
        one, other = (fit.budgets[position[entry.gpu]] for entry in (last, row))
        follows = position[row.gpu] == position[last.gpu] + 1 and (one.strategy, one.one) == (other.strategy, other.one)
        if follows and other.parallel and row.name == last.name:
            runs[-1].append(row)
        else:
            runs.append([row])
    several = len({budget.strategy for budget in fit.budgets}) > 1
    for run in runs:
        if len(run) == 1:
            yield _bar_label(fit, run[0])
            continue
        budgets = [fit.budgets[position[row.gpu]] for row in run]
        how = f" ({budgets[0].strategy})" if several else ""
        yield Label(f"{run[0].name} on {gpus_in_words(budgets)[0]}{how}", hint=run[0].title)


def _bar_label(fit: Fit, row: FitRow) -> Label:
    return Label(row.name if len(fit.budgets) == 1 else f"{row.name} on {row.gpu}", hint=row.title)


_ANSWERS: Final = {"fits": "fits", "exceeds": "too large", "none": "none", "constant": "any"}


def _answer(row: FitRow, fit: Fit) -> Cell:
    if row.status == "unavailable":
        return Missing(row.reason or row.status)
    if row.status == "endless" and _is_whole(fit, row):
        return f"all {row.size:,}"
    if row.status in ("open", "endless"):
        return f"≥ {row.size or 0:,}"
    return _ANSWERS.get(row.status, row.size)


def _is_whole(fit: Fit, row: FitRow) -> bool:
    """Whether the answer is the longest context that the model has positions for."""
    return fit.vary == CONTEXT and row.size != LIMIT


def _remarks(fit: Fit) -> Iterator[Remark]:
    for row in fit.fit_rows:
        text = ""
        match row.status:
            case "unavailable":
                text = first_line(row.reason or "")
            case "refused":
                text = f"the model refuses {fit.vary} {row.next_size:,}: {first_line(row.reason or '')}"
            case "constant":
                text = f"only the input grows with the {fit.vary}"
            case "open":
                does = "is refused by the model" if row.next_size in row.refused else "does not"
                between = f"{fit.vary} {row.next_size or 0:,} {does}; sizes in between"
                beyond = between if row.next_size else "larger sizes"
                text = f"{fit.vary} {row.size:,} fits; {beyond} were not run"
            case "endless" if _is_whole(fit, row):
                text = "the model's longest context fits"
            case "endless":
                text = f"the largest {fit.vary} that was tried fits"
        if text:
            yield Remark(row.scenario, row.status, text)


def remedy_tables(remedied: Remedied | None, about: str) -> tuple[Table, ...]:
    """The remedies `about` a run, if any were tried: those that fit first, those that change what the model learns
    behind others. Remarks say why the rest cannot be.
    """
    if remedied is None:
        return ()
    fields = REMEDY_FIELDS.only("name", "outcome", "peak", "saved", "recomputed", "cost")
    ran = [row for row in remedied.rows if row.outcome != "not here"]
    ran.sort(key=lambda row: (("fits", "saves", "no help").index(row.outcome), row.changes == "training"))
    names: dict[str, list[str]] = {}
    for row in remedied.rows:
        if row.outcome == "not here":
            names.setdefault(first_line(row.reason or ""), []).append(row.name)
    remarks = tuple(Remark(", ".join(those), "not applicable", reason) for reason, those in names.items())
    caption = f"Remedies for {about}, each run by itself"
    table = Table.of("remedies", "What would make it fit", fields, ran, caption=caption, remarks=remarks)
    return (table.without_empty("recomputed"),)
