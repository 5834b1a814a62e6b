"""Rules about what fits: what limits it, what fits most, what was refused, what would be enough, the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final, NamedTuple

from memsize.analysis.findings.precision import SCORES_FROM, attention_findings, no_fused_kernel
from memsize.analysis.findings.training import activations_stay
from memsize.errors import first_line
from memsize.records.finding import Finding, Rules, layer_in_words, sizes
from memsize.records.fit import ANSWERED, Budget, FitRow, Remedied, Status, gpus_in_words
from memsize.records.roles import noun
from memsize.spec.vary import UNITS
from memsize.units import Bytes


class FitEvidence(NamedTuple):
    rows: tuple[FitRow, ...]
    budgets: tuple[Budget, ...]
    vary: str
    remedied: Remedied | None = None
    frontier: tuple[FitRow, ...] = ()
    """All rows, where `rows` are only those of the first batch."""
    smallest: bool = False
    """Whether the rows are those of the smallest card of all for each scenario."""

    @property
    def counts(self) -> bool:
        """Whether numbers of GPUs are compared."""
        return len({budget.gpus for budget in self.budgets}) > 1

    @property
    def fewest(self) -> dict[tuple[str, str], FitRow]:
        """For each scenario and card, the row of the fewest GPUs on which something fits, where numbers of them are
        compared; of several strategies on as many, that with the largest size.
        """
        budgets = {budget.name: budget for budget in self.budgets}
        rows: dict[tuple[str, str], FitRow] = {}
        answered = [row for row in self.rows if row.status in ANSWERED] if self.counts else []
        for row in sorted(answered, key=lambda row: (budgets[row.gpu].gpus, -(row.size or 0))):
            rows.setdefault((row.scenario, budgets[row.gpu].one), row)
        return rows

    @property
    def first(self) -> FitRow | None:
        """The first row that could be run; of several numbers of GPUs, that of the fewest on which it fits, if any."""
        scenarios = list(dict.fromkeys(row.scenario for row in self.rows))
        fewest = sorted(self.fewest.values(), key=lambda row: scenarios.index(row.scenario))
        ran = [row for row in self.rows if row.status != "unavailable"]
        most = max((budget.gpus for budget in self.budgets), default=1)
        largest = {budget.name for budget in self.budgets if budget.gpus == most}
        return next(iter((*fewest, *(row for row in ran if row.gpu in largest), *ran)), None)


RULES = Rules[FitEvidence]()

_ANSWERS: Final[dict[Status, str]] = {
    "found": "Under {scenario}, the largest {vary} is {size}: it needs {peak} of {budget}; {next} needs {next_peak}",
    "open": "Under {scenario}, {vary} {size} fits and {vary} {next} does not; the sizes in between were not run",
    "refused": "Under {scenario}, {vary} {size} needs {peak} of {budget}; the model refuses {vary} {next}",
    "endless": "Under {scenario}, any {vary} fits: even {size} needs only {peak} of {budget}",
    "constant": "Under {scenario}, only the input grows with {vary}: {vary} {size} needs {peak} of {budget}",
    "none": "Under {scenario}, nothing fits: {vary} {next} needs {next_peak}, and PyTorch can use {budget}",
    "fits": "Under {scenario}, {vary} {size} fits: it needs {peak} of {budget} and leaves {beyond}",
    "exceeds": "Under {scenario}, {vary} {size} does not fit: it needs {peak}, {beyond} more than PyTorch can use",
}


_LARGEST: Final[tuple[Status, ...]] = ("found", "open", "refused", "constant")
"""Whose size is the largest that fits."""


@RULES.rule("fit-gpus")
def gpus_needed(evidence: FitEvidence) -> Iterator[Finding]:
    """The fewest GPUs on which a training fits, where several numbers of them were compared, for each card."""
    if not evidence.counts or evidence.smallest:
        return
    fewest = evidence.fewest
    cards = dict.fromkeys(budget.one for budget in evidence.budgets)
    ran = dict.fromkeys(row.scenario for row in evidence.rows if row.status != "unavailable")
    for scenario, card in product(ran, cards):
        row = fewest.get((scenario, card))
        (gpus,) = gpus_in_words(budget for budget in evidence.budgets if budget.one == card)
        answer = "it needs at least {gpu}, with {vary} {size} on each GPU" if row else "nothing fits on {gpus}"
        text = f"Under {{scenario}}, {answer}."
        values: dict[str, object] = {"scenario": scenario, "vary": evidence.vary, "gpus": gpus}
        values |= {"gpu": row.gpu, "size": row.size or 0} if row else {}
        yield Finding("fit-gpus", text, values, bytes=row.peak if row else None, brief=text)


def answer_in_words(row: FitRow, vary: str, *, several: bool) -> Finding:
    """Describe the result of a row that could be run, with its GPU if it is one of `several`."""
    values: dict[str, object] = {"scenario": row.name, "gpu": row.gpu, "vary": vary}
    values |= {"size": row.size or 0, "next": row.next_size or 0}
    values |= sizes(peak=row.peak, next_peak=row.next_peak, budget=row.budget, beyond=abs(row.headroom or 0))
    text = _ANSWERS[row.status]
    if row.status == "open" and row.next_size in row.refused:
        text = "Under {scenario}, {vary} {size} fits and the model refuses {next}; the sizes in between were not run"
    elif row.status == "open" and row.next_size is None:
        text = "Under {scenario}, {vary} {size} fits; larger ones were not run"
    if several:
        text = text.replace("Under {scenario}", "Under {scenario} on {gpu}", 1)
    return Finding(f"fit-{row.status}", text + ".", values, bytes=row.peak, brief=text + ".")


@RULES.rule(*(f"fit-{status}" for status in _ANSWERS))
def _what_fits(evidence: FitEvidence) -> Iterator[Finding]:
    row, remedied = evidence.first, evidence.remedied
    if row is None or evidence.smallest:
        return
    answer = answer_in_words(row, evidence.vary, several=len(evidence.budgets) > 1)
    is_about = remedied and (remedied.scenario, remedied.gpu) == (row.scenario, row.gpu)
    if is_about and remedied and (smaller := remedied.smaller) is not None:
        fits = " The largest {vary} that fits is {smaller}." if smaller.largest else " {vary} {smaller} fits."
        text, values = f"{answer.template}{fits}", {**answer.values, "smaller": smaller.size}
        answer = replace(answer, template=text, values=values, brief=text)
    yield answer


@RULES.rule("fit-smallest")
def smallest_cards(evidence: FitEvidence) -> Iterator[Finding]:
    """The smallest card of all for each scenario, or the fewest bytes that the largest one lacks."""
    for row in evidence.rows if evidence.smallest else ():
        if row.status not in ("fits", "exceeds"):
            continue
        fits = "the smallest GPU for {vary} {size} is {gpu}: it needs {peak} of {budget} and leaves {beyond}"
        exceeds = "no GPU fits {vary} {size}: it needs {peak}, and the largest, {gpu}, has {budget} for PyTorch"
        values = {"scenario": row.name, "gpu": row.gpu, "vary": evidence.vary, "size": row.size or 0}
        values |= sizes(peak=row.peak, budget=row.budget, beyond=abs(row.headroom or 0))
        text = f"Under {{scenario}}, {fits if row.status == 'fits' else exceeds}."
        yield Finding("fit-smallest", text, values, bytes=row.peak, brief=text)


@RULES.rule("fit-cards")
def what_fits_on_the_others(evidence: FitEvidence) -> Iterator[Finding]:
    """The results of the first scenario on the other cards, if several were compared."""
    first = evidence.first
    if first is None or evidence.fewest or evidence.smallest:
        return
    others = [row for row in evidence.rows if row.name == first.name and row.gpu != first.gpu]
    values: dict[str, object] = {"scenario": first.name, "vary": evidence.vary}
    for status, text in (
        ("fits", "It fits on {cards}."),
        ("exceeds", "It does not fit on {cards}."),
        ("none", "Nothing fits on {cards}."),
        ("endless", "Any {vary} fits on {cards}."),
    ):
        cards = tuple(row.gpu for row in others if row.status == status)
        if cards:
            yield Finding("fit-cards", text, values | {"cards": cards}, brief=text)
    largest = tuple(f"{row.size:,} on {row.gpu}" for row in others if row.size and row.status in _LARGEST)
    if largest:
        text = "The largest {vary} that fits is {sizes}."
        yield Finding("fit-cards", text, values | {"sizes": largest}, brief=text)


@RULES.rule("fit-frontier")
def _what_more_sequences_leave(evidence: FitEvidence) -> Iterator[Finding]:
    first = evidence.first
    if first is None or first.batch is None or not first.size:
        return
    rows = [row for row in evidence.frontier if (row.scenario, row.gpu) == (first.scenario, first.gpu) and row.size]
    least, most = rows[-1], max(rows, key=lambda row: (row.batch or 0) * (row.size or 0))
    values: dict[str, object] = {"batch": least.batch or 0, "context": least.size or 0}
    values |= {"best": most.batch or 0, "each": most.size or 0, "tokens": (most.batch or 0) * (most.size or 0)}
    text = (
        "{batch} sequences of {context} tokens fit; the most tokens in all, {tokens}, are {best} sequences of {each}."
    )
    yield Finding("fit-frontier", text, values, brief=text)


@RULES.rule("fit-binds")
def what_binds(evidence: FitEvidence) -> Iterator[Finding]:
    """The limit that stops the next size, or a requested size that does not fit."""
    row, vary = evidence.first, evidence.vary
    if row is None or row.bind is None or row.status not in ("found", "open", "none", "exceeds"):
        return
    bind = row.bind
    at = " at {layer}," if bind.layer else ", in {op}," if bind.op else ","
    adds = " Each additional {unit} adds {per_step} to the peak." if row.per_step else ""
    if adds and row.grows_in and (row.grows_in == "optimizer") != (bind.phase == "optimizer"):
        # Only one of the peak and the end of memory is in the optimizer.
        adds = " The peak is in {grows_in}; each additional {unit} adds {per_step} to it."
    most = ""
    values: dict[str, object] = {"phase": bind.phase, "layer": layer_in_words(bind.layer), "op": bind.op}
    alive = sum(bind.roles.values())
    free = row.budget - (alive - bind.request) if bind.request else 0
    values |= {"role": noun(bind.role)}
    values |= sizes(held=bind.roles[bind.role], alive=alive, free=free, request=bind.request, per_step=row.per_step)
    values |= {"grows_in": row.grows_in, "unit": UNITS.get(vary, vary)}
    if (largest := bind.largest) is not None:
        many = "{count} tensors of {spec} hold" if largest.tensors > 1 else "One tensor of {spec} holds"
        most = f" {many} {{together}}{': as wide as the logits' if largest.logits else ''}."
        values |= {"count": largest.tensors, "spec": str(largest.spec), "together": Bytes(largest.bytes)}
    in_pieces = ""
    if bind.request <= free and free * 10 > alive:
        in_pieces = (
            " {free} are free, but in pieces smaller than the {request} requested; expandable segments may help."
        )
    where = "Memory runs out in" if bind.request else "The peak is in"
    brief = f"{where} {{phase}}{at} with {{alive}} in use, {{held}} of it {{role}}."
    yield Finding(
        "fit-binds",
        f"{brief}{adds}{most}{in_pieces}",
        values,
        bytes=bind.roles[bind.role],
        layers=(bind.layer,) if bind.layer else (),
        brief=f"{brief}{adds}",
    )


@RULES.rule("fit-adapters")
def what_adapters_leave(evidence: FitEvidence) -> Iterator[Finding]:
    """Where activations limit the size, freezing more of the parameters would not help."""
    if (row := evidence.first) is not None and row.bind is not None:
        yield from activations_stay(row.bind.roles, row.bind.frozen, "fit-adapters")


@RULES.rule("fit-fixed-cost")
def _fixed_cost(evidence: FitEvidence) -> Iterator[Finding]:
    row = evidence.first
    if row is None or row.status != "none":
        return
    standing = sum(row.standing.values())
    fixed = max(row.fixed or 0, standing)
    if fixed > row.budget:
        besides = " ({total} with the temporaries of the {phase} phase)" if standing <= row.budget else ""
        total = fixed if besides else standing
        values: dict[str, object] = {"vary": evidence.vary, "roles": tuple(map(noun, row.standing))}
        values |= sizes(standing=standing, total=total) | {"phase": row.grows_in}
        values |= sizes(beyond=total - row.budget)
        text = f"No {{vary}} can fit: {{roles}} alone take {{standing}}{besides}, {{beyond}} more than PyTorch can use."
        yield Finding("fit-fixed-cost", text, values, bytes=total, brief=text)


@RULES.rule("fit-most")
def _most(evidence: FitEvidence) -> Iterator[Finding]:
    first = evidence.first
    if first is None:
        return
    here = [row for row in evidence.rows if row.gpu == first.gpu and row.status in ANSWERED and row.status != "fits"]
    best = max(here, key=lambda row: row.size or 0, default=first)
    size, least = best.size or 0, first.size or 0
    if size <= least:
        return
    ratio = f", {size / least:.1f} times that of {{first}}" if least else ""
    where = " on {gpu}" if len(evidence.budgets) > 1 else ""
    text = f"{{best}} allows the largest {{vary}}{where}: {{size}}{ratio}."
    values = {"best": best.scenario, "first": first.scenario, "gpu": best.gpu, "vary": evidence.vary, "size": size}
    yield Finding("fit-most", text, values, bytes=best.peak, brief=text)


@RULES.rule("unfused-attention")
def _attention(evidence: FitEvidence) -> Iterator[Finding]:
    budgets = {budget.name: budget.card for budget in evidence.budgets}
    sizes_by_reason: dict[str, dict[str, int]] = {}
    for row in evidence.rows:
        bind = row.bind
        if bind is not None and bind.scores > SCORES_FROM * sum(bind.roles.values()):
            reason = no_fused_kernel(budgets[row.gpu].capability, bind.score_dtypes)
            sizes_by_reason.setdefault(reason, {})[row.scenario] = bind.scores
    yield from attention_findings("at the limit", sizes_by_reason)


@RULES.rule("fit-refused")
def _refused(evidence: FitEvidence) -> Iterator[Finding]:
    row = evidence.first
    if row is None or not row.refused:
        return
    bound = row.next_size
    size = bound if bound is not None and bound in row.refused else next(iter(row.refused))
    rule = " Sizes that ran are multiples of {step}." if row.step > 1 else ""
    # The sizes that ran are the range that works, as far as is known.
    ran = " Sizes from {least} to {most} ran." if len(row.ran) > 1 else ""
    values = {"vary": evidence.vary, "size": size, "reason": first_line(row.refused[size]), "step": row.step}
    values |= {"least": min(row.ran, default=0), "most": max(row.ran, default=0)}
    yield Finding("fit-refused", f"The model refuses {{vary}} {{size}}: {{reason}}.{ran}{rule}", values)


@RULES.rule("remedy-enough", "least-recomputation", "remedy-combination", "remedy-none")
def _remedies(evidence: FitEvidence) -> Iterator[Finding]:
    return what_is_enough(evidence.remedied, evidence.vary)


def what_is_enough(remedied: Remedied | None, vary: str) -> Iterator[Finding]:
    """The remedies that are enough at a size that doesn't fit, of what is varied."""
    if remedied is None or remedied.peak <= remedied.budget:
        return
    order = ("nothing", "speed", "numbers", "training", "hardware")
    enough = sorted((row for row in remedied.rows if row.outcome == "fits"), key=lambda row: order.index(row.changes))
    alone = tuple(row.name for row in enough)
    values: dict[str, object] = {"vary": vary, "size": remedied.size, "scenario": remedied.scenario}
    if alone:
        text = "With {names}, {vary} {size} fits under {scenario}."
        if len(alone) > 1:
            text = "Any one of these makes {vary} {size} fit under {scenario}: {names}."
        yield Finding("remedy-enough", text, values | {"names": ", ".join(alone)}, brief=text)
    if recomputing := [row for row in enough if row.recomputed is not None]:
        least = min(recomputing, key=lambda row: (row.recomputed, row.saved))
        text = "The least recomputation that fits is {name}: no matrix product is computed again."
        if least.recomputed:
            text = "The least recomputation that fits is {name}: it computes {share} of the forward's products again."
        values |= {"name": least.name, "share": f"{least.recomputed:.0%}".replace("%", " %")}
        yield Finding("least-recomputation", text, values, bytes=least.peak, brief=text)
    if remedied.combination:
        *first, last = remedied.combination
        together = f"{', '.join(first)} and {last}" if first else last
        values |= {"together": together, "peak": Bytes(remedied.combined or 0)}
        so_far = "Each of these changes what the model learns"
        so_far = so_far if alone else "No single remedy makes {vary} {size} fit under {scenario}"
        text = f"{so_far}; {{together}} together bring it to {{peak}}."
        yield Finding("remedy-combination", text, values, bytes=remedied.combined, brief=text)
    elif not alone:
        text = "No remedy makes {vary} {size} fit, nor does any combination that was tried."
        yield Finding("remedy-none", text, values, brief=text)


