"""The runs by which a server is predicted: of a decoded token, a step, the images before it, and a captured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch

from memsize.analysis.runner import Runner
from memsize.analysis.serving.kv_blocks import STATE, state_bytes, token_bytes
from memsize.analysis.serving.weights import WEIGHTS, weights_in
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import processors
from memsize.device.gpu_estimate import estimate_gpu
from memsize.device.replay import replay
from memsize.errors import InputError
from memsize.loading.hubs import checkpoint_config_of
from memsize.model.input_tensors import ModelInputs
from memsize.precision.quantization_config import quantization_of
from memsize.records.gpu import GpuEstimate
from memsize.records.trace import Trace
from memsize.spec.generation import KV_BYTES, Generation, ServerArguments, Serving
from memsize.spec.scenario import Scenario
from memsize.spec.stack import Stack
from memsize.workloads.generation import GenerationSteps, Prompts
from memsize.workloads.kv_caches import CachedLayer
from memsize.workloads.served_parts import has_states, state_kind
from memsize.workloads.serving import ImageRun, ProfileRun, image_encoder, reads_images, text_config, text_only

MIXED: Final = 8192
"""The tokens of a prompt with images: more than those stand for."""
_PROMPT: Final = 8
"""The tokens of the prompt that is traced to measure the bytes of one more token in the cache."""
_FP4_SINCE: Final = (10, 0)
"""The compute capability with products of four bits (vLLM's `model_executor/kernels/linear/nvfp4/flashinfer.py`)."""


class Images(NamedTuple):
    """A run of an image encoder: tokens of an image, and the bytes that the run, its results and the images need."""

    tokens: int
    step: int
    result: int
    pixels: int


class StepRun(NamedTuple):
    """A traced step, what the GPU needs for it, and the bytes of that beyond the weights."""

    trace: Trace
    estimate: GpuEstimate
    bytes: int


@dataclass(frozen=True)
class ServerRuns:
    """The runs of a model as one GPU stores it, and how it is served."""

    runner: Runner
    prompts: Prompts
    serving: Serving
    allocator: AllocatorConfig
    progress: Callable[[str], None] = lambda _: None
    quantized: dict[str, Trace] = field(default_factory=dict)
    """The trace of each scenario that quantizes."""
    _decoded: dict[tuple[Runner, str], tuple[Trace, Sequence[Sequence[CachedLayer]]]] = field(default_factory=dict)
    """A decoded token, by model and scenario."""

    def decoded(self, scenario: Scenario) -> tuple[Trace, Sequence[Sequence[CachedLayer]]]:
        """Trace a prompt and one token more, with what each layer then caches."""
        key = self.runner, scenario.name
        if key not in self._decoded:
            workload = GenerationSteps(Generation(prompt=_PROMPT, max_new_tokens=2))
            trace = self.runner.with_inputs(self.texts(_PROMPT), 1).run(workload, scenario)
            self._decoded[key] = trace, workload.record.steps
        return self._decoded[key]

    def cached_layers(self, scenario: Scenario, served: ServerArguments) -> list[CachedLayer]:
        """The layers that cache, each with the bytes of a token, or of a state. Raises `InputError` for a model that is
        not covered.
        """
        self.progress(f"{scenario.name}: the cache of one token")
        config, (trace, steps) = text_config(self.runner.model), self.decoded(scenario)
        if scenario.recipe == "quantized":
            self.quantized[scenario.name] = trace
        cached = (storage for storage in trace.storages if storage.role == "KV cache" and storage.bytes)
        own = min((storage.bytes // math.prod(storage.shape) for storage in cached), default=1)
        width = own if self.serving.kv_cache_dtype is None else KV_BYTES[self.serving.kv_cache_dtype]
        _check_states(config, steps[1], self.runner.name)
        drafted = served.speculation.tokens if served.speculation else 0
        layers: list[CachedLayer] = []
        for before, now in zip(steps[0], steps[1], strict=True):
            if now.states:
                layers.append(CachedLayer(STATE, state_bytes(now, _state_width(config), drafted)))
            if kind := now.kind.removeprefix(STATE).removeprefix(" and "):
                layers.append(CachedLayer(kind, token_bytes((now.bytes - before.bytes) // own, width, config)))
        if not served.rules.encodes_first:  # V0 has a cache for each layer, also for those that read images
            crossed = getattr(config, "cross_attention_layers", None) or ()
            layers += [max(layers, key=lambda layer: layer.bytes)] * len(crossed)
        shared = self.serving.tensor_parallel_size == 1 or bool(state_kind(config))
        if not shared and any(layer.states for layer in steps[1]):
            raise InputError(f"{self.runner.name} keeps states as in Mamba: memsize does not divide those among GPUs")
        return layers

    def step(
        self, run: ProfileRun | ImageRun, inputs: ModelInputs, batch: int, scenario: Scenario, served: ServerArguments
    ) -> StepRun:
        """Run `batch` samples of the `inputs` through the model, or through its encoder of images."""
        trace = self._on(inputs, batch, served).run(run, scenario)
        estimate = estimate_gpu(trace, self.runner.gpu, config=self.allocator)
        return StepRun(trace, estimate, estimate.allocated - weights_in(trace, self.allocator).allocated)

    def images(self, images: int, scenario: Scenario, served: ServerArguments) -> Images:
        """Run the encoder of images; without one, all sizes are 0."""
        if image_encoder(self.runner.model) is None:
            return Images(0, 0, 0, 0)
        run = ImageRun()
        step = self.step(run, self.prompts(MIXED), images, scenario, served)
        return Images(run.tokens // images, step.bytes, run.bytes, run.pixels)

    def captured(self, tokens: int, scenario: Scenario, served: ServerArguments) -> int:
        """Bytes of the segments of a step of `tokens` sequences, which its CUDA graph has in a pool of its own."""
        run = ProfileRun(served.rules, 0, served.tp, processors(self.runner.gpu)[1], fp4=self.multiplies_fp4())
        trace = self._on(self.texts(tokens), 1, served).run(run, scenario)
        stored = {number for number, storage in enumerate(trace.storages) if storage.role in WEIGHTS}
        segments = replay((event.storage, event.delta) for event in trace.events if event.storage not in stored)
        return segments.reserved.bytes

    def texts(self, length: int) -> ModelInputs:
        """A text of so many tokens, without images."""
        return text_only(self.prompts(MIXED), length) if reads_images(self.runner.model) else self.prompts(length)

    def stack(self, served: ServerArguments) -> Stack:
        """The stack of the request; where it names no PyTorch, the one that the server pins."""
        stack = self.runner.stack
        return stack if stack.torch else replace(stack, torch=served.rules.torch)

    def multiplies_fp4(self) -> bool:
        """Whether FlashInfer multiplies NVFP4 weights in four bits; Marlin does not (vLLM's compressed_tensors.py)."""
        quantization, config = quantization_of(self.runner.model), checkpoint_config_of(self.runner.model)
        if quantization is None or quantization.layout.name != "nvfp4" or not isinstance(config, dict):
            return False
        groups = config.get("config_groups", {}).values()
        quantizes_inputs = not groups or any(group.get("input_activations") for group in groups)
        return quantizes_inputs and self.runner.gpu.capability >= _FP4_SINCE

    def _on(self, inputs: ModelInputs, batch: int, served: ServerArguments) -> Runner:
        runner = self.runner.with_inputs(inputs, batch)
        runner.stack = self.stack(served)
        # Before Ampere, servers have kernels of their own for attention, which need no scores either (XFormers).
        runner.gpu = replace(runner.gpu, capability=max(runner.gpu.capability, (8, 0)))
        return runner


def _state_width(config: Any) -> int | None:
    """Bytes of a number in the states of layers as in Mamba, where the config says so."""
    named = (getattr(config, name, None) for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
    dtypes = (getattr(torch, str(name).removeprefix("torch."), None) for name in named if name)
    return next((dtype.itemsize for dtype in dtypes if isinstance(dtype, torch.dtype)), None)


def _check_states(config: Any, layers: Sequence[CachedLayer], name: str) -> None:
    hidden = has_states(config) and not any(layer.states for layer in layers)
    if hidden or any(layer.kind == STATE and not layer.states for layer in layers):
        raise InputError(f"{name} keeps states in a form of its own: of those a paged server's blocks are not known")
