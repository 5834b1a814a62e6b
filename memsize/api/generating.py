"""What a language model holds while it generates, by itself or behind a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from memsize.api.opened import assisted, model_of, prompts_of
from memsize.api.question import asks_about_a_model
from memsize.errors import InputError
from memsize.spec.model_request import InputOptions, InputSize, ModelRequest
from memsize.spec.scenario import select
from memsize.spec.stack import Stack

if TYPE_CHECKING:
    from torch import nn

    from memsize.device.allocator_config import AllocatorConfig
    from memsize.records.generation import GenerationReport
    from memsize.records.serving import ServingReport
    from memsize.spec.generation import Generation


@asks_about_a_model
def generate(
    model_or_target: nn.Module | str | ModelRequest,
    input_size: InputSize | Any = None,
    *,
    prompt: int | Iterable[int] = 512,
    new: int = 128,
    batches: int | Iterable[int] = 1,
    cache: str | None = None,
    kv_dtype: str | None = None,
    beams: int = 1,
    chunk: int | None = None,
    uneven: bool = False,
    assistant: nn.Module | str | None = None,
    lookup: int | None = None,
    step: Callable[..., Any] | str | None = None,
    scenarios: str | Iterable[str] | None = None,
    gpu: str | None = None,
    stack: Stack | str | None = None,
    config: AllocatorConfig | str | None = None,
    progress: Callable[[str], None] | None = None,
    **given: Unpack[InputOptions],
) -> GenerationReport:
    """What a model holds while it generates tokens: reading the prompt, each step after it, and the KV cache.

    The model is given as to `report`; its own ``generate`` runs, with an input that is made for each length of `prompt`
    (of a model that isn't a library's, its first dimension after the batch). `new` tokens are generated after it, for
    each of `batches` sequences. `cache` is ``"dynamic"``, ``"static"``, ``"quantized"``, ``"offloaded"`` or
    ``"offloaded_static"`` (None: the model's own), `kv_dtype` that of a quantized one: ``"fp8"``, ``"int4"``,
    ``"int2"``. `beams` is the width of a beam search; the prompt is read `chunk` tokens at a time (None: all at once).
    With `uneven`, the prompts of a batch are of unequal lengths and padded to the longest. Before each step the
    `assistant`, a smaller model or its target, proposes tokens, or `lookup` of them are looked up in the prompt; none
    turns out to be right, which takes the most. `step` is a loop that takes the place of ``generate``, or its name,
    such as ``"loop.py:generate"``: a function of the model, those of its inputs that it has parameters for, and
    ``max_new_tokens``. `scenarios` are as for `report` (None: as given, and its weights in int8 and int4), `gpu`,
    `stack` and `config` as for `trace`. Where a row of the first scenario does not fit, what would is tried.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.device.cards import card
    from memsize.records.gpu import DEFAULT_GPU
    from memsize.spec.generation import GENERATED, Draft, Generation

    subject = replace(ModelRequest.of(model_or_target, input_size, **given), mode="eval")
    where, software, say = card(gpu or DEFAULT_GPU), Stack.of(stack), progress or (lambda _: None)
    asked = select(GENERATED if scenarios is None else scenarios)
    lengths, sizes = ((each,) if isinstance(each, int) else tuple(each) for each in (prompt, batches))
    draft = Draft.of(assistant, lookup)
    generations = [Generation(length, new, cache, kv_dtype, beams, 0, chunk, uneven, draft) for length in lengths]
    _check(generations[0], sizes, own_step=step is not None)
    settings = AllocatorConfig.of(config, software.release)
    with model_of(subject, say, where.name) as loaded, assisted(loaded, draft, assistant, say) as draft:
        from memsize.analysis.fit.remedies import remedies_for_generations
        from memsize.analysis.generation.generation_rows import GenerationRequest, report_generation
        from memsize.analysis.runner import Runner
        from memsize.loading import load_loop
        from memsize.workloads.generation import generate_of

        if step is None:  # before a prompt is made, which a model of images has not either
            generate_of(loaded.model, loaded.name)
        prompts = prompts_of(subject, loaded)
        runner = Runner(loaded.name, loaded.model, prompts(lengths[0]), False, gpu=where, stack=software)
        loop = load_loop(step, loaded.machine) if isinstance(step, str) else step
        generations = [replace(each, draft=draft) for each in generations]
        request = GenerationRequest(generations, sizes, asked, settings, loop)
        remedies = partial(remedies_for_generations, runner, prompts, request, say)
        return report_generation(runner, prompts, request, loaded.notes, say, remedies)


def _check(generation: Generation, sizes: Sequence[int], *, own_step: bool) -> None:
    """Raise `InputError` for what cannot be asked together."""
    if min(sizes, default=0) < 1:
        raise InputError(f"a batch of {min(sizes, default=0)}: it must be at least 1")
    asked = generation.cache or generation.kv_dtype or generation.chunk or generation.beams > 1 or generation.draft
    if own_step and asked:
        own = "cache, kv_dtype, beams, chunk, assistant and lookup"
        raise InputError(f"{own} are for the model's own generate, not for a step of yours")
    if generation.draft and max(sizes) > 1:
        raise InputError("assisted generation is for one sequence: transformers refuses more (batch)")


@asks_about_a_model
def serve(
    model_or_target: nn.Module | str | ModelRequest,
    input_size: InputSize | Any = None,
    *,
    utilization: float = 0.9,
    block: int = 16,
    batched_tokens: int = 8192,
    seqs: int = 256,
    context: int | None = None,
    tp: int = 1,
    kv_dtype: str | None = None,
    scenarios: str | Iterable[str] | None = None,
    gpu: str | None = None,
    stack: Stack | str | None = None,
    progress: Callable[[str], None] | None = None,
    **given: Unpack[InputOptions],
) -> ServingReport:
    """What a paged server such as vLLM holds: weights, the largest step, and how many tokens its KV cache has room for.

    The model is a language model of transformers, given as to `report`. The server may take `utilization` of the card;
    a block of its cache is for `block` tokens, a step runs `batched_tokens` tokens of up to `seqs` sequences, and a
    request may be `context` tokens long (None: the model's positions). `tp` cards share each layer, which takes a
    target such as ``"hf:config.json"``; all figures are those of one of them. `kv_dtype` is ``"fp8"``, or None for the
    model's own. `scenarios` are as for `report` (None: as given, and its weights in fp8 and int4), `gpu` and `stack` as
    for `trace`.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    from memsize.device.cards import card
    from memsize.records.gpu import DEFAULT_GPU
    from memsize.spec.serving import SERVED, Serving

    subject = replace(ModelRequest.of(model_or_target, input_size, **given), mode="eval")
    serving = Serving(utilization, block, batched_tokens, seqs, context, tp, kv_dtype)
    where, software, say = card(gpu or DEFAULT_GPU), Stack.of(stack), progress or (lambda _: None)
    asked = select(SERVED if scenarios is None else scenarios)
    if tp > 1:
        subject = _one_of(tp, subject, say)
    with model_of(subject, say, where.name) as loaded:
        from memsize.analysis.runner import Runner
        from memsize.analysis.serving.server import Server
        from memsize.workloads.generation import generate_of

        generate_of(loaded.model, loaded.name)  # before a prompt is made, as for a generation
        prompts = prompts_of(subject, loaded)
        runner = Runner(loaded.name, loaded.model, prompts(1), False, gpu=where, stack=software)
        return Server(runner, prompts, serving, say).report(asked, loaded.notes)


def _one_of(tp: int, subject: ModelRequest, say: Callable[[str], None]) -> ModelRequest:
    """The part of a model that one of `tp` cards holds. Raises `InputError` where they cannot share it."""
    if not (isinstance(subject.model, str) and subject.model.startswith("hf:")):
        raise InputError("only a target such as hf:config.json can be divided among cards: its config says how")
    with model_of(subject, say) as loaded:
        from memsize.workloads.serving import divided

        entries = divided(getattr(loaded.model, "config", None), tp, loaded.name)
    return replace(subject, arguments={**subject.arguments, **entries})
