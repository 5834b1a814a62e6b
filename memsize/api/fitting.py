"""What fits a GPU: the largest batch, length, or number of sequences, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from memsize.api.opened import model_of, opened, prompts_of
from memsize.api.question import asks_about_a_model, training_of
from memsize.errors import InputError
from memsize.spec.model_request import InputOptions, InputSize, ModelRequest
from memsize.spec.parallel import on_each, spread_of
from memsize.spec.scenario import select
from memsize.spec.stack import Stack
from memsize.spec.training import Training

if TYPE_CHECKING:
    from torch import nn

    from memsize.analysis.fit.fit import FitRequest
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.records.finding import Finding
    from memsize.records.fit import Fit
    from memsize.spec.vary import Vary

_NO_STEP = "is about a step of the model's own, not about tokens that it generates"


@asks_about_a_model
def fit(
    model_or_target: nn.Module | str | ModelRequest,
    input_size: InputSize | Any = None,
    *,
    vary: str = "batch",
    scenarios: str | Iterable[str] | None = None,
    train: Training | str | None = None,
    parallel: str | Iterable[str] | None = None,
    gpus: str | Iterable[int] | None = None,
    gpu: str | Iterable[str] | None = None,
    budget: str | int | None = None,
    margin: str | int = 0,
    stack: Stack | str | None = None,
    config: AllocatorConfig | str | None = None,
    remedies: bool | None = None,
    crossovers: bool = False,
    prompt: int | None = None,
    new: int | None = None,
    cache: str | None = None,
    kv_dtype: str | None = None,
    beams: int | None = None,
    chunk: int | None = None,
    uneven: bool = False,
    progress: Callable[[str], None] | None = None,
    found: Callable[[Finding], None] | None = None,
    **given: Unpack[InputOptions],
) -> Fit:
    """The largest batch that fits a GPU, scenario by scenario; or whether one does, and what would make it fit.

    The model and its input are given as to `report`. `batch_size` asks whether that batch fits and, where it doesn't,
    for remedies; None finds the largest. `vary` searches for another size at that batch: ``"seq_len"``, ``"image"``, or
    dimensions such as ``"input_ids:1,attention_mask:1"``, counted with the batch as 0. `train` asks for training steps
    with that optimizer, None for inference; `mode` is ``"train"`` with it and ``"eval"`` without, unless it is given.
    `parallel` spreads that over several GPUs (``"fsdp=8"``; ``["fsdp=8", "ddp=8"]`` compares two ways), with that batch
    on each; `gpus` compares numbers of them, ``"1..128"`` (doubling) or ``[4, 8]``, for a `parallel` without one:
    ``"fsdp"``, ``"ddp"``, ``"hsdp=x8"``.
    `gpu` is the name of a GPU, several of them, or ``"local"``; `budget` is a size of its memory instead, in bytes or
    as ``"15109MiB"``. The CUDA context and `margin` (bytes, a size, or ``"5%"``) are subtracted from either. `stack` is
    its PyTorch and CUDA, `config` holds the caching allocator's settings. `remedies` tries them in any case (True) or
    never (False); `crossovers` looks for the sizes from which on autocast pays or the peak moves. `progress` is called
    with what is being done, `found` with what a row says once it is known.

    With `new`, `prompt`, `cache`, `kv_dtype`, `beams`, `chunk` or `uneven`, as for `generate`, the question is about
    generated tokens: how many sequences fit, or, with `vary` ``"context"``, how many tokens of `batch_size` sequences,
    the `new` ones included; with ``"context,batch"`` also of twice as many, and so on.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    from memsize.analysis.fit.fit import FitRequest, find_fit
    from memsize.analysis.fit.run_cache import RunCache
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.device.budget import budgets, spread_over
    from memsize.spec.generation import GENERATED, asked_generation
    from memsize.spec.vary import parse_vary

    subject = ModelRequest.of(model_or_target, input_size, **given)
    varied = parse_vary(vary)
    held = {"cache": cache, "kv_dtype": kv_dtype, "beams": beams, "chunk": chunk, "uneven": uneven}
    generation = asked_generation(varied, prompt=prompt, new=new, **held)
    asked = select(GENERATED if generation and scenarios is None else scenarios)
    steps = {"train": train, "crossovers": crossovers, "seq_len": subject.seq_len, "parallel": parallel or gpus}
    if generation and any(steps.values()):
        raise InputError(f"{next(name for name, given in steps.items() if given)} {_NO_STEP}")
    software = Stack.of(stack)
    settings = AllocatorConfig.of(config, software.release)
    capacities = budgets(gpu, budget, margin, software, settings.memory_fraction)
    trained, say, tell = training_of(train), progress or (lambda _: None), found or (lambda _: None)
    spread = [spread_of(each, trained) for each in on_each(parallel, gpus)]
    capacities = spread_over(capacities, spread)
    if spread[0] is not None and scenarios is None:
        asked = tuple(each for each in asked if any(way is None or not way.refuses(each) for way in spread))
    run_as = replace(subject, mode=subject.mode or ("train" if trained else "eval"))
    one = subject.batch_size if varied.batch else None
    request = FitRequest(asked, capacities, trained, settings, one, remedies, crossovers, scenarios is None, generation)
    if generation:
        return _fit_of_generations(run_as, request, varied, software, say, tell)
    with opened(run_as, say, capacities[0].card.name, trained is not None and trained.is_own) as model:
        return find_fit(RunCache(*model.run, varied, say, stack=software), request, model.notes, tell)


def _fit_of_generations(
    subject: ModelRequest,
    request: FitRequest,
    varied: Vary,
    software: Stack,
    say: Callable[[str], None],
    tell: Callable[[Finding], None],
) -> Fit:
    """The answer to a request about a generation."""
    assert request.generation is not None
    with model_of(subject, say, request.budgets[0].card.name) as loaded:
        from memsize.analysis.fit.fit import find_fit
        from memsize.analysis.fit.generation_runs import GenerationRunCache
        from memsize.workloads.generation import generate_of

        generate_of(loaded.model, loaded.name)
        prompts = prompts_of(subject, loaded)
        runs = GenerationRunCache(
            loaded.name,
            loaded.model,
            prompts=prompts,
            generation=request.generation,
            batch=subject.batch_size or 1,
            vary=varied,
            progress=say,
            stack=software,
        )
        return find_fit(runs, request, loaded.notes, tell)
