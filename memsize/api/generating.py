"""Memory of a language model that generates, by itself or behind a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from memsize.api.keywords import takes
from memsize.api.opened import Loaded, assisted, model_of, prompts_of, with_inputs
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import InputError
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.generation import GENERATED, SERVED, Generation
from memsize.spec.model_request import ModelRequest
from memsize.spec.requests import GenerateRequest, ServeRequest
from memsize.spec.scenario import refuse_compiled, select, selected

if TYPE_CHECKING:
    from memsize.analysis.serving.drafting import Draft
    from memsize.analysis.serving.server_runs import ServerRuns
    from memsize.records.generation import GenerationReport
    from memsize.records.report import Report
    from memsize.records.serving import ServingReport

_ONE_TOKEN: Final = "its input has a size of its own, whatever the prompt: the decoder begins with one token"
_OF_TOKENS: Final = ("prompt", "assistant_model", "prompt_lookup_num_tokens", "step")


@takes(GenerateRequest)
def generate(request: GenerateRequest, *, progress: Callable[[str], None] | None = None) -> GenerationReport | Report:
    """Report what a model holds while it generates tokens: reading the prompt, each step after it, and the KV cache.
    For a pipeline of diffusers, return a `Report` with the peak of each phase: text encoding, denoising, decoding.

    The model is given as to `report`; its own ``generate`` runs, with an input that is made for each length of
    `prompt` (of a model that isn't a library's, its first dimension after the batch). Several prompts and batch sizes
    give a row each. Of the tokens that are proposed before each step, none turns out to be right, which takes the most.
    `step` is a function of the model, those of its inputs that it has parameters for, and ``max_new_tokens``. Where a
    row of the first scenario does not fit, what would is tried.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    model, gpu, report_progress = replace(request.model, mode="eval"), request.gpu, progress or (lambda _: None)
    where, allocator = card(gpu.name or DEFAULT_GPU), AllocatorConfig.of(gpu.allocator, gpu.releases.release)
    scenarios = selected(request.scenarios, request.compile, GENERATED)
    lengths, sizes = sorted(set(_counts(request.prompt, "prompts"))), _counts(request.batch_size, "batches")
    generations = [replace(request.generation, prompt=length, draft=request.draft) for length in lengths]
    _check(generations[0], sizes, own_step=request.step is not None)
    with (
        model_of(model, report_progress, where.name) as loaded,
        assisted(loaded, request.draft, request.assistant_model, report_progress=report_progress) as draft,
    ):
        from memsize.analysis.fit.remedy_trials import remedies_for_generations
        from memsize.analysis.generation.generation_rows import GenerationRequest, report_generation
        from memsize.analysis.runner import Runner
        from memsize.loading import load_loop
        from memsize.workloads.generation import generate_of, have_own_length
        from memsize.workloads.pipeline_phases import phases_of

        if phases_of(loaded.model):
            return _report_pipeline(request, loaded, sizes, report_progress)
        if request.step is None:  # before a prompt is made, which a model of images has not either
            generate_of(loaded.model, loaded.name)
        prompts = prompts_of(model, loaded)
        inputs, notes = prompts(lengths[0]), loaded.notes
        if request.step is None and have_own_length(prompts, lengths[0]):
            if len(lengths) > 1:
                raise InputError(f"{loaded.name} reads an input of one size: lengths of a prompt cannot be compared")
            generations = [replace(generations[0], prompt=1)]
            notes = (*notes, _ONE_TOKEN)
        runner = Runner(
            loaded.name, loaded.model, inputs, training=False, gpu=where, stack=gpu.releases, whole=model.whole
        )
        loop = load_loop(request.step, loaded.machine) if isinstance(request.step, str) else request.step
        generations = [replace(generation, draft=draft) for generation in generations]
        search = GenerationRequest(generations, sizes, scenarios, config=allocator, loop=loop)
        return report_generation(
            runner,
            prompts,
            search,
            notes=notes,
            progress=report_progress,
            remedies=lambda rows, generators: remedies_for_generations(
                runner, prompts, search, progress=report_progress, rows=rows, generators=generators
            ),
        )


def _report_pipeline(
    request: GenerateRequest, loaded: Loaded, sizes: Sequence[int], report_progress: Callable[[str], None]
) -> Report:
    """Report on a generation of a pipeline, which has no options of tokens: the options of its call are arguments."""
    from memsize.analysis.model_setups import plans_of
    from memsize.analysis.report import ReportBuilder
    from memsize.analysis.runner import Runner

    usual = GenerateRequest(model=request.model, scenarios=request.scenarios)
    options: list[tuple[object, object, str]] = [(request, usual, name) for name in _OF_TOKENS]
    options += [(request.generation, usual.generation, field.name) for field in fields(Generation)]
    refused = [name for chosen, default, name in options if getattr(chosen, name) != getattr(default, name)]
    if refused or len(sizes) > 1:
        problem = f"{refused[0]} is for tokens" if refused else "it takes one batch size"
        raise InputError(f"{loaded.name} is a pipeline: {problem}; its options follow its name: ?height=1024")
    gpu, where = request.gpu, card(request.gpu.name or DEFAULT_GPU)
    run = with_inputs(replace(request.model, batch_size=sizes[0], mode="eval"), loaded)
    runner = Runner(*run.run, gpu=where, plans=plans_of(where, gpu.releases), stack=gpu.releases)
    config = AllocatorConfig.parse_optional(gpu.allocator, gpu.releases.release)
    builder = ReportBuilder(runner, peaks=True, config=config, progress=report_progress)
    scenarios = selected(request.scenarios, request.compile, ("as-given", "fp16"))
    return builder.build(scenarios, default=False, notes=run.notes)


