"""Size of a paged server's KV cache: the memory of a GPU minus weights, the largest step, and memory outside PyTorch.

It is the arithmetic of vLLM's `Worker.determine_available_memory` (`vllm/v1/worker/gpu_worker.py`), less
what vLLM sets aside for CUDA graphs (`graph_memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from memsize.analysis.findings.generation import SERVING_RULES, Served
from memsize.analysis.remedies import Need
from memsize.analysis.runner import Runner
from memsize.analysis.serving.drafting import Draft, drafting_layers
from memsize.analysis.serving.kv_blocks import BlockLayout, block_layout, pooled
from memsize.analysis.serving.largest_step import LargestStep, largest_step
from memsize.analysis.serving.logged_memory import logged_memory
from memsize.analysis.serving.server_remedies import ServedModel, arguments_of, assumptions, remedies_for_server
from memsize.analysis.serving.server_runs import ServerRuns
from memsize.device.cuda_context import code_of_libraries, cuda_context
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.processes.patches import collector_paused
from memsize.records.fit import Remedied
from memsize.records.gpu import Interval
from memsize.records.serving import ServingReport, ServingRow
from memsize.spec.generation import ServerArguments
from memsize.spec.scenario import Scenario
from memsize.units import format_bytes
from memsize.workloads.generation import positions
from memsize.workloads.served_parts import adapter_slots, served_kind, state_blocks
from memsize.workloads.serving import reads_images, text_config, text_model

_ALLOWED: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 allows it"


@dataclass(frozen=True)
class Server:
    """A model as one GPU stores it, how it is served, and what drafts its tokens."""

    runs: ServerRuns
    draft: Draft | None = None
    _steps: dict[tuple[object, ...], LargestStep] = field(default_factory=dict)
    """By model and step."""

    @property
    def runner(self) -> Runner:
        return self.runs.runner

    def report(self, scenarios: Sequence[Scenario], notes: Sequence[str]) -> ServingReport:
        """Compute one row for each scenario.

        Raises `InputError` where the model's cache is not covered, and the error of the first scenario where the model
        runs under none.
        """
        self._check_coverage()
        most = positions(self.runner.model)
        context = self.runs.serving.max_model_len or most
        if context is None:
            raise InputError(f"{self.runner.name} does not say how long a request may be: give --max-model-len")
        served = arguments_of(self.runner, self.runs.serving, context)
        rows: list[ServingRow] = []
        layouts: list[BlockLayout] = []
        errors: list[Exception] = []
        with collector_paused():
            for scenario in scenarios:
                row = ServingRow(scenario.name, scenario.title)
                try:
                    layouts.append(self._layout(scenario, served))
                    rows.append(self._row(row, scenario, layouts[-1], served))
                except (ScenarioError, ForwardError) as error:
                    errors.append(error)
                    rows.append(replace(row, reason=str(error)))
        if not layouts or len(errors) == len(rows):
            raise errors[0]
        ran = next(number for number, row in enumerate(rows) if row.reason is None)
        paged = rows[ran].paged
        starts = paged is not None and paged.concurrency.low >= 1
        remedied = None if starts else self._remedied(scenarios[ran], context)
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
                Served(tuple(rows), served, self.runner.gpu, budget, remedied, self.runs.quantized)
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
        drafting = max((step.drafting for step in self._steps.values()), default=0)
        if served.speculation and drafting:
            tokens = f"{served.speculation.tokens} token{'s' * (served.speculation.tokens > 1)}"
            yield f"the weights include {format_bytes(drafting)} to draft {tokens} before each step"

    def _check_coverage(self) -> None:
        """Raise `InputError` for a model that is not covered."""
        name, config = self.runner.name, getattr(self.runner.model, "config", None)
        if getattr(config, "audio_config", None) is not None:
            raise InputError(f"{name} also reads sound: serve the config of its text model")
        is_chunked = "chunked_attention" in (getattr(text_config(self.runner.model), "layer_types", None) or ())
        if is_chunked or getattr(config, "is_encoder_decoder", False):
            what = "chunked attention" if is_chunked else "an encoder"
            raise InputError(f"{name} has {what}: only full and latent attention, windows and states are covered")
        text_model(self.runner.model, name)

    def _budget(self, served: ServerArguments) -> int:
        """The part of the card that the server may take: a set size of the cache comes on top of the rest."""
        return int(self.runner.gpu.bytes * (1 if served.kv_bytes else served.utilization))

    def _remedied(self, scenario: Scenario, context: int) -> Remedied:
        def needed(model: ServedModel) -> Need:
            runs = replace(self.runs, runner=model.runner, serving=model.serving)
            server = replace(self, runs=runs, draft=self.draft and self.draft.beside(model.serving))
            served = arguments_of(model.runner, model.serving, context)
            layout = server._layout(model.scenario, served)
            row = server._row(ServingRow("", ""), model.scenario, layout, served)
            request = layout.request(context, served.tokens * served.rules.in_flight) * layout.block_bytes
            taken = row.weights + row.profile + row.non_torch.high + row.graphs.high + request
            return Need(taken, server._budget(served))

        return remedies_for_server(ServedModel(self.runner, self.runs.serving, scenario), context, needed)

    def _layout(self, scenario: Scenario, served: ServerArguments) -> BlockLayout:
        layers, rules = self.runs.cached_layers(scenario, served), served.rules
        layers += drafting_layers(layers, self.runs, self.draft, served)
        window = getattr(text_config(self.runner.model), "sliding_window", None)
        if not rules.profiles:
            layers = pooled(layers, self.runner.name, rules, served_kind(self.runner.model, is_quantized=False))
        return block_layout(
            layers,
            window,
            served.block,
            self.runner.name,
            windows=rules.windows,
            padding=rules.padding,
            states=state_blocks(self.runner.model, rules, self.runner.gpu),
            drafted=served.speculation.tokens if served.speculation else 0,
        )

    def _row(self, row: ServingRow, scenario: Scenario, layout: BlockLayout, served: ServerArguments) -> ServingRow:
        largest = self._largest_step(scenario, served)
        graphs, outside = largest.graphs, self._outside(largest, served)
        row = replace(row, weights=largest.weights, profile=largest.step, non_torch=outside, graphs=graphs)
        rest = self._budget(served) - largest.weights - largest.step
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

    def _largest_step(self, scenario: Scenario, served: ServerArguments) -> LargestStep:
        of_step = replace(served, context=0, kv_dtype=None, kv_bytes=None, utilization=0, block=0, defaults=())
        key = self.runner, scenario, of_step
        if key not in self._steps:
            self._steps[key] = largest_step(self.runs, self.draft, scenario, served)
        return self._steps[key]

    def _outside(self, largest: LargestStep, served: ServerArguments) -> Interval:
        """Memory taken beside tensors, as the release counts it: outside PyTorch, and where it counts segments also
        what is free in them; in those of a step that depends on the order of all allocations. SGLang only counts what
        was taken before the weights, and its share of the memory is that of the rest.
        """
        gpu, stack, rules = self.runner.gpu, self.runs.stack(served), served.rules
        logged, exchange = logged_memory(gpu, served)
        code = code_of_libraries(gpu, stack, largest.ops)
        free = Interval(largest.slack, largest.slack + largest.free)
        context = cuda_context(gpu, stack, ()) if rules.outside == "all" or not rules.profiles else Interval(0, 0)
        if rules.profiles:
            outside = Interval(max(code.low, logged.low) + largest.local, max(code.high, logged.high) + largest.local)
        else:
            share = 0 if served.kv_bytes else served.utilization
            context, outside = (Interval(*(round(end * share) for end in ends)) for ends in (context, exchange))
        return Interval(*(sum(ends) for ends in zip(outside, context, free, strict=True)))
