"""Rules about generation (what it takes, where the peak is, what the cache costs, what a step needs for a moment) and
about serving (how many requests a card serves at once, what is missing, what takes the most).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from memsize.analysis.findings.evidence import bytes_of, layers_of
from memsize.analysis.findings.fit import what_is_enough
from memsize.records.aggregates import stored_dtypes
from memsize.records.finding import Finding, Rules, sizes
from memsize.records.fit import Remedied
from memsize.records.generation import GenerationRow, decisive_row
from memsize.records.gpu import Card, GpuEstimate, Interval
from memsize.records.serving import ServingRow
from memsize.records.trace import Trace
from memsize.spec.generation import Draft, ServerArguments
from memsize.units import Bytes
from memsize.workloads.generation import OF_ASSISTANT


class Evidence(NamedTuple):
    """The rows of a generation that could be run, and what would make one fit that does not.

    `quantized` has a trace of each scenario that quantizes; only its stored tensors and layers are read.
    """

    rows: tuple[GenerationRow, ...]
    draft: Draft | None = None
    remedied: Remedied | None = None
    quantized: Mapping[str, Trace] = MappingProxyType({})


RULES = Rules[Evidence]()


@RULES.rule("generation-fits", "generation-exceeds")
def _what_fits(evidence: Evidence) -> Iterator[Finding]:
    row = decisive_row(evidence.rows)
    if row is None:
        return
    peak = _estimate(row)
    one = row.batch == 1
    values: dict[str, object] = {"scenario": row.scenario, "batch": row.batch}
    values |= {"sequences": "sequence" if row.batch == 1 else "sequences", "prompt": row.prompt, "new": row.new}
    values |= {"tokens": "token" if row.new == 1 else "tokens", "peak": Bytes(peak.reserved), "phase": peak.peak_phase}
    what = "Under {scenario}, {batch} {sequences} of {prompt} + {new} {tokens}"
    if (end := peak.shortage) is None:
        code, text = (
            "generation-fits",
            what + (" fits" if one else " fit") + ": {peak} reserved; the peak is in {phase}.",
        )
    else:
        values |= {"phase": end.phase} | sizes(request=end.request, free=end.free)
        does = " does" if one else " do"
        text = (
            what
            + does
            + " not fit: {phase} needs another {request} and {free} are free; the whole run would reserve {peak}."
        )
        code = "generation-exceeds"
    yield Finding(code, text, values, bytes=peak.reserved, brief=text)


@RULES.rule("remedy-enough", "remedy-combination", "remedy-none")
def _what_would_make_it_fit(evidence: Evidence) -> Iterator[Finding]:
    return what_is_enough(evidence.remedied, "batch")


@RULES.rule("quantization-leaves-most")
def _what_stays_unquantized(evidence: Evidence) -> Iterator[Finding]:
    return _left_as_they_are(evidence.quantized)


def _left_as_they_are(quantized: Mapping[str, Trace]) -> Iterator[Finding]:
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for finding in _left_by_scenario(quantized):
        values = finding.values
        alike.setdefault((values["size"], values["kind"], values["most"]), []).append(finding)
    for first, *others in alike.values():
        if not others:
            yield first
            continue
        text = "{scenarios} leave {size} in {dtypes}: they do not convert {kind} layers ({most})."
        scenarios = tuple(finding.values["scenario"] for finding in (first, *others))
        yield replace(first, template=text, brief=text, values={**first.values, "scenarios": scenarios})


def _left_by_scenario(quantized: Mapping[str, Trace]) -> Iterator[Finding]:
    for name, trace in quantized.items():
        weights = [tensor for tensor in trace.tensors if tensor.kind in ("parameter", "packed")]
        left = [tensor for tensor in weights if tensor.kind == "parameter" and not tensor.parts and tensor.bytes]
        size, stored = bytes_of(left), bytes_of(weights)
        if size * 2 <= stored:
            continue
        types, by_type = {layer.path: layer.type for layer in trace.layers}, Counter[str]()
        for tensor in left:
            by_type[types.get(tensor.layer, "")] += tensor.bytes
        (kind, most), *_ = by_type.most_common()
        values: dict[str, object] = {"scenario": name, "kind": kind, "dtypes": stored_dtypes(left)[:1]}
        values |= sizes(size=size, stored=stored, most=most)
        text = "{scenario} leaves {size} of {stored} in {dtypes}: it does not convert {kind} layers ({most})."
        yield Finding("quantization-leaves-most", text, values, bytes=size, layers=layers_of(left), brief=text)


@RULES.rule("kv-cache")
def _what_the_cache_costs(evidence: Evidence) -> Iterator[Finding]:
    row = decisive_row(evidence.rows)
    if row is None or not row.cache:
        text = "The model keeps no KV cache."
        yield Finding("kv-cache", text, bytes=0, brief=text)
        return
    size = row.per_token // row.batch
    values: dict[str, object] = {"cache": Bytes(row.cache), "batch": row.batch, "prompt": row.prompt, "new": row.new}
    values |= sizes(sequence=row.per_sequence)
    values |= {"token": f"{size / 1024:,.4g} KiB" if size >= 1024 else f"{size} B"}
    values |= {"kinds": ", ".join(f"{kind.layers} of {kind.kind}" for kind in row.layers)}
    values |= sizes(hosted=row.hosted, pinned=row.pinned)
    grows = "{token} per token of a sequence" if row.per_token else "whatever the length"
    brief = "The KV cache grows to {cache}, " + grows + "." + (" {hosted} of it is on the host." if row.hosted else "")
    text = f"{brief} Each sequence takes {{sequence}} (layers: {{kinds}})."
    if row.hosted:
        text += " On the host, PyTorch pins {pinned}, in blocks of powers of two."
    yield Finding("kv-cache", text, values, bytes=row.cache, brief=brief)


@RULES.rule("proposed-tokens")
def _what_proposes(evidence: Evidence) -> Iterator[Finding]:
    if evidence.draft is None:
        return
    row = max(evidence.rows, key=lambda row: row.assistant)
    cache = sum(kind.bytes for kind in row.layers if kind.kind.endswith(OF_ASSISTANT))
    values: dict[str, object] = {"assistant": evidence.draft.assistant, "tokens": evidence.draft.tokens}
    values |= sizes(weights=row.assistant, cache=cache) | {"scenario": row.scenario}
    text = "{tokens} tokens are looked up before each step, and each is assumed to be rejected, the worst case."
    if evidence.draft.assistant:
        text = (
            "The assistant {assistant} adds {weights} of weights ({scenario}) and {cache} of KV cache. It "
            "proposes {tokens} tokens before each step, and each is assumed to be rejected, the worst case."
        )
    yield Finding("proposed-tokens", text, values, bytes=row.assistant + cache)


@RULES.rule("decode-transient")
def _what_a_step_needs(evidence: Evidence) -> Iterator[Finding]:
    row = max(evidence.rows, key=lambda row: row.transient)
    if row.transient * 100 < row.decode.peak:
        return
    text = "Each decode step temporarily needs another {transient} (batch {batch}, {scenario})."
    values = {"transient": Bytes(row.transient), "batch": row.batch, "scenario": row.scenario}
    yield Finding("decode-transient", text, values, bytes=row.transient)


@RULES.rule("prefill-transient")
def _what_the_prefill_needs(evidence: Evidence) -> Iterator[Finding]:
    row = max(evidence.rows, key=lambda row: row.prefill.peak - row.decode.peak)
    beyond = row.prefill.peak - max(row.decode.peak, row.prefill.end)
    if beyond * 20 < row.prefill.peak:
        return
    brief = "The prefill of {prompt} tokens sets the peak at batch {batch}: it needs {beyond} more than any later step."
    chunks = " Prefilling in chunks (--prefill-chunk-size) may lower the peak." if evidence.draft is None else ""
    values = {"prompt": row.prompt, "batch": row.batch, "beyond": Bytes(beyond)}
    yield Finding("prefill-transient", f"{brief}{chunks}", values, bytes=beyond, brief=brief)


@RULES.rule("generation-inexact")
def _what_was_not_checked(evidence: Evidence) -> Iterator[Finding]:
    if inexact := sum(not row.exact for row in evidence.rows):
        text = "In {count} rows, decode steps differ slightly from the derived figures."
        yield Finding("generation-inexact", text, {"count": inexact})


def _estimate(row: GenerationRow) -> GpuEstimate:
    assert row.estimate is not None
    return row.estimate


# -- serving -----------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """The rows of a server, of which one could be run, what it may take of its card, and what would make room for a
    request where there is none. `quantized` is as in `Evidence`.
    """

    rows: tuple[ServingRow, ...]
    serving: ServerArguments
    card: Card
    budget: int
    remedied: Remedied | None
    quantized: Mapping[str, Trace]

    @property
    def first(self) -> ServingRow:
        """The first row that could be run."""
        return next(row for row in self.rows if row.reason is None)


SERVING_RULES = Rules[Served]()


@SERVING_RULES.rule("serves", "serves-none")
def _what_is_served(evidence: Served) -> Iterator[Finding]:
    row, serving, card = evidence.first, evidence.serving, evidence.card
    cards = card.name if serving.tp == 1 else f"each of {serving.tp} {card.name}"
    values: dict[str, object] = {"scenario": row.scenario, "card": cards, "budget": Bytes(evidence.budget)}
    if row.paged is None:
        rest = row.profile + row.non_torch.low + row.graphs.low
        values |= sizes(short=row.shortage, weights=row.weights, rest=rest)
        text = (
            "{scenario} does not fit: the server may use {budget} of {card}, but weights take {weights}, and a step, "
            "CUDA graphs and memory outside PyTorch at least {rest}. "
        )
        if serving.kv_bytes is None:
            text += "Nothing is left for the KV cache; {short} are missing."
        else:
            values |= sizes(cache=serving.kv_bytes)
            text += "{short} are missing for a KV cache of {cache}."
        yield Finding("serves-none", text, values, bytes=row.shortage, brief=text)
        return
    paged = row.paged
    values |= sizes(cache=paged.available.low, more=paged.available.high)
    values |= {"about": _about(paged.tokens), "tokens": paged.tokens.low, "most": paged.tokens.high}
    values |= {"requests": paged.concurrency.middle, "context": serving.context}
    exact = paged.tokens.low == paged.tokens.high
    room = "{tokens} tokens" if exact else "about {about} tokens ({tokens} to {most})"
    served = "{requests} requests of {context} at once"
    if paged.concurrency.high < 1:
        served = "less than one request of {context}"
        served += ", so vLLM does not start" if serving.rules.server == "vLLM" else ""
    brief = f"Under {{scenario}} the KV cache has room for {room}: {served}."
    size = "{cache}" if exact else "{cache} to {more}" if paged.available.low else "at most {more}"
    text = f"{brief} The cache gets {size} of {{card}}."
    yield Finding("serves", text, values, bytes=paged.available.low, brief=brief)


@SERVING_RULES.rule("request-too-long")
def _what_is_too_long(evidence: Served) -> Iterator[Finding]:
    serving = evidence.serving
    row = next((row for row in evidence.rows if row.paged and row.paged.concurrency.low < 1), None)
    if row is None or row.paged is None:
        return
    paged = row.paged
    missing = (paged.request_blocks - paged.blocks.low) * paged.block_bytes
    values: dict[str, object] = {"scenario": row.scenario, "context": serving.context, "missing": Bytes(missing)}
    is_short, is_vllm = paged.concurrency.high < 1, serving.rules.server == "vLLM"
    text = f"Under {{scenario}} the cache {'is' if is_short else 'may be'} up to {{missing}} too small for one request "
    text += "of {context} tokens"
    text += ", without which vLLM does not start" if is_vllm and not is_short else ""  # the verdict says so
    text += ": lower max_model_len." if is_vllm else "."
    if paged.longest is not None:
        values |= {"longest": paged.longest.low or paged.longest.high}
        fits = "Requests of up to {longest} tokens fit."
        text += f" {fits}" if paged.longest.low else " Requests of more than {longest} tokens do not fit."
    yield Finding("request-too-long", text, values, bytes=missing, brief=text)


@SERVING_RULES.rule("serves-with")
def _what_makes_room(evidence: Served) -> Iterator[Finding]:
    if (remedied := evidence.remedied) is None:
        return
    enough = [row.name for row in remedied.rows if row.outcome == "fits"]
    values: dict[str, object] = {"context": remedied.size, "peak": Bytes(remedied.peak), "names": ", ".join(enough)}
    text = "One request of {context} tokens needs up to {peak} with the server; "
    text += "any one of these makes room: {names}." if enough else "no single remedy that was tried makes room."
    yield Finding("serves-with", text, values, bytes=remedied.peak, brief=text)


@SERVING_RULES.rule("serves-more")
def _what_serves_more(evidence: Served) -> Iterator[Finding]:
    first = evidence.first
    best = max((row for row in evidence.rows if row.reason is None), key=_cached_tokens)
    if best is first or best.paged is None:
        return
    before = _about(first.paged.tokens) if first.paged else 0
    values = {"scenario": best.scenario, "tokens": _about(best.paged.tokens), "first": first.scenario}
    values |= {"before": before}
    text = "Under {scenario} the cache has room for about {tokens} tokens; under {first}, for {before}."
    yield Finding("serves-more", text, values, bytes=best.paged.available.low, brief=text)


@SERVING_RULES.rule("step-transient")
def _what_a_step_takes(evidence: Served) -> Iterator[Finding]:
    row, serving = evidence.first, evidence.serving
    if row.paged is not None and row.profile * 20 < row.paged.available.middle:
        return
    text = (
        "The server reserves {profile} for its largest step: {tokens} tokens and the logits of {seqs} sequences. "
        "Fewer of either leave more for the cache."
    )
    values = {"profile": Bytes(row.profile), "tokens": serving.tokens, "seqs": serving.seqs}
    yield Finding("step-transient", text, values, bytes=row.profile)


@SERVING_RULES.rule("quantization-leaves-most")
def _what_a_server_leaves_unquantized(evidence: Served) -> Iterator[Finding]:
    return _left_as_they_are(evidence.quantized)


def _cached_tokens(row: ServingRow) -> int:
    return row.paged.tokens.middle if row.paged else 0


def _about(tokens: Interval) -> int:
    """The middle of an interval, as exact as its width lets it be."""
    return round(tokens.middle, 2 - len(str(tokens.high - tokens.low)))
