"""Rules about serving: how many requests a card serves at once, what is missing, and what takes the most."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.records.finding import Finding, Rules
from memsize.records.fit import Remedied
from memsize.records.gpu import Card
from memsize.records.serving import ServingRow
from memsize.spec.serving import Serving
from memsize.units import Bytes

Evidence = tuple[tuple[ServingRow, ...], Serving, Card, int, Remedied | None]
"""The rows, how the model is served (its context given), the card, what the server may take of it, and what would make
room for a request where there is none.
"""

RULES = Rules[Evidence]()


@RULES.rule("serves", "serves-none")
def what_is_served(evidence: Evidence) -> Iterator[Finding]:
    """The memory that the first scenario leaves for the cache."""
    rows, serving, card, budget, _ = evidence
    row = next(row for row in rows if row.reason is None)
    cards = card.name if serving.tensor_parallel_size == 1 else f"each of {serving.tensor_parallel_size} {card.name}"
    values: dict[str, object] = {"scenario": row.scenario, "card": cards, "budget": Bytes(budget)}
    if row.paged is None:
        taken = row.weights + row.profile + row.non_torch.low
        values |= {"short": Bytes(row.shortage), "weights": Bytes(row.weights), "rest": Bytes(taken - row.weights)}
        text = (
            "Under {scenario} nothing is left for the KV cache: the server may take {budget} of {card}, {short} less "
            "than it needs (weights {weights}, a step and what is outside PyTorch {rest})."
        )
        yield Finding("serves-none", text, values, bytes=row.shortage, brief=text)
        return
    paged = row.paged
    values |= {
        "cache": Bytes(paged.available.low),
        "tokens": paged.tokens.low,
        "most": paged.tokens.high,
        "requests": paged.concurrency.texts()[0],
        "context": serving.max_model_len,
    }
    text = (
        "Under {scenario}, {card} keeps at least {cache} for the KV cache: {tokens} to {most} tokens, or {requests} "
        "requests of {context} tokens at once."
    )
    brief = "Under {scenario} the KV cache holds {tokens} to {most} tokens: {requests} requests of {context} at once."
    yield Finding("serves", text, values, bytes=paged.available.low, brief=brief)


@RULES.rule("request-too-long")
def what_is_too_long(evidence: Evidence) -> Iterator[Finding]:
    """A request of the whole context that the cache does not hold: a server refuses to start."""
    rows, serving, _, _, _ = evidence
    row = next((row for row in rows if row.paged and row.paged.concurrency.low < 1), None)
    if row is None or row.paged is None:
        return
    paged = row.paged
    missing = (paged.request_blocks - paged.blocks.low) * paged.block_bytes
    values = {"scenario": row.scenario, "context": serving.max_model_len, "missing": Bytes(missing)}
    text = (
        "Under {scenario} one request of {context} tokens may not fit the cache, by {missing}: vLLM does not start "
        "then, but for a lower max_model_len."
    )
    yield Finding("request-too-long", text, values, bytes=missing, brief=text)


@RULES.rule("serves-with")
def what_makes_room(evidence: Evidence) -> Iterator[Finding]:
    """The remedies of which each is enough to serve one request, if there is no room for it."""
    remedied = evidence[-1]
    if remedied is None:
        return
    enough = [row.name for row in remedied.rows if row.outcome == "fits"]
    values: dict[str, object] = {"context": remedied.size, "peak": Bytes(remedied.peak), "names": ", ".join(enough)}
    text = "One request of {context} tokens needs {peak} with the server; "
    text += "there is room with any one of: {names}." if enough else "nothing that was tried makes room by itself."
    yield Finding("serves-with", text, values, bytes=remedied.peak, brief=text)


@RULES.rule("serves-more")
def what_serves_more(evidence: Evidence) -> Iterator[Finding]:
    """The scenario whose cache holds the most tokens, beside the first."""
    rows = [row for row in evidence[0] if row.reason is None]
    first, best = rows[0], max(rows, key=_tokens)
    if best is first or best.paged is None:
        return
    before = _tokens(first)
    values = {"scenario": best.scenario, "tokens": best.paged.tokens.low, "first": first.scenario, "before": before}
    text = "Under {scenario} the cache holds {tokens} tokens at least; under {first} {before}."
    yield Finding("serves-more", text, values, bytes=best.paged.available.low, brief=text)


@RULES.rule("step-transient")
def what_a_step_takes(evidence: Evidence) -> Iterator[Finding]:
    """The memory kept free for the largest step, if it is a twentieth of the cache or more."""
    rows, serving, _, _, _ = evidence
    row = next(row for row in rows if row.reason is None)
    if row.paged is not None and row.profile * 20 < row.paged.available.low:
        return
    text = (
        "{profile} stay free for the largest step, of {tokens} tokens and the logits of {seqs} sequences: fewer of "
        "either leave more for the cache."
    )
    values = {"profile": Bytes(row.profile), "tokens": serving.max_num_batched_tokens, "seqs": serving.rows}
    yield Finding("step-transient", text, values, bytes=row.profile)


def _tokens(row: ServingRow) -> int:
    return row.paged.tokens.low if row.paged else 0
