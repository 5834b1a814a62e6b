"""The caches and weights by which a server drafts tokens: of a draft, or of a model's own layers of MTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memsize.analysis.serving.kv_blocks import STATE
from memsize.analysis.serving.scenarios import served_scenarios
from memsize.analysis.serving.server_runs import ServerRuns
from memsize.analysis.serving.weights import loaded_weights
from memsize.errors import InputError
from memsize.records.trace import Trace
from memsize.spec.generation import ServerArguments, Serving
from memsize.spec.scenario import Scenario, select
from memsize.workloads.drafts import head_beside, predicted_layers, predicted_weights
from memsize.workloads.kv_caches import CachedLayer
from memsize.workloads.served_parts import part_of, rotary_tables, vocabulary_padding
from memsize.workloads.serving import text_config


@dataclass(frozen=True)
class Draft:
    """A model that drafts tokens, or a head, served beside another; its weights are as its own config has them."""

    runs: ServerRuns

    @property
    def scenario(self) -> Scenario:
        (scenario,) = served_scenarios(select("as-given"), self.runs.runner.model, self.runs.serving.rules)
        return scenario

    def beside(self, serving: Serving) -> Draft:
        """The draft of a target that is served so: each of several GPUs has a part."""
        runner, gpus = self.runs.runner, serving.tensor_parallel_size
        if gpus > self.runs.serving.tensor_parallel_size:
            runner = replace(runner, model=part_of(runner.model, gpus, runner.name))
        return Draft(replace(self.runs, runner=runner, serving=serving))


def drafting_layers(
    layers: Sequence[CachedLayer], target: ServerRuns, draft: Draft | None, served: ServerArguments
) -> list[CachedLayer]:
    """The layers that cache for the draft of a target, whose own are `layers`. SGLang makes room for as many as the
    draft has, each as large as one of the target's (`DefaultPoolConfigurator` in
    srt/model_executor/pool_configurator.py).

    Raises `InputError` for targets of SGLang with several kinds of layers, whose pools with a draft are not covered.
    """
    of_sglang = served.rules.server == "SGLang"
    drafts = served.speculation is not None and served.speculation.method != "ngram"
    if of_sglang and drafts and len({layer.kind for layer in layers}) > 1:
        raise InputError(
            f"{target.runner.name} has layers of several kinds: {served.rules.name}'s drafts are not covered"
        )
    if draft is not None:
        own = draft.runs.cached_layers(draft.scenario, served)
        return list(layers[-1:]) * len(own) if of_sglang else own
    if served.speculation and served.speculation.method == "mtp":
        return [layer for layer in layers if layer.kind != STATE][-1:] * predicted_layers(target.runner.model)
    return []


def drafting_weights(step: Trace, target: ServerRuns, draft: Draft | None, served: ServerArguments) -> int:
    """Bytes of the weights by which tokens are drafted; `step` is one of the target's."""
    speculation, model = served.speculation, target.runner.model
    if speculation is None or speculation.method == "ngram":
        return 0
    if draft is None:
        return predicted_weights(model, step, target.runner.name)
    own, drafts = draft.runs.decoded(draft.scenario)[0], draft.runs.runner.model
    weights = loaded_weights(own, draft.runs.allocator, repacks=False).allocated
    if speculation.reads_states:
        return weights + head_beside(speculation.method, drafts, model, served.tp)
    return weights + rotary_tables(drafts) + (vocabulary_padding(drafts) if served.tp == 1 else 0)


def drafting_states(target: ServerRuns, draft: Draft | None, served: ServerArguments) -> int:
    """Bytes of the states that a draft reads (`hidden_states` in vLLM's v1/spec_decode/llm_base_proposer.py)."""
    if not served.speculation or served.speculation.method == "ngram" or not served.rules.slack:
        return 0
    model = target.runner.model
    return int(served.tokens * text_config(model).hidden_size * model.dtype.itemsize)
