"""Size of a paged server's KV cache: the memory of a GPU minus weights, the largest step, and memory outside PyTorch.

It is the arithmetic of vLLM's `Worker.determine_available_memory` (`vllm/v1/worker/gpu_worker.py`), less
what vLLM sets aside for CUDA graphs (`graph_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch

from memsize.analysis.findings.generation import SERVING_RULES, Served
from memsize.analysis.remedies import Need
from memsize.analysis.runner import Runner
from memsize.analysis.serving.first_start import benchmark, flushed
from memsize.analysis.serving.graph_memory import graph_memory
from memsize.analysis.serving.kv_blocks import (
    STATE,
    BlockLayout,
    block_layout,
    pooled,
    state_bytes,
    token_bytes,
)
from memsize.analysis.serving.logged_memory import local_memory, logged_memory
from memsize.analysis.serving.server_remedies import (
    ServedModel,
    arguments_of,
    as_served,
    assumptions,
    remedies_for_server,
)
from memsize.device.allocation_events import OMITTED
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import processors
from memsize.device.cuda_context import code_of_libraries, cuda_context
from memsize.device.gpu_estimate import estimate_gpu
from memsize.device.replay import Levels, replay
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.loading.hubs import checkpoint_config_of
from memsize.model.input_tensors import ModelInputs
from memsize.precision.quantization_config import checkpoint_layout, quantization_of
from memsize.processes.patches import collector_paused
from memsize.records.columns import distinct
from memsize.records.fit import Remedied
from memsize.records.gpu import Interval
from memsize.records.serving import ServingReport, ServingRow
from memsize.records.trace import StoredPart, Trace
from memsize.spec.generation import KV_BYTES, Generation, ServerArguments, Serving
from memsize.spec.scenario import Scenario, select
from memsize.spec.server_rules import Rules
from memsize.spec.stack import Stack
from memsize.units import MiB, format_bytes
from memsize.workloads.drafts import aux_states, head_beside, predicted_layers, predicted_weights
from memsize.workloads.generation import GenerationSteps, Prompts, positions
from memsize.workloads.kv_caches import CachedLayer
from memsize.workloads.served_parts import (
    adapter_slots,
    encoder_elsewhere,
    has_states,
    latent_copies,
    mxfp4_padding,
    part_of,
    rotary_tables,
    served_kind,
    vocabulary_padding,
)
from memsize.workloads.serving import (
    ImageRun,
    ProfileRun,
    image_encoder,
    reads_images,
    text_config,
    text_model,
    text_only,
)

_WEIGHTS = ("parameter", "buffer")
_UNSPLIT: Final = 20 * MiB
_PRODUCTS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM and SGLang compute in one product (`QKVParallelLinear` and `MergedColumnParallelLinear` in vLLM's
`model_executor/layers/linear.py`).
"""
MIXED: Final = 8192
"""The tokens of a prompt with images: more than those stand for."""
_FP4_SINCE: Final = (10, 0)
"""The compute capability with products of four bits (vLLM's `model_executor/kernels/linear/nvfp4/flashinfer.py`)."""
_FP4_WORKSPACE: Final = 32 * MiB
"""FlashInfer's buffer for them, which stays (`mm_fp4` in flashinfer/gemm/gemm_base.py)."""
_PROMPT = 8
"""The tokens of the prompt that is traced to measure the bytes of one more token in the cache."""
_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 allows it"


class Drafter(NamedTuple):
    """A model that drafts tokens, as one GPU stores it."""

    runner: Runner
    prompts: Prompts


class Profile(NamedTuple):
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


