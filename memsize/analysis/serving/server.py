"""Size of a paged server's KV cache: the memory of a GPU minus weights, the largest step, and memory outside PyTorch.

It is the arithmetic of vLLM's `Worker.determine_available_memory` (`vllm/v1/worker/gpu_worker.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from memsize.analysis.findings.generation import SERVING_RULES
from memsize.analysis.runner import Runner
from memsize.analysis.serving.kv_blocks import STATE, BlockLayout, block_layout, state_bytes
from memsize.analysis.serving.server_remedies import ServedModel, remedies_for_server
from memsize.device.cuda_context import cuda_context
from memsize.device.gpu_estimate import estimate_gpu
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.fit import Remedied
from memsize.records.gpu import Interval
from memsize.records.serving import ServingReport, ServingRow
from memsize.records.trace import Trace
from memsize.spec.generation import KV_BYTES, Generation, Serving
from memsize.spec.scenario import Scenario
from memsize.torch_internals.isolation import collector_paused
from memsize.units import GiB
from memsize.workloads.caches import CachedLayer
from memsize.workloads.generation import GenerationSteps, Prompts, positions
from memsize.workloads.serving import ProfileRun, text_model

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
        config = _text_config(self.runner)
        context = self._context()
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
        remedied = None if _starts(rows[ran]) else self._remedied(scenarios[ran], config, context)
        return ServingReport(
            model=self.runner.name,
            card=self.runner.gpu,
            asked=serving.record,
            budget=self._budget,
            groups=layouts[0].groups,
            serving_rows=tuple(rows),
            remedied=remedied,
            findings=SERVING_RULES.findings((tuple(rows), serving, self.runner.gpu, self._budget, remedied)),
            notes=tuple(dict.fromkeys((*notes, *self._beyond(context), *layouts[0].notes(self.serving.block_size)))),
            assumptions=(*_ASSUMED, *([_PLAIN] if any(group.kind == STATE for group in layouts[0].groups) else [])),
        )

    @property
    def _budget(self) -> int:
        return int(self.runner.gpu.bytes * self.serving.gpu_memory_utilization)

    def _remedied(self, scenario: Scenario, config: Any, context: int) -> Remedied:
        """Try remedies that leave room for one request."""

        def needed(served: ServedModel) -> int:
            server = replace(self, runner=served.runner, serving=served.serving)
            layout = server._layout(served.scenario, config)
            row = server._row(ServingRow("", ""), served.scenario, layout, context)
            request = layout.request(served.serving, context) * layout.block_bytes
            return row.weights + row.profile + row.non_torch.high + request

        return remedies_for_server(ServedModel(self.runner, self.serving, scenario), context, needed)

    def _context(self) -> int:
        context = self.serving.max_model_len or positions(self.runner.model)
        if context is None:
            raise InputError(f"{self.runner.name} does not say how long a request may be: give --max-model-len")
        return context

    def _beyond(self, context: int) -> Iterator[str]:
        """Yield a note where a request is longer than the model has positions for."""
        most = positions(self.runner.model)
        if most and context > most:
            yield f"the model has positions for {most:,} tokens: vLLM takes no longer context on its own ({_ALLOWED})"

    def _layout(self, scenario: Scenario, config: Any) -> BlockLayout:
        """Lay out the blocks of the cache, from the growth of the model's own cache by one token."""
        self.progress(f"{scenario.name}: the cache of one token")
        steps: dict[int, tuple[CachedLayer, ...]] = {}
        workload = GenerationSteps(Generation(prompt=_PROMPT, max_new_tokens=2), None, steps.__setitem__)
        trace = self.runner.with_inputs(self.prompts(_PROMPT), 1).run(workload, scenario)
        own = _width(trace)
        width = own if self.serving.kv_cache_dtype is None else KV_BYTES[self.serving.kv_cache_dtype]
        _check_states(config, steps[1], self.runner.name)
        layers: list[CachedLayer] = []
        for before, now in zip(steps[0], steps[1], strict=True):
            if now.states:
                layers.append(CachedLayer(STATE, state_bytes(now, _state_width(config))))
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
        """Measure the bytes of the weights, and the bytes that the largest step needs beyond them."""
        self.progress(f"{scenario.name}: a step of {self.serving.max_num_batched_tokens:,} tokens")
        serving = self.serving
        length = serving.max_num_batched_tokens // serving.rows
        texts = -(-serving.max_num_batched_tokens // length)
        runner = self.runner.with_inputs(self.prompts(length), texts)
        trace = runner.run(ProfileRun(serving.rows, serving.tensor_parallel_size), scenario)
        weights = sum(storage.bytes for storage in trace.storages if storage.role in _WEIGHTS)
        return weights, estimate_gpu(trace, runner.gpu).allocated - weights


def _starts(row: ServingRow) -> bool:
    """Whether there is room for one request, whatever is outside PyTorch."""
    return row.paged is not None and row.paged.concurrency.low >= 1


def _check_states(config: Any, layers: Sequence[CachedLayer], name: str) -> None:
    """Raise `InputError` for a model with states that are not those of transformers' linear attention."""
    kinds = " ".join(
        map(str, next(filter(None, (getattr(config, entry, None) for entry in ("layer_types", "block_types"))), ()))
    )
    hidden = any(kind in kinds for kind in _STATEFUL) and not any(layer.states for layer in layers)
    if hidden or any(layer.kind == STATE and not layer.states for layer in layers):
        raise InputError(f"{name} keeps states in a form of its own: of those a paged server's blocks are not known")


def _width(trace: Trace) -> int:
    """Return the bytes of one number in a cache of keys and values; 1 where there is no cache. States may be wider."""
    cached = (storage for storage in trace.storages if storage.role == "KV cache" and storage.bytes)
    return min((storage.bytes // math.prod(storage.shape) for storage in cached), default=1)


def _state_width(config: Any) -> int | None:
    """Return the bytes of one number in a recurrent state, where the config says its dtype."""
    named = (getattr(config, name, None) for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
    dtypes = (getattr(torch, str(name).removeprefix("torch."), None) for name in named if name)
    return next((dtype.itemsize for dtype in dtypes if isinstance(dtype, torch.dtype)), None)


def _text_config(runner: Runner) -> Any:
    """Return the config of a model to serve; raises `InputError` for one that is not covered."""
    config: Any = getattr(runner.model, "config", None)
    for name, what in (("vision_config", "images"), ("audio_config", "sound")):
        if getattr(config, name, None) is not None:
            raise InputError(f"{runner.name} also reads {what}: serve the config of its text model")
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False) or "chunked_attention" in kinds:
        what = "chunked attention" if "chunked_attention" in kinds else "an encoder"
        raise InputError(f"{runner.name} has {what}: only full and latent attention, windows and states are covered")
    text_model(runner.model, runner.name)
    return config
