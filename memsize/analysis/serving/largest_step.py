"""The largest step of a server before it sizes its cache, and the weights with all that is beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from memsize.analysis.serving.drafting import Draft, drafting_states, drafting_weights
from memsize.analysis.serving.first_start import benchmark, flushed
from memsize.analysis.serving.graph_memory import graph_memory
from memsize.analysis.serving.logged_memory import local_memory
from memsize.analysis.serving.server_runs import Images, ServerRuns, StepRun
from memsize.analysis.serving.weights import loaded_weights
from memsize.device.cards import processors
from memsize.loading.hubs import checkpoint_config_of
from memsize.records.columns import distinct
from memsize.records.gpu import Interval
from memsize.spec.generation import ServerArguments
from memsize.spec.scenario import Scenario
from memsize.units import MiB
from memsize.workloads.drafts import aux_states
from memsize.workloads.served_parts import (
    adapter_slots,
    encoder_elsewhere,
    latent_copies,
    layered_images,
    mxfp4_padding,
    rotary_tables,
    served_kind,
    vocabulary_padding,
)
from memsize.workloads.serving import ProfileRun, reads_images, text_config

_UNSPLIT: Final = 20 * MiB
_FP4_WORKSPACE: Final = 32 * MiB
"""FlashInfer's buffer for products of four bits, which stays (`mm_fp4` in flashinfer/gemm/gemm_base.py)."""
_NO_IMAGES: Final = Images(0, 0, 0, 0)


class LargestStep(NamedTuple):
    """A largest step: the bytes of the weights, those that are free in their segments, those that the step needs beyond
    them, those that are free in its segments, the ops that it runs, and the memory of CUDA graphs. `drafting` are those
    of the weights that draft tokens, `local` those of the local memory of its kernels.
    """

    weights: int
    slack: int
    step: int
    free: int
    ops: frozenset[str]
    graphs: Interval
    drafting: int
    local: int


def largest_step(runs: ServerRuns, draft: Draft | None, scenario: Scenario, served: ServerArguments) -> LargestStep:
    """Run the largest step of a server, and compute what it takes beside the weights."""
    runs.progress(f"{scenario.name}: a step of {served.tokens:,} tokens")
    model, gpu, rules = runs.runner.model, runs.runner.gpu, served.rules
    image = runs.images(1, scenario, served) if reads_images(model) else _NO_IMAGES
    ran, grown = _steps(runs, draft, scenario, served, image)
    step, free = ran.bytes, ran.estimate.reserved - ran.estimate.allocated if rules.reserved else 0
    if rules.encodes_first:
        step = _with_images(runs, scenario, served, image, step)
    step, tables = _with_tables(runs, served, ran, step)
    step += drafting_states(runs, draft, served)
    if runs.multiplies_fp4():
        step += _FP4_WORKSPACE
    if served.compiles:
        compiled = benchmark(model, served, gpu)
        step, most = max(step, compiled.peak.low), max(step + grown, compiled.peak.high)
        free += most - step + (0 if runs.allocator.expandable_segments else compiled.segment)
    if rules.counts:  # of each token of the vocabulary, in what was generated and (as bits) in the prompt
        vocabulary = text_config(model).vocab_size * served.tp
        step += served.seqs * (vocabulary + -(-vocabulary // 32)) * 4
    loading = replace(runs.allocator, max_split_size=_UNSPLIT) if rules.unsplit else runs.allocator
    weights = loaded_weights(ran.trace, loading, repacks=rules.products != "unpacks")
    drafting = drafting_weights(ran.trace, runs, draft, served)
    return LargestStep(
        weights=weights.allocated + tables + drafting,
        slack=weights.reserved - weights.allocated if rules.slack else 0,
        step=step if rules.profiles else 0,
        free=free,
        ops=frozenset(distinct(ran.trace.events, "op") - {""}),
        graphs=_graphs(runs, scenario, served),
        drafting=drafting,
        local=local_memory(model, ran.trace, gpu) if rules.server == "vLLM" else 0,
    )


def _steps(
    runs: ServerRuns, draft: Draft | None, scenario: Scenario, served: ServerArguments, image: Images
) -> tuple[StepRun, int]:
    """The largest step, and the bytes by which it may grow while Inductor times its kernels."""
    rules, speculation = served.rules, served.speculation
    in_step = reads_images(runs.runner.model) and not rules.encodes_first
    seqs = served.seqs
    if in_step and image.tokens:  # each sequence has an image, whose tokens are those of a decoder too
        seqs = max(1, min(seqs, served.tokens // image.tokens))
    length = served.tokens // seqs  # fewer than `seqs` tokens are left over
    inputs = runs.prompts(length) if in_step else runs.texts(length)
    run = ProfileRun(
        rules,
        seqs,
        served.tp,
        processors(runs.runner.gpu)[1],
        in_step,
        runs.multiplies_fp4(),
        aux_states=aux_states(speculation.method, draft.runs.runner.model) if speculation and draft else 0,
        rejects=speculation is not None and rules.randomizes,
    )
    timed = flushed(served, runs.runner.gpu) if served.compiles else Interval(0, 0)
    ran = [
        runs.step(replace(run, flushed=size), inputs, served.tokens // length, scenario, served)
        for size in sorted(set(timed), reverse=True)
    ]
    return ran[-1], ran[0].bytes - ran[-1].bytes


def _with_images(runs: ServerRuns, scenario: Scenario, served: ServerArguments, image: Images, step: int) -> int:
    """Bytes of a step before which the encoder reads as many images as its tokens may stand for."""
    if image.tokens:
        count = max(1, min(max(served.tokens, image.tokens) // image.tokens, served.seqs))
        runs.progress(f"{scenario.name}: {count:,} images")
        image = runs.images(count, scenario, served)
    return max(image.step, image.result + step + (image.pixels if served.rules.holds_images else 0))


def _with_tables(runs: ServerRuns, served: ServerArguments, ran: StepRun, step: int) -> tuple[int, int]:
    """Bytes of a step, and of the tables, paddings, copies and slots that a server has beside the weights."""
    model, rules, gpu = runs.runner.model, served.rules, runs.runner.gpu
    padding = vocabulary_padding(model) if served.tp == 1 else 0  # a part of it is padded already
    quantized = checkpoint_config_of(model) is not None
    copies = latent_copies(model, absorbed=rules.absorbs, quantized=quantized)
    tables = rotary_tables(model) + padding + copies - encoder_elsewhere(model, served.tp)
    tables += mxfp4_padding(model, rules, gpu) + adapter_slots(model, served) + layered_images(model, served)
    if not (copies and rules.absorbs):
        return step, tables
    # They are computed, so that a workspace of cuBLAS is there before the step.
    workspace = max((storage.bytes for storage in ran.trace.storages if storage.role == "workspace"), default=0)
    return step - workspace, tables + workspace


def _graphs(runs: ServerRuns, scenario: Scenario, served: ServerArguments) -> Interval:
    captured, kind, runner = served.graphs, served.rules.graphs, runs.runner
    if captured is None or kind not in ("extrapolated", "measured"):
        return Interval(0, 0)
    pool = runs.captured(captured.largest, scenario, served)
    model = served_kind(runner.model, is_quantized=False)
    return graph_memory(text_config(runner.model), captured, kind, pool, runner.gpu, served.tp, model)
