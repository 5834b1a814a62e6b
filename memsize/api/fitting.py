"""Find what fits a GPU: the largest batch, length, or number of sequences, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memsize.api.keywords import takes
from memsize.api.opened import model_of, opened, prompts_of
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.budget import ALL, budgets, spread_over
from memsize.errors import InputError
from memsize.spec import requests
from memsize.spec.generation import GENERATED, searched_generation
from memsize.spec.parallel import on_each, spread_of
from memsize.spec.scenario import selected
from memsize.spec.vary import parse_vary

if TYPE_CHECKING:
    from memsize.analysis.fit.fit import FitRequest
    from memsize.records.finding import Finding
    from memsize.records.fit import Fit
    from memsize.spec.vary import Vary


@takes(requests.FitRequest)
def fit(
    request: requests.FitRequest,
    *,
    progress: Callable[[str], None] | None = None,
    found: Callable[[Finding], None] | None = None,
) -> Fit:
    """The largest batch that fits a GPU, scenario by scenario; or whether one does, and what would make it fit.

    The model and its input are given as to `report`. With `batch_size` the question is whether that batch fits, and
    what would make it fit where it doesn't; with `vary` it is another size at that batch. `parallel` trains with that
    batch on each of several GPUs. The CUDA context and the `margin` are subtracted from the GPU's memory, or from the
    `budget` in its place. `found` is called with what a row says once it is known.

    With `prompt` or an option of a generation, the question is about generated tokens: how many sequences fit, or, with
    `vary` ``"context"``, how many tokens of `batch_size` sequences, the new ones included; with ``"context,batch"``
    also of twice as many, and so on.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    vary = parse_vary(request.vary)
    model = replace(request.model, mode=request.model.mode or ("train" if request.training else "eval"))
    search = _search_of(request, vary)
    report_progress, show, stack = progress or (lambda _: None), found or (lambda _: None), request.gpu.releases
    gpu = None if search.smallest else search.budgets[0].card.name
    from memsize.analysis.fit.fit import find_fit
    from memsize.analysis.fit.run_cache import GenerationRunCache, RunCache

    if search.generation is None:
        own = search.training is not None and search.training.is_own
        with opened(model, report_progress, gpu, own=own) as loaded:
            runs = RunCache(*loaded.run, vary, report_progress, stack=stack, whole=model.whole)
            return find_fit(runs, search, loaded.notes, tell=show)
    with model_of(model, report_progress, gpu) as loaded:
        from memsize.workloads.generation import generate_of

        generate_of(loaded.model, loaded.name)
        runs = GenerationRunCache(
            loaded.name,
            loaded.model,
            prompts=prompts_of(model, loaded),
            generation=search.generation,
            batch=model.batch_size or 1,
            vary=vary,
            progress=report_progress,
            stack=stack,
            whole=model.whole,
        )
        return find_fit(runs, search, loaded.notes, tell=show)


def _search_of(request: requests.FitRequest, vary: Vary) -> FitRequest:
    """The search that answers a request. Raises `InputError` for what cannot be asked."""
    generation = searched_generation(vary, request.generation, request.prompt)
    scenarios = selected(request.scenarios, request.compile, GENERATED if generation else None)
    _check_question(request, vary, generation is not None)
    training, gpu, stack = request.training, request.gpu, request.gpu.releases
    allocator = AllocatorConfig.of(gpu.allocator, stack.release)
    spread = [spread_of(parallel, training) for parallel in on_each(request.parallel, request.gpus)]
    fraction = allocator.memory_fraction
    capacities = budgets(gpu.name, request.budget, request.margin, stack, fraction, request.beside)
    if spread[0] is not None and request.scenarios is None:
        scenarios = tuple(s for s in scenarios if any(way is None or not way.refuses(s) for way in spread))
    from memsize.analysis.fit.fit import FitRequest

    return FitRequest(
        scenarios,
        spread_over(capacities, spread),
        training,
        config=allocator,
        size=request.model.batch_size if vary.batch else None,
        remedies=False if gpu.name == ALL and request.remedies is None else request.remedies,
        default=request.scenarios is None and not request.compile,
        generation=generation,
        smallest=gpu.name == ALL,
    )


def _check_question(request: requests.FitRequest, vary: Vary, generates: bool) -> None:
    """Raise `InputError` for options of two questions: a training step's and a generation's, all GPUs and any batch."""
    steps = {
        "train": request.training,
        "seq_len": request.model.seq_len,
        "mode": request.model.mode == "train",
        "parallel": request.parallel,
        "gpus": request.gpus,
    }
    if generates and (about_steps := next((name for name, value in steps.items() if value), None)):
        raise InputError(f"{about_steps} is for training steps, not for generated text")
    if request.gpu.name == ALL and (request.model.batch_size is None or not vary.batch or generates):
        raise InputError("--gpu all finds the smallest GPU for a batch: give one, as in --batch-size 8")
