"""Size of a paged server's KV cache: the memory of a GPU minus weights, the largest step, and memory outside PyTorch.
Other ways to serve the model are tried where there is no room for one request.

It is the arithmetic of vLLM's `Worker.determine_available_memory` (`vllm/v1/worker/gpu_worker.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from memsize.analysis.findings.generation import SERVING_RULES
from memsize.analysis.remedies import Ladder, Need, Remedy, RemedySearch, try_remedies
from memsize.analysis.runner import Runner
from memsize.analysis.serving.kv_blocks import STATE, BlockLayout, block_layout, state_bytes
from memsize.device.cards import CARDS
from memsize.device.cuda_context import cuda_context
from memsize.device.gpu_estimate import estimate_gpu
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.fit import Remedied
from memsize.records.gpu import Card, Interval
from memsize.records.serving import ServingReport, ServingRow
from memsize.spec.generation import KV_BYTES, Generation, Serving
from memsize.spec.scenario import Scenario, quantized_from
from memsize.torch_internals.isolation import collector_paused
from memsize.units import GiB, format_bytes
from memsize.workloads.caches import CachedLayer
from memsize.workloads.generation import GenerationSteps, Prompts, positions
from memsize.workloads.serving import ProfileRun, part_of, text_model

LEAST_OUTSIDE: Final = GiB // 100
"""The least that vLLM's logs in public repositories call non_torch_memory: 0.01 to 0.08 GiB on one card, 0.16 on an
H100 (vllm-project/vllm#12126), 0.20 on each of sixteen (#14447). That is what came after the CUDA context was made. The
most is the whole context, which engines counted until vllm-project/vllm#19312.
"""
_WEIGHTS = ("parameter", "buffer")
_PROMPT = 8
"""The tokens of the prompt that is traced to measure the bytes of one more token in the cache."""
_ASSUMED = (
    "the largest step runs transformers' own forward: the fused kernels of a server need less between its layers",
    "CUDA graphs come on top of what the server may take, and so do adapters and the models of speculative decoding",
)
_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 lets it"
_STATEFUL = ("linear", "mamba", "recurrent", "conv")
"""Words in the names of layers that keep a state."""
_PLAIN = (
    "layers with a state run transformers' plain PyTorch code, which needs far more for a moment than a server's "
    "kernels: the cache has at least these blocks"
)
UTILIZATION: Final = 0.95
"""The largest part of a GPU's memory that is tried."""
_CARDS: Final = (2, 4, 8)


@dataclass(frozen=True)
class Server:
    """A model as one GPU stores it, and how it is served."""

    runner: Runner
    prompts: Prompts
    serving: Serving
    progress: Callable[[str], None] = lambda _: None
    _profiles: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)
    """For each model, the bytes of its weights, and the bytes that its largest step needs beyond them."""

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
        rows: list[ServingRow] = []
        layouts: list[BlockLayout] = []
        errors: list[Exception] = []
        with collector_paused():
            for scenario in scenarios:
                row = ServingRow(scenario.name, scenario.title)
                try:
                    layouts.append(self._layout(scenario, config))
                    rows.append(self._row(row, scenario, layouts[-1], context))
                except (ScenarioError, ForwardError) as error:
                    errors.append(error)
                    rows.append(replace(row, reason=str(error)))
        if not layouts or len(errors) == len(rows):
            raise errors[0]
        serving = replace(self.serving, max_model_len=context)
        ran = next(number for number, row in enumerate(rows) if row.reason is None)
        paged = rows[ran].paged
        starts = paged is not None and paged.concurrency.low >= 1
        remedied = None if starts else self._remedied(scenarios[ran], config, context)
        beyond = (
            f"the model has positions for {most or 0:,} tokens: vLLM takes no longer context on its own ({_ALLOWED})"
        )
        notes = (*notes, *([beyond] if most and context > most else []), *layouts[0].notes(self.serving.block_size))
        return ServingReport(
            model=self.runner.name,
            card=self.runner.gpu,
            asked=serving.record,
            budget=self._budget,
            groups=layouts[0].groups,
            serving_rows=tuple(rows),
            remedied=remedied,
            findings=SERVING_RULES.findings((tuple(rows), serving, self.runner.gpu, self._budget, remedied)),
            notes=tuple(dict.fromkeys(notes)),
            assumptions=(*_ASSUMED, *([_PLAIN] if any(group.kind == STATE for group in layouts[0].groups) else [])),
        )

    def _config(self) -> Any:
        """The config of the model; raises `InputError` for a model that is not covered."""
        name, config = self.runner.name, getattr(self.runner.model, "config", None)
        for part, what in (("vision_config", "images"), ("audio_config", "sound")):
            if getattr(config, part, None) is not None:
                raise InputError(f"{name} also reads {what}: serve the config of its text model")
        is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
        if is_chunked or getattr(config, "is_encoder_decoder", False):
            what = "chunked attention" if is_chunked else "an encoder"
            raise InputError(f"{name} has {what}: only full and latent attention, windows and states are covered")
        text_model(self.runner.model, name)
        return config

    @property
    def _budget(self) -> int:
        return int(self.runner.gpu.bytes * self.serving.gpu_memory_utilization)

    def _remedied(self, scenario: Scenario, config: Any, context: int) -> Remedied:
        def needed(served: ServedModel) -> int:
            server = replace(self, runner=served.runner, serving=served.serving)
            layout = server._layout(served.scenario, config)
            row = server._row(ServingRow("", ""), served.scenario, layout, context)
            request = layout.request(served.serving, context) * layout.block_bytes
            return row.weights + row.profile + row.non_torch.high + request

        return remedies_for_server(ServedModel(self.runner, self.serving, scenario), context, needed)

    def _layout(self, scenario: Scenario, config: Any) -> BlockLayout:
        self.progress(f"{scenario.name}: the cache of one token")
        workload = GenerationSteps(Generation(prompt=_PROMPT, max_new_tokens=2))
        trace = self.runner.with_inputs(self.prompts(_PROMPT), 1).run(workload, scenario)
        steps = workload.record.steps
        cached = (storage for storage in trace.storages if storage.role == "KV cache" and storage.bytes)
        own = min((storage.bytes // math.prod(storage.shape) for storage in cached), default=1)
        width = own if self.serving.kv_cache_dtype is None else KV_BYTES[self.serving.kv_cache_dtype]
        _check_states(config, steps[1], self.runner.name)
        named = (getattr(config, name, None) for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
        dtypes = (getattr(torch, str(name).removeprefix("torch."), None) for name in named if name)
        state_width = next((dtype.itemsize for dtype in dtypes if isinstance(dtype, torch.dtype)), None)
        layers: list[CachedLayer] = []
        for before, now in zip(steps[0], steps[1], strict=True):
            if now.states:
                layers.append(CachedLayer(STATE, state_bytes(now, state_width)))
            if kind := now.kind.removeprefix(STATE).removeprefix(" and "):
                layers.append(CachedLayer(kind, (now.bytes - before.bytes) // own * width))
        if self.serving.tensor_parallel_size > 1 and any(layer.states for layer in steps[1]):
            raise InputError(f"{self.runner.name} keeps states as in Mamba: memsize does not divide those among cards")
        window = getattr(config, "sliding_window", None)
        return block_layout(layers, window, self.serving.block_size, self.runner.name)

    def _row(self, row: ServingRow, scenario: Scenario, layout: BlockLayout, context: int) -> ServingRow:
        serving, runner = self.serving, self.runner
        run = runner, scenario, serving.max_num_batched_tokens, serving.rows, serving.tensor_parallel_size
        weights, profile = self._profiles.get(run) or self._profiles.setdefault(run, self._profiled(scenario))
        outside = Interval(LEAST_OUTSIDE, cuda_context(runner.gpu, runner.stack).high)
        left = [self._budget - weights - profile - taken for taken in reversed(outside)]
        row = replace(row, weights=weights, profile=profile, non_torch=outside)
        if left[1] < layout.block_bytes:
            return replace(row, shortage=layout.block_bytes - left[1])
        available = Interval(max(left[0], 0), left[1])
        return replace(row, paged=layout.paged(available, serving, context))

    def _profiled(self, scenario: Scenario) -> tuple[int, int]:
        self.progress(f"{scenario.name}: a step of {self.serving.max_num_batched_tokens:,} tokens")
        serving = self.serving
        length = serving.max_num_batched_tokens // serving.rows
        texts = -(-serving.max_num_batched_tokens // length)
        runner = self.runner.with_inputs(self.prompts(length), texts)
        trace = runner.run(ProfileRun(serving.rows, serving.tensor_parallel_size), scenario)
        weights = sum(storage.bytes for storage in trace.storages if storage.role in _WEIGHTS)
        return weights, estimate_gpu(trace, runner.gpu).allocated - weights


def _check_states(config: Any, layers: Sequence[CachedLayer], name: str) -> None:
    kinds = getattr(config, "layer_types", None) or getattr(config, "block_types", None) or ()
    is_stateful = any(word in str(kind) for kind in kinds for word in _STATEFUL)
    hidden = is_stateful and not any(layer.states for layer in layers)
    if hidden or any(layer.kind == STATE and not layer.states for layer in layers):
        raise InputError(f"{name} keeps states in a form of its own: of those a paged server's blocks are not known")


# -- remedies for a server that does not start -------------------------------------------------------------------------


@dataclass(frozen=True)
class ServedModel:
    """A model on one GPU, how it is served, and how it is stored."""

    runner: Runner
    serving: Serving
    scenario: Scenario

    @property
    def budget(self) -> int:
        """The bytes of its GPU that the server may take."""
        return int(self.runner.gpu.bytes * self.serving.gpu_memory_utilization)


def remedies_for_server(base: ServedModel, context: int, needed: Callable[[ServedModel], int]) -> Remedied:
    """Try each remedy for one request of `context` tokens; `needed` returns the bytes that it needs on each GPU."""
    search = RemedySearch(base, lambda served: Need(needed(served), served.budget))
    own = base.runner.gpu
    larger = (
        _on_gpu(card)
        for card in sorted(CARDS.values(), key=lambda card: card.bytes)
        if card.platform == "CUDA" and card.bytes > own.bytes
        if card.bytes * base.serving.gpu_memory_utilization >= search.need.bytes
    )
    ladders = (Ladder(map(_on_cards, _CARDS), until="refusal"), Ladder(larger, until="refusal"))
    scenario = base.scenario.name
    return try_remedies(search, _REMEDIES, ladders, scenario=scenario, gpu=own.name, size=context, combine=False)


def _stored_as(name: str, title: str) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        if served.scenario.recipe == "quantized":
            raise InputError("the weights are quantized already")
        return replace(served, scenario=quantized_from(served.scenario, name))

    return Remedy(f"{title} weights", f"--scenario {name}", "rounded weights", "numbers", apply)


def _fp8_cache(served: ServedModel) -> ServedModel:
    if served.serving.kv_cache_dtype is not None:
        raise InputError(f"the cache is in {served.serving.kv_cache_dtype} already")
    return replace(served, serving=replace(served.serving, kv_cache_dtype="fp8"))


def _smaller_steps(served: ServedModel) -> ServedModel:
    tokens = served.serving.max_num_batched_tokens // 4
    if tokens < 1:
        raise InputError("a step has no fewer tokens")
    return replace(served, serving=replace(served.serving, max_num_batched_tokens=tokens))


def _more_of_the_card(served: ServedModel) -> ServedModel:
    if served.serving.gpu_memory_utilization >= UTILIZATION:
        raise InputError(f"the server may take {served.serving.gpu_memory_utilization:.0%} of the card already")
    return replace(served, serving=replace(served.serving, gpu_memory_utilization=UTILIZATION))


_REMEDIES: Final = (
    _stored_as("fp8-weight", "fp8"),
    _stored_as("int4-weight", "int4"),
    Remedy("fp8 KV cache", "--kv-cache-dtype fp8", "rounded keys and values", "numbers", _fp8_cache),
    Remedy(
        "smaller steps", "a quarter of --max-num-batched-tokens", "long prompts take longer", "speed", _smaller_steps
    ),
    Remedy(
        "more of the card",
        f"--gpu-memory-utilization {UTILIZATION}",
        "less room for CUDA graphs and whatever else is on it",
        "nothing",
        _more_of_the_card,
    ),
)


def _on_cards(cards: int) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        if served.serving.tensor_parallel_size > 1:
            raise InputError("the model is divided among cards already")
        runner = served.runner
        part = part_of(runner.model, cards, runner.name)
        divided = Runner(
            runner.name, part, runner.inputs, False, gpu=runner.gpu, stack=runner.stack, whole=runner.whole
        )
        return replace(served, runner=divided, serving=replace(served.serving, tensor_parallel_size=cards))

    name, option = f"{cards} cards", f"--tensor-parallel-size {cards}"
    return Remedy(name, option, f"{cards} cards in place of one", "hardware", apply)


def _on_gpu(card: Card) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        runner = served.runner
        moved = Runner(
            runner.name, runner.model, runner.inputs, False, gpu=card, stack=runner.stack, whole=runner.whole
        )
        return replace(served, runner=moved)

    return Remedy(card.name, f"a card of {format_bytes(card.bytes)}", "another card", "hardware", apply)