def _counts(value: object, what: str) -> tuple[int, ...]:
    """Whole numbers of a text such as ``1,8,32``; raises `InputError` for anything else."""
    try:
        return tuple(int(part.replace("_", "")) for part in str(value).split(","))
    except ValueError:
        raise InputError(f"cannot read {value!r} as {what}: write it like 1,8,32") from None


def _check(generation: Generation, sizes: Sequence[int], *, own_step: bool) -> None:
    """Raise `InputError` for what cannot be asked together."""
    if min(sizes) < 1:
        raise InputError(f"a batch of {min(sizes)}: it must be at least 1")
    if own_step and replace(generation, prompt=1, max_new_tokens=1, uneven=False) != Generation(
        prompt=1, max_new_tokens=1
    ):
        own = (
            "cache_implementation, kv_cache_dtype, num_beams, prefill_chunk_size, assistant_model and "
            "prompt_lookup_num_tokens"
        )
        raise InputError(f"{own} are for the model's own generate, not for a step of yours")
    if generation.draft and max(sizes) > 1:
        raise InputError("assisted generation is for one sequence: transformers refuses more (batch)")


@takes(ServeRequest)
def serve(request: ServeRequest, *, progress: Callable[[str], None] | None = None) -> ServingReport:
    """Report what a paged server such as vLLM holds: weights, the largest step, and how many tokens its KV cache has
    room for.

    The model is a language model of transformers, given as to `report`. The keywords are vLLM's; the release that
    `server` names gives what is left out, and PyTorch's release where there is no `stack`. Cards share each layer of a
    target such as ``"hf:config.json"``; all figures are those of one of them. Where the model's config says that its
    checkpoint is quantized, the weights as given are those of the checkpoint.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    model, gpu, report_progress = replace(request.model, mode="eval"), request.gpu, progress or (lambda _: None)
    where, scenarios = card(gpu.name or DEFAULT_GPU), select(SERVED if request.scenarios is None else request.scenarios)
    refuse_compiled(scenarios, "servers: vLLM compiles models itself from 0.8 on, which the figures of serve include")
    if request.serving.tensor_parallel_size > 1:
        model = _one_of(request.serving.tensor_parallel_size, model, report_progress)
    with model_of(model, report_progress, where.name) as loaded:
        from memsize.analysis.runner import Runner
        from memsize.analysis.serving.scenarios import served_scenarios
        from memsize.analysis.serving.server import Server
        from memsize.analysis.serving.server_runs import MIXED, ServerRuns
        from memsize.workloads.generation import generate_of
        from memsize.workloads.serving import reads_images

        generate_of(loaded.model, loaded.name)  # before a prompt is made, as for a generation
        scenarios = served_scenarios(scenarios, loaded.model, request.serving.rules)
        prompts = prompts_of(model, loaded)
        inputs = prompts(MIXED if reads_images(loaded.model) else 1)
        runner = Runner(
            loaded.name, loaded.model, inputs, training=False, gpu=where, stack=gpu.releases, whole=model.whole
        )
        allocator = AllocatorConfig.of(gpu.allocator, gpu.releases.release)
        runs = ServerRuns(runner, prompts, request.serving, allocator, report_progress)
        speculation = request.serving.speculation
        with _draft(speculation.model if speculation else None, runs) as draft:
            return Server(runs, draft).report(scenarios, loaded.notes)


@contextmanager
def _draft(name: str | None, target: ServerRuns) -> Iterator[Draft | None]:
    """The model that drafts tokens for a server, loaded while this is open."""
    if name is None:
        yield None
        return
    from memsize.analysis.serving.drafting import Draft

    model, gpus = ModelRequest.of(name, mode="eval"), target.serving.tensor_parallel_size
    if gpus > 1:
        model = _one_of(gpus, model, target.progress)
    with model_of(model, target.progress, target.runner.gpu.name) as loaded:
        prompts = prompts_of(model, loaded)
        runner = replace(target.runner, name=loaded.name, model=loaded.model, inputs=prompts(1), whole=model.whole)
        yield Draft(replace(target, runner=runner, prompts=prompts, quantized={}))


def _one_of(gpus: int, model: ModelRequest, report_progress: Callable[[str], None]) -> ModelRequest:
    """The part of a model that one of several `gpus` holds. Raises `InputError` where they cannot share it."""
    with model_of(model, report_progress) as loaded:
        from memsize.workloads.served_parts import divided

        if not (isinstance(model.model, str) and loaded.name.startswith("hf:")):
            raise InputError("only a target such as hf:config.json can be divided among GPUs: its config says how")
        entries = divided(loaded.model, gpus, loaded.name)
    return replace(model, arguments={**model.arguments, **entries})