@dataclass(frozen=True)
class Server:
    """A model as one GPU stores it, and how it is served."""

    runner: Runner
    prompts: Prompts
    serving: Serving
    allocator: AllocatorConfig
    progress: Callable[[str], None] = lambda _: None
    draft: Drafter | None = None
    _traces: dict[tuple[Runner, str], tuple[Trace, Sequence[Sequence[CachedLayer]]]] = field(default_factory=dict)
    """A decoded token, by model and scenario."""
    _profiles: dict[tuple[object, ...], Profile] = field(default_factory=dict)
    """By model and step."""
    _quantized: dict[str, Trace] = field(default_factory=dict)
    """The trace of each scenario that quantizes."""

    def report(self, scenarios: Sequence[Scenario], notes: Sequence[str]) -> ServingReport:
        """Compute one row for each scenario.

        Raises `InputError` where the model's cache is not covered, and the error of the first scenario where the model
        runs under none.
        """
        config = self._config()
        most = positions(self.runner.model)
        context = self.serving.max_model_len or most
        if context is None:
            raise InputError(f"{self.runner.name} does not say how long a request may be: give --max-model-len")
        served = arguments_of(self.runner, self.serving, context)
        rows: list[ServingRow] = []
        layouts: list[BlockLayout] = []
        errors: list[Exception] = []
        with collector_paused():
            for scenario in scenarios:
                row = ServingRow(scenario.name, scenario.title)
                try:
                    layouts.append(self._layout(scenario, config, served))
                    rows.append(self._row(row, scenario, layouts[-1], served))
                except (ScenarioError, ForwardError) as error:
                    errors.append(error)
                    rows.append(replace(row, reason=str(error)))
        if not layouts or len(errors) == len(rows):
            raise errors[0]
        ran = next(number for number, row in enumerate(rows) if row.reason is None)
        paged = rows[ran].paged
        starts = paged is not None and paged.concurrency.low >= 1
        remedied = None if starts else self._remedied(scenarios[ran], config, context)
        beyond = f"the model has positions for {most or 0:,} tokens: vLLM refuses a longer context ({_ALLOWED})"
        notes = (*notes, *([beyond] if most and context > most else []), *layouts[0].notes(served.block))
        notes = (*notes, *self._included(served))
        budget = self._budget(served)
        return ServingReport(
            model=self.runner.name,
            card=self.runner.gpu,
            asked=served.record,
            budget=budget,
            groups=layouts[0].groups,
            serving_rows=tuple(rows),
            remedied=remedied,
            findings=SERVING_RULES.findings(
                Served(tuple(rows), served, self.runner.gpu, budget, remedied, self._quantized)
            ),
            notes=tuple(dict.fromkeys(notes)),
            assumptions=tuple(assumptions(rows[ran], served, reads_images(self.runner.model))),
        )

    def _included(self, served: ServerArguments) -> Iterator[str]:
        """Notes on what the weights include."""
        if served.loras:
            adapters = f"{served.loras} adapter{'s' * (served.loras > 1)}"
            size = format_bytes(adapter_slots(self.runner.model, served))
            yield f"the weights include {size} for {adapters} of rank {served.lora_rank} or less in each linear layer"
        drafting = max((profile.drafting for profile in self._profiles.values()), default=0)
        if served.speculation and drafting:
            tokens = f"{served.speculation.tokens} token{'s' * (served.speculation.tokens > 1)}"
            yield f"the weights include {format_bytes(drafting)} to draft {tokens} before each step"

    def _config(self) -> Any:
        """The config of the model; raises `InputError` for a model that is not covered."""
        name, config = self.runner.name, getattr(self.runner.model, "config", None)
        if getattr(config, "audio_config", None) is not None:
            raise InputError(f"{name} also reads sound: serve the config of its text model")
        is_chunked = "chunked_attention" in (getattr(text_config(self.runner.model), "layer_types", None) or ())
        if is_chunked or getattr(config, "is_encoder_decoder", False):
            what = "chunked attention" if is_chunked else "an encoder"
            raise InputError(f"{name} has {what}: only full and latent attention, windows and states are covered")
        text_model(self.runner.model, name)
        return text_config(self.runner.model)

    def _budget(self, served: ServerArguments) -> int:
        """The part of the card that the server may take: a set size of the cache comes on top of the rest."""
        return int(self.runner.gpu.bytes * (1 if served.kv_bytes else served.utilization))

    def _remedied(self, scenario: Scenario, config: Any, context: int) -> Remedied:
        def needed(model: ServedModel) -> Need:
            server = replace(self, runner=model.runner, serving=model.serving)
            if self.draft and (tp := model.serving.tensor_parallel_size) > self.serving.tensor_parallel_size:
                part = part_of(self.draft.runner.model, tp, self.draft.runner.name)
                server = replace(server, draft=Drafter(replace(self.draft.runner, model=part), self.draft.prompts))
            served = arguments_of(model.runner, model.serving, context)
            layout = server._layout(model.scenario, config, served)
            row = server._row(ServingRow("", ""), model.scenario, layout, served)
            request = layout.request(context, served.tokens * served.rules.in_flight) * layout.block_bytes
            taken = row.weights + row.profile + row.non_torch.high + row.graphs.high + request
            return Need(taken, server._budget(served))

        return remedies_for_server(ServedModel(self.runner, self.serving, scenario), context, needed)

    def _layout(self, scenario: Scenario, config: Any, served: ServerArguments) -> BlockLayout:
        layers, rules = self._cached_layers(scenario, config, served), served.rules
        if self.draft is not None:
            alone, own = self._drafting(self.draft)
            layers += alone._cached_layers(own, text_config(alone.runner.model), served)
        elif served.speculation and served.speculation.method == "mtp":
            attention = [layer for layer in layers if layer.kind != STATE]
            layers += attention[-1:] * predicted_layers(self.runner.model)
        window = getattr(config, "sliding_window", None)
        if not rules.profiles:
            layers = pooled(layers, self.runner.name, rules, served_kind(self.runner.model, is_quantized=False))
        layout = block_layout(
            layers, window, served.block, self.runner.name, windows=rules.windows, padding=rules.padding
        )
        return replace(layout, state_blocks=1 + (served.speculation.tokens if served.speculation else 0))

    def _drafting(self, draft: Drafter) -> tuple[Server, Scenario]:
        """The server of a draft alone, whose weights are as its own config has them."""
        serving = replace(self.serving, speculative_config=None, enable_lora=False, max_loras=None, max_lora_rank=None)
        (scenario,) = served_scenarios(select("as-given"), draft.runner.model, serving.rules)
        return replace(self, runner=draft.runner, prompts=draft.prompts, serving=serving, draft=None), scenario

    def _drafted(self, scenario: Scenario, served: ServerArguments, trace: Trace) -> int:
        """Bytes of the weights by which tokens are drafted; `trace` is one of the model's steps."""
        speculation, draft = served.speculation, self.draft
        if speculation is None or speculation.method == "ngram":
            return 0
        if draft is None:
            return predicted_weights(self.runner.model, trace, self.runner.name)
        (alone, own), model = self._drafting(draft), draft.runner.model
        weights = loaded_weights(alone._decoded(own)[0], self.allocator, repacks=False).allocated
        if speculation.reads_states:
            return weights + head_beside(speculation.method, model, self.runner.model, served.tp)
        return weights + rotary_tables(model) + (vocabulary_padding(model) if served.tp == 1 else 0)

    def _decoded(self, scenario: Scenario) -> tuple[Trace, Sequence[Sequence[CachedLayer]]]:
        """Trace a prompt and one token more, with what each layer then caches."""
        key = self.runner, scenario.name
        if key not in self._traces:
            workload = GenerationSteps(Generation(prompt=_PROMPT, max_new_tokens=2))
            trace = self.runner.with_inputs(self._texts(_PROMPT), 1).run(workload, scenario)
            self._traces[key] = trace, workload.record.steps
        return self._traces[key]

    def _cached_layers(self, scenario: Scenario, config: Any, served: ServerArguments) -> list[CachedLayer]:
        self.progress(f"{scenario.name}: the cache of one token")
        trace, steps = self._decoded(scenario)
        if scenario.recipe == "quantized":
            self._quantized[scenario.name] = trace
        cached = (storage for storage in trace.storages if storage.role == "KV cache" and storage.bytes)
        own = min((storage.bytes // math.prod(storage.shape) for storage in cached), default=1)
        width = own if self.serving.kv_cache_dtype is None else KV_BYTES[self.serving.kv_cache_dtype]
        _check_states(config, steps[1], self.runner.name)
        named = (getattr(config, name, None) for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
        dtypes = (getattr(torch, str(name).removeprefix("torch."), None) for name in named if name)
        state_width = next((dtype.itemsize for dtype in dtypes if isinstance(dtype, torch.dtype)), None)
        layers: list[CachedLayer] = []
        drafted = served.speculation.tokens if served.speculation else 0
        for before, now in zip(steps[0], steps[1], strict=True):
            if now.states:
                layers.append(CachedLayer(STATE, state_bytes(now, state_width, drafted)))
            if kind := now.kind.removeprefix(STATE).removeprefix(" and "):
                layers.append(CachedLayer(kind, token_bytes((now.bytes - before.bytes) // own, width, config)))
        if not served.rules.encodes_first:  # V0 has a cache for each layer, also for those that read images
            crossed = getattr(config, "cross_attention_layers", None) or ()
            layers += [max(layers, key=lambda layer: layer.bytes)] * len(crossed)
        if self.serving.tensor_parallel_size > 1 and any(layer.states for layer in steps[1]):
            raise InputError(f"{self.runner.name} keeps states as in Mamba: memsize does not divide those among GPUs")
        return layers

    def _row(self, row: ServingRow, scenario: Scenario, layout: BlockLayout, served: ServerArguments) -> ServingRow:
        run = (
            self.runner,
            scenario,
            replace(served, context=0, kv_dtype=None, kv_bytes=None, utilization=0, block=0, defaults=()),
        )
        profile = self._profiles.get(run) or self._profiles.setdefault(run, self._profiled(scenario, served))
        graphs, outside = profile.graphs, self._outside(profile, served)
        row = replace(row, weights=profile.weights, profile=profile.step, non_torch=outside, graphs=graphs)
        rest = self._budget(served) - profile.weights - profile.step
        # Some drivers leave more of a GPU's memory.
        more = int(self.runner.gpu.spread * served.utilization)
        left = Interval(rest - outside.high - graphs.high, rest - outside.low - graphs.low + more)
        if served.kv_bytes is not None:
            missing = served.kv_bytes - left.high
            left = Interval(served.kv_bytes, served.kv_bytes) if missing <= 0 else Interval(-missing, -missing)
        if left.high < layout.block_bytes:
            return replace(row, shortage=layout.block_bytes - left.high)
        step = served.tokens * served.rules.in_flight
        available = Interval(max(left.low, 0), left.high)
        limit = positions(self.runner.model)
        paged = layout.paged(available, served.context, step, by_requests=served.rules.by_requests, positions=limit)
        return replace(row, paged=paged)

    def _outside(self, profile: Profile, served: ServerArguments) -> Interval:
        """Memory taken beside tensors, as the release counts it: outside PyTorch, and where it counts segments also
        what is free in them; in those of a step that depends on the order of all allocations. SGLang only counts what
        was taken before the weights, and its share of the memory is that of the rest.
        """
        gpu, stack, rules = self.runner.gpu, self._stack(served), served.rules
        logged, exchange = logged_memory(gpu, served)
        code = code_of_libraries(gpu, stack, profile.ops)
        free = Interval(profile.slack, profile.slack + profile.free)
        context = cuda_context(gpu, stack, ()) if rules.outside == "all" or not rules.profiles else Interval(0, 0)
        if rules.profiles:
            outside = Interval(max(code.low, logged.low) + profile.local, max(code.high, logged.high) + profile.local)
        else:
            share = 0 if served.kv_bytes else served.utilization
            context, outside = (Interval(*(round(end * share) for end in ends)) for ends in (context, exchange))
        return Interval(*(sum(ends) for ends in zip(outside, context, free, strict=True)))

    def _stack(self, served: ServerArguments) -> Stack:
        """The stack of the request; where it names no PyTorch, the one that the server pins."""
        stack = self.runner.stack
        return stack if stack.torch else replace(stack, torch=served.rules.torch)

    def _profiled(self, scenario: Scenario, served: ServerArguments) -> Profile:
        self.progress(f"{scenario.name}: a step of {served.tokens:,} tokens")
        runner, rules = self.runner, served.rules
        has_images = reads_images(runner.model)
        in_step = has_images and not rules.encodes_first
        image = self._images(scenario, served, 1) if has_images else Encoded(0, 0, 0, 0)
        seqs = served.seqs
        if in_step and image.tokens:  # each sequence has an image, whose tokens are those of a decoder too
            seqs = max(1, min(seqs, served.tokens // image.tokens))
        length = served.tokens // seqs  # fewer than `seqs` tokens are left over
        inputs = self.prompts(length) if in_step else self._texts(length)
        draft = served.speculation
        run = ProfileRun(
            rules,
            seqs,
            served.tp,
            processors(runner.gpu)[1],
            in_step,
            self._multiplies_fp4(),
            aux_states=aux_states(draft.method, self.draft.runner.model) if draft and self.draft else 0,
            rejects=draft is not None and rules.randomizes,
        )
        timed = flushed(served, runner.gpu) if served.compiles else Interval(0, 0)
        peaks: list[int] = []
        for size in sorted(set(timed), reverse=True):
            trace = self._on(inputs, served.tokens // length, served).run(replace(run, flushed=size), scenario)
            estimate = estimate_gpu(trace, runner.gpu, config=self.allocator)
            peaks.append(estimate.allocated - weights_in(trace, self.allocator).allocated)
        step, grown = peaks[-1], peaks[0] - peaks[-1]
        free = estimate.reserved - estimate.allocated if rules.reserved else 0
        if has_images and rules.encodes_first:
            if image.tokens:  # as many images as the tokens of a step may stand for
                images = max(1, min(max(served.tokens, image.tokens) // image.tokens, served.seqs))
                self.progress(f"{scenario.name}: {images:,} images")
                image = self._images(scenario, served, images)
            step = max(image.step, image.result + step + (image.pixels if rules.holds_images else 0))
        padding = vocabulary_padding(runner.model) if served.tp == 1 else 0  # a part of it is padded already
        quantized = checkpoint_config_of(runner.model) is not None
        copies = latent_copies(runner.model, absorbed=rules.absorbs, quantized=quantized)
        tables = rotary_tables(runner.model) + padding + copies - encoder_elsewhere(runner.model, served.tp)
        tables += mxfp4_padding(runner.model, rules, runner.gpu) + adapter_slots(runner.model, served)
        if copies and rules.absorbs:  # they are computed, so that a workspace of cuBLAS is there before the step
            workspace = max((storage.bytes for storage in trace.storages if storage.role == "workspace"), default=0)
            step, tables = step - workspace, tables + workspace
        drafting = self._drafted(scenario, served, trace)
        tables += drafting
        if draft and draft.method != "ngram" and rules.slack:  # states that the draft reads (`hidden_states` there)
            step += served.tokens * text_config(runner.model).hidden_size * runner.model.dtype.itemsize
        ops = frozenset(distinct(trace.events, "op") - {""})
        loading = replace(self.allocator, max_split_size=_UNSPLIT) if rules.unsplit else self.allocator
        weights = loaded_weights(trace, loading, repacks=rules.products != "unpacks")
        slack = weights.reserved - weights.allocated if rules.slack else 0
        if run.fp4:
            step += _FP4_WORKSPACE
        if served.compiles:
            compiled = benchmark(runner.model, served, runner.gpu)
            step, most = max(step, compiled.peak.low), max(step + grown, compiled.peak.high)
            free += most - step + (0 if self.allocator.expandable_segments else compiled.segment)
        if rules.counts:  # of each token of the vocabulary, in what was generated and (as bits) in the prompt
            vocabulary = text_config(runner.model).vocab_size * served.tp
            step += served.seqs * (vocabulary + -(-vocabulary // 32)) * 4
        step = step if rules.profiles else 0
        local = local_memory(runner.model, trace, runner.gpu) if rules.server == "vLLM" else 0
        graphs = self._graphs(scenario, served)
        return Profile(weights.allocated + tables, slack, step, free, ops, graphs, drafting, local)

    def _graphs(self, scenario: Scenario, served: ServerArguments) -> Interval:
        captured, kind, config = served.graphs, served.rules.graphs, text_config(self.runner.model)
        if captured is None or kind not in ("extrapolated", "measured"):
            return Interval(0, 0)
        run = ProfileRun(served.rules, 0, served.tp, processors(self.runner.gpu)[1], fp4=self._multiplies_fp4())
        trace = self._on(self._texts(captured.largest), 1, served).run(run, scenario)
        stored = {number for number, storage in enumerate(trace.storages) if storage.role in _WEIGHTS}
        segments = replay((event.storage, event.delta) for event in trace.events if event.storage not in stored)
        return graph_memory(config, captured, kind, segments.reserved.bytes, self.runner.gpu, served.tp)

    def _multiplies_fp4(self) -> bool:
        """Whether FlashInfer multiplies NVFP4 weights in four bits; Marlin does not (vLLM's compressed_tensors.py)."""
        quantization, config = quantization_of(self.runner.model), checkpoint_config_of(self.runner.model)
        if quantization is None or quantization.layout.name != "nvfp4" or not isinstance(config, dict):
            return False
        groups = config.get("config_groups", {}).values()
        quantizes_inputs = not groups or any(group.get("input_activations") for group in groups)
        return quantizes_inputs and self.runner.gpu.capability >= _FP4_SINCE

    def _on(self, inputs: ModelInputs, batch: int, served: ServerArguments) -> Runner:
        runner = self.runner.with_inputs(inputs, batch)
        runner.stack = self._stack(served)
        # Before Ampere, servers have kernels of their own for attention, which need no scores either (XFormers).
        runner.gpu = replace(runner.gpu, capability=max(runner.gpu.capability, (8, 0)))
        return runner

    def _texts(self, length: int) -> ModelInputs:
        return text_only(self.prompts(MIXED), length) if reads_images(self.runner.model) else self.prompts(length)

    def _images(self, scenario: Scenario, served: ServerArguments, images: int) -> Encoded:
        if image_encoder(self.runner.model) is None:
            return Encoded(0, 0, 0, 0)
        encoder = ImageRun()
        trace = self._on(self.prompts(MIXED), images, served).run(encoder, scenario)
        estimate = estimate_gpu(trace, self.runner.gpu, config=self.allocator)
        step = estimate.allocated - weights_in(trace, self.allocator).allocated
        return Encoded(encoder.tokens // images, step, encoder.bytes, encoder.pixels)


class Encoded(NamedTuple):
    """A run of an image encoder: tokens of an image, and the bytes that the run, its results and the images need."""

    tokens: int
    step: int
    result: int
    pixels: int


def weights_in(trace: Trace, allocator: AllocatorConfig) -> Levels:
    """Bytes of the blocks and segments of parameters and buffers in the trace."""
    stored = {number for number, storage in enumerate(trace.storages) if storage.role in _WEIGHTS}
    return replay(((e.storage, e.delta) for e in trace.events if e.storage in stored and e.delta > 0), allocator).final


def loaded_weights(trace: Trace, allocator: AllocatorConfig, *, repacks: bool) -> Levels:
    """The same when a server has loaded the model: the parts of a quantized weight are tensors, and those of layers
    that are computed in one product are one. Where it `repacks` integers, it then makes another tensor of each of their
    parts, layer by layer, and gives back what is wholly free (`process_weights_after_loading` of gptq_marlin.py).
    """
    sizes: dict[tuple[object, str], int] = {}
    packed: set[tuple[object, str]] = set()
    for tensor in trace.tensors:
        parent, _, name = tensor.layer.rpartition(".")
        product = next((names for names in _PRODUCTS if name in names), None)
        key: object = (parent, product, tensor.name.rpartition(".")[2]) if product else tensor.name
        for part in tensor.parts or (StoredPart("", tensor.spec, tensor.bytes),):
            sizes[key, part.name] = sizes.get((key, part.name), 0) + part.bytes
            if repacks and any(other.spec.dtype == "int32" for other in tensor.parts):
                packed.add((key, part.name))
    events = [(number, size) for number, size in enumerate(sizes.values()) if size]
    for number, (named, size) in enumerate(sizes.items()):
        if size and named in packed:
            events += [(len(sizes) + number, size), (number, -size)]
    # An event that changes nothing, before which the cache is emptied.
    return replay([*events, OMITTED], allocator, emptied=[len(events)]).final


def served_scenarios(scenarios: Sequence[Scenario], model: Any, rules: Rules) -> tuple[Scenario, ...]:
    """The scenarios to serve `model` under: as given means as its checkpoint is quantized, where its config says so;
    else fp8 and int4 weights are those that a server has.

    Raises `ScenarioError` where another scenario alone would quantize such a model anew.
    """
    quantization = checkpoint_config_of(model)
    if not isinstance(quantization, dict):
        return tuple(as_served(scenario, rules) for scenario in scenarios)
    method = quantization.get("quant_method", "no method")
    layout = checkpoint_layout(quantization, unpacked=rules.products == "unpacks")
    title = f"weights of the checkpoint ({method})"
    served = tuple(
        replace(scenario, title=title, recipe="quantized", layout=layout)
        for scenario in scenarios
        if scenario.recipe == "as-given"
    )
    if not served:
        raise ScenarioError(f"the checkpoint's weights are quantized already ({method}): serve it as-given")
    return served


def _check_states(config: Any, layers: Sequence[CachedLayer], name: str) -> None:
    hidden = has_states(config) and not any(layer.states for layer in layers)
    if hidden or any(layer.kind == STATE and not layer.states for layer in layers):
        raise InputError(f"{name} keeps states in a form of its own: of those a paged server's blocks are not known")