@RULES.rule("budget")
def _budgets(evidence: FitEvidence) -> Iterator[Finding]:
    """The memory of each budget, and how much of it the allocator gets."""
    of_one: dict[tuple[object, ...], Budget] = {}
    # NCCL takes memory from the budget of one process of several, each with one GPU.
    nccl = any(budget.gpus > 1 and not budget.parallel.startswith("dp=") for budget in evidence.budgets)
    before = " before NCCL's buffers (--margin leaves room for them)" if nccl else ""
    for budget in evidence.budgets:  # several numbers of one card have one budget each, the same
        of_one.setdefault((budget.card, budget.device) if budget.parallel else (budget.name,), budget)
    for budget in of_one.values():
        per_gpu = "each " if budget.parallel else ""
        taken = ["the CUDA context may take {context}"] if budget.context else []
        taken += ["the allocator may take {fraction}"] if budget.fraction < 1 else []
        taken += ["the server beside it takes {beside}"] if budget.server else []
        taken += ["the margin is {margin}"] if budget.margin else []
        less = f"; {' and '.join(taken)}" if taken else ""
        values = {"allocator": Bytes(budget.allocator), "name": budget.one}
        values |= sizes(device=budget.device, context=budget.context, margin=budget.margin, beside=budget.beside)
        values |= sizes(fraction=int(budget.fraction * budget.device))
        text = f"The allocator gets {{allocator}}{before}: {per_gpu}{{name}} has {{device}}{less}."
        yield Finding("budget", text, values, bytes=budget.allocator)
