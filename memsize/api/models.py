"""Questions about a model.

All take the same `Subject`: what `memsize.spec.subject.Subject.of` says of its arguments is true of every one of them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from memsize.api.opened import model_of, opened, prompts_of, with_inputs
from memsize.errors import InputError
from memsize.spec.parallel import Parallel, on_each, spread_of
from memsize.spec.scenario import scenario_named, select
from memsize.spec.stack import Stack
from memsize.spec.subject import InputOptions, InputSize, Subject
from memsize.spec.training import Training

if TYPE_CHECKING:
    from torch import nn

    from memsize.analysis.fit.fit import FitRequest
    from memsize.analysis.step import StepTrace
    from memsize.device.config import AllocatorConfig
    from memsize.records.fit import Fit
    from memsize.records.generation import GenerationReport
    from memsize.records.layout import LayoutReport
    from memsize.records.report import Report
    from memsize.records.serving import ServingReport
    from memsize.records.verification import Verification
    from memsize.records.world import World
    from memsize.spec.vary import Vary
    from memsize.workloads import Workload

_ONE_RANK = (
    "one process of many runs with step=, a function that shards the model and returns the body of its loop, "
    "and without execute"
)
_NO_STEP = "is about a step of the model's own, not about tokens that it generates"
Question = TypeVar("Question", bound=Callable[..., Any])


def _asks_about_a_model(question: Question) -> Question:
    """Spell out the arguments of `InputOptions` in the signature that `help` and notebooks show."""
    signature = inspect.signature(question)
    subject, size, *own = (p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD)
    shared = list(inspect.signature(Subject.of).parameters.values())[2:]
    question.__signature__ = signature.replace(parameters=[subject, size, *shared, *own])  # type: ignore[attr-defined]
    return question


@_asks_about_a_model
def report(
    model_or_target: nn.Module | str | Subject,
    input_size: InputSize | Any = None,
    *,
    scenarios: str | Iterable[str] | None = None,
    train: Training | str | None = None,
    parallel: Parallel | str | None = None,
    gpu: str | None = None,
    stack: Stack | str | None = None,
    config: AllocatorConfig | None = None,
    execute: bool = False,
    progress: Callable[[str], None] | None = None,
    **given: Unpack[InputOptions],
) -> Report:
    """What each byte of a model is, scenario by scenario, and why it did or didn't shrink.

    The model is a module, which is never run or changed, or a target such as ``"model.py:Net"`` or
    ``"timm:resnet18"``, which is built with `arguments`. Its input is one of:

    - `input_size`, without the batch dimension: ``(3, 64, 64)``, the command line's text such as
      ``"input_ids=512:int64"``, or several of either; `batch_size` (default 1) comes on top;
    - `input_data`, real inputs with their batch dimension: a tensor, a tuple of positional arguments, a mapping of
      keyword arguments; or a function that returns one of these, or its name as ``"file.py:make_inputs"``. What is no
      size is also understood in the place of `input_size`;
    - `args` and `kwargs`, real positional and keyword arguments, alone or together; `kwargs` also beside `input_data`;
    - nothing for a library's model: memsize makes its inputs, texts of `seq_len` tokens. Of any other model without an
      input, the report shows what it stores.

    `scenarios` is a comma list, several names, or ``"all"``; None takes the usual ones. `mode` is ``"train"`` (the
    default) or ``"eval"``, the training flag that the forward runs under. `train` asks for training steps with that
    optimizer (``"adamw"``, ``"sgd:momentum=0.9"``, or a `Training`), so that each scenario says what a GPU would show
    at their peak, and `parallel` spreads those over several (``"fsdp=8"``); `gpu` is the GPU to simulate, `stack` the
    PyTorch and CUDA that it has (``"torch=2.6,cuda=12.4"``; None: the installed ones), `config` the settings of its
    caching allocator. `execute` really computes, on the CPU, for models with data-dependent control flow. `progress` is
    called with what is being done.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    from memsize.device.cards import card
    from memsize.records.gpu import DEFAULT_GPU

    subject = Subject.of(model_or_target, input_size, **given)
    asked, say, software = select(scenarios), progress or (lambda _: None), Stack.of(stack)
    trained = _training(train)
    spread = spread_of(parallel, trained, execute=execute)
    with model_of(subject, say, gpu, trained is not None and trained.is_own) as loaded:
        from memsize.analysis.report import ReportBuilder, stored_report
        from memsize.analysis.runner import Runner, plans_of

        if not (subject.has_input or loaded.maker or train or execute or scenarios is not None):
            return stored_report(loaded.name, loaded.model, loaded.notes)
        found = with_inputs(subject, loaded)
        where = card(gpu) if gpu else None
        plans = plans_of(where or card(DEFAULT_GPU)) if where or trained else None
        runner = Runner(*found.run, gpu=where, execute=execute, plans=plans, stack=software)
        builder = ReportBuilder(runner, trained, parallel=spread, peaks=where is not None, config=config, say=say)
        return builder.build(asked, default=scenarios is None, notes=found.notes)


@_asks_about_a_model
def trace(
    model_or_target: nn.Module | str | Subject,
    input_size: InputSize | Any = None,
    *,
    scenario: str = "as-given",
    optimizer: str | Callable[[Any], Any] | None = "adamw",
    loss: str | Callable[[Any], Any] | None = None,
    steps: int = 3,
    step: Callable[..., Any] | None = None,
    world: World | None = None,
    parallel: Parallel | str | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
    ema: bool = False,
    scaler: bool | None = None,
    gpu: str | None = None,
    stack: Stack | str | None = None,
    config: AllocatorConfig | str | None = None,
    execute: bool = False,
    **given: Unpack[InputOptions],
) -> StepTrace:
    """What is alive at every moment of a training step, and what a GPU would show at its peak.

    The model and its input are given as to `report`. It is traced as it is, or under another `scenario`. `optimizer` is
    a name (``"adamw"``, ``"adamw:fused"``, ``"sgd:momentum=0.9"``), a function from parameters to an optimizer, or None
    for one inference without gradients. `loss` is a name of `memsize.spec.training.LOSSES`, a function of the model's
    output, or None for the loss that the output suggests. `steps` steps are run, each with `accumulate` backwards;
    `set_to_none` is `zero_grad`'s, `ema` keeps an averaged copy of the parameters, `scaler` uses a GradScaler (None:
    under float16 autocast). `step` replaces all of that by a loop of your own: ``step(model)`` is called once with a
    copy of the model and returns the body of the loop, which is called `steps` times with the inputs. With `world` it
    runs as one process of many: ``step(model)`` shards or wraps the copy by PyTorch's own code (`fully_shard`,
    `DistributedDataParallel`, `parallelize_module`), in a process group that is there already. `parallel` does that
    without code: ``"fsdp=8"``, ``"ddp=8"`` and ``"hsdp=4x8"`` run the usual loop as the first process of many. `gpu` is
    the GPU to simulate, `stack` its PyTorch and CUDA, `config` the settings of its caching allocator, as
    `PYTORCH_CUDA_ALLOC_CONF` writes them. `execute` really computes, on the CPU.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    from memsize.analysis.step import StepTrace
    from memsize.device.cards import card
    from memsize.device.config import AllocatorConfig
    from memsize.records.gpu import DEFAULT_GPU

    subject = Subject.of(model_or_target, input_size, **given)
    where, asked, software = card(gpu or DEFAULT_GPU), scenario_named(scenario), Stack.of(stack)
    training = None if optimizer is None else Training(optimizer, loss, steps, accumulate, set_to_none, ema, scaler)
    settings = AllocatorConfig.of(config, software.release)
    if world is not None and (step is None or execute):
        raise InputError(_ONE_RANK)
    spread = spread_of(parallel, training, loop=step is not None, execute=execute)
    with opened(subject, gpu=where.name, own=training is not None and training.is_own) as found:
        from memsize.analysis.runner import Runner, plans_of
        from memsize.workloads.ranks import RankLoop, steps_on
        from memsize.workloads.training import OwnLoop

        runner = Runner(*found.run, gpu=where, execute=execute, plans=plans_of(where), stack=software)
        workload: Workload = steps_on(training, spread, where) if step is None else OwnLoop(step, steps)
        if step is not None and world is not None:
            workload = RankLoop(step, world, where, steps)
        return StepTrace(runner.run(workload, asked), where.name, settings)


@_asks_about_a_model
def fit(
    model_or_target: nn.Module | str | Subject,
    input_size: InputSize | Any = None,
    *,
    vary: str = "batch",
    scenarios: str | Iterable[str] | None = None,
    train: Training | str | None = None,
    parallel: str | None = None,
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
    **given: Unpack[InputOptions],
) -> Fit:
    """The largest batch that fits a GPU, scenario by scenario; or whether one does, and what would make it fit.

    The model and its input are given as to `report`. `batch_size` asks whether that batch fits and, where it doesn't,
    for remedies; None finds the largest. `vary` searches for another size at that batch: ``"seq_len"``, ``"image"``, or
    dimensions such as ``"input_ids:1,attention_mask:1"``, counted with the batch as 0. `train` asks for training steps
    with that optimizer, None for inference; `mode` is ``"train"`` with it and ``"eval"`` without, unless it is given.
    `parallel` spreads that over several GPUs (``"fsdp=8"``), and the batch is that of each; `gpus` compares numbers of
    them, ``"1..128"`` (doubling) or ``[4, 8]``, for a `parallel` without one: ``"fsdp"``, ``"ddp"``, ``"hsdp=x8"``.
    `gpu` is the name of a GPU, several of them, or ``"local"``; `budget` is a size of its memory instead, in bytes or
    as ``"15109MiB"``. The CUDA context and `margin` (bytes, a size, or ``"5%"``) are subtracted from either. `stack` is
    its PyTorch and CUDA, `config` holds the caching allocator's settings. `remedies` tries them in any case (True) or
    never (False); `crossovers` looks for the sizes from which on autocast pays or the peak moves.

    With `new`, `prompt`, `cache`, `kv_dtype`, `beams`, `chunk` or `uneven`, as for `generate`, the question is about
    generated tokens: how many sequences fit, or, with `vary` ``"context"``, how many tokens of `batch_size` sequences,
    the `new` ones included; with ``"context,batch"`` also of twice as many, and so on.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    from memsize.analysis.fit.fit import FitRequest
    from memsize.device.budget import budgets, spread_over
    from memsize.device.config import AllocatorConfig
    from memsize.spec.generation import GENERATED, asked_generation
    from memsize.spec.vary import parse_vary

    subject = Subject.of(model_or_target, input_size, **given)
    varied = parse_vary(vary)
    held = {"cache": cache, "kv_dtype": kv_dtype, "beams": beams, "chunk": chunk, "uneven": uneven or None}
    generation = asked_generation(varied, prompt=prompt, new=new, **held)
    asked = select(GENERATED if generation and scenarios is None else scenarios)
    steps = {"train": train, "crossovers": crossovers, "seq_len": subject.seq_len, "parallel": parallel or gpus}
    if generation and any(steps.values()):
        raise InputError(f"{next(name for name, given in steps.items() if given)} {_NO_STEP}")
    software = Stack.of(stack)
    settings = AllocatorConfig.of(config, software.release)
    capacities = budgets(gpu, budget, margin, software, settings.memory_fraction)
    trained, say = _training(train), progress or (lambda _: None)
    spread = [spread_of(each, trained) for each in on_each(parallel, gpus)]
    capacities = spread_over(capacities, spread)
    if spread[0] is not None:
        if remedies:
            raise InputError("remedies are tried on one GPU: leave out --parallel, or --remedies")
        remedies = False
        if scenarios is None:
            asked = tuple(each for each in asked if not spread[0].refuses(each))
    run_as = replace(subject, mode=subject.mode or ("train" if trained else "eval"))
    one = subject.batch_size if varied.batch else None
    request = FitRequest(asked, capacities, trained, settings, one, remedies, crossovers, scenarios is None, generation)
    if generation:
        return _fit_of_generations(run_as, request, varied, software, say)
    with opened(run_as, say, capacities[0].card.name, trained is not None and trained.is_own) as found:
        from memsize.analysis.fit.fit import find_fit
        from memsize.analysis.fit.trials import Trials

        return find_fit(Trials(*found.run, varied, say, stack=software), request, found.notes)


def _fit_of_generations(
    subject: Subject, request: FitRequest, varied: Vary, software: Stack, say: Callable[[str], None]
) -> Fit:
    """The answer to a request about a generation."""
    assert request.generation is not None
    with model_of(subject, say, request.budgets[0].card.name) as loaded:
        from memsize.analysis.fit.fit import find_fit
        from memsize.analysis.fit.generations import GenerationTrials

        prompts = prompts_of(subject, loaded)
        trials = GenerationTrials(
            loaded.name, loaded.model, prompts, request.generation, subject.batch_size or 1, varied, say, software
        )
        return find_fit(trials, request, loaded.notes)


@_asks_about_a_model
def generate(
    model_or_target: nn.Module | str | Subject,
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
    each of `batches` sequences. `cache` is ``"dynamic"``, ``"static"`` or ``"quantized"`` (None: the model's own),
    `kv_dtype` that of a quantized one: ``"fp8"``, ``"int4"``, ``"int2"``. `beams` is the width of a beam search; the
    prompt is read `chunk` tokens at a time (None: all at once). With `uneven`, the prompts of a batch are of unequal
    lengths and padded to the longest. `step` is a loop that takes the place of ``generate``, or its name, such as
    ``"loop.py:generate"``: a function of the model, those of its inputs that it has parameters for, and
    ``max_new_tokens``. `scenarios` are as for `report` (None: as given, and its weights in int8 and int4), `gpu`,
    `stack` and `config` as for `trace`.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    from memsize.device.cards import card
    from memsize.device.config import AllocatorConfig
    from memsize.records.gpu import DEFAULT_GPU
    from memsize.spec.generation import GENERATED, Generation

    subject = replace(Subject.of(model_or_target, input_size, **given), mode="eval")
    where, software, say = card(gpu or DEFAULT_GPU), Stack.of(stack), progress or (lambda _: None)
    asked = select(GENERATED if scenarios is None else scenarios)
    lengths, sizes = ((each,) if isinstance(each, int) else tuple(each) for each in (prompt, batches))
    generations = [Generation(length, new, cache, kv_dtype, beams, 0, chunk, uneven) for length in lengths]
    if step is not None and (cache or kv_dtype or chunk or beams > 1):
        raise InputError("cache, kv_dtype, beams and chunk are for the model's own generate, not for a step of yours")
    settings = AllocatorConfig.of(config, software.release)
    with model_of(subject, say, where.name) as loaded:
        from memsize.analysis.generation.report import GenerationRequest, report_generation
        from memsize.analysis.runner import Runner
        from memsize.loading import load_loop

        prompts = prompts_of(subject, loaded)
        runner = Runner(loaded.name, loaded.model, prompts(lengths[0]), False, gpu=where, stack=software)
        loop = load_loop(step, loaded.machine) if isinstance(step, str) else step
        request = GenerationRequest(generations, sizes, asked, settings, loop)
        return report_generation(runner, prompts, request, loaded.notes, say)


@_asks_about_a_model
def serve(
    model_or_target: nn.Module | str | Subject,
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

    subject = replace(Subject.of(model_or_target, input_size, **given), mode="eval")
    serving = Serving(utilization, block, batched_tokens, seqs, context, tp, kv_dtype)
    where, software, say = card(gpu or DEFAULT_GPU), Stack.of(stack), progress or (lambda _: None)
    asked = select(SERVED if scenarios is None else scenarios)
    if tp > 1:
        subject = _one_of(tp, subject, say)
    with model_of(subject, say, where.name) as loaded:
        from memsize.analysis.runner import Runner
        from memsize.analysis.serving.report import Server

        prompts = prompts_of(subject, loaded)
        runner = Runner(loaded.name, loaded.model, prompts(1), False, gpu=where, stack=software)
        return Server(runner, prompts, serving, say).report(asked, loaded.notes)


def _one_of(tp: int, subject: Subject, say: Callable[[str], None]) -> Subject:
    """The part of a model that one of `tp` cards holds. Raises `InputError` where they cannot share it."""
    if not (isinstance(subject.model, str) and subject.model.startswith("hf:")):
        raise InputError("only a target such as hf:config.json can be divided among cards: its config says how")
    with model_of(subject, say) as loaded:
        from memsize.analysis.serving.tensor_parallel import divided

        entries = divided(getattr(loaded.model, "config", None), tp, loaded.name)
    return replace(subject, arguments={**subject.arguments, **entries})


@_asks_about_a_model
def verify(
    model_or_target: nn.Module | str | Subject,
    input_size: InputSize | Any = None,
    *,
    scenario: str = "as-given",
    train: Training | str | None = None,
    against: str | os.PathLike[str] | None = None,
    device: int = 0,
    progress: Callable[[str], None] | None = None,
    **given: Unpack[InputOptions],
) -> Verification:
    """Compare a prediction with a real GPU: the same step is run there and measured.

    The model and its input are given as to `report`. It is run as it is, or under another `scenario`. `train` asks for
    training steps with that optimizer, None for one inference; `mode` is the training flag. The step is run on CUDA
    device `device` of this machine, by a process that holds nothing there yet; or the prediction is compared with the
    file `against`, which `Verification.save` wrote and which needs no GPU.

    Raises `InputError` where there is no GPU, or the file is no measurement of this step; and `TargetError`,
    `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    from memsize.records.verification import read_measurements

    subject = Subject.of(model_or_target, input_size, **given)
    asked, say, trained = scenario_named(scenario), progress or (lambda _: None), _training(train)
    saved = None if against is None else read_measurements(os.fspath(against))
    if saved is None:
        # Before anything else: this may be all there is to say, and it must see the device untouched.
        from memsize.analysis.verify.cuda_memory import CudaMemory

        memory = CudaMemory(device)
    with opened(subject, say) as found:
        from memsize.analysis.verify.verification import Experiment, verify_measurements, verify_step

        experiment = Experiment(*found.run, asked, trained)
        checked = verify_step(experiment, memory, say) if saved is None else verify_measurements(experiment, saved)
    return replace(checked, notes=(*checked.notes, *found.notes))


@_asks_about_a_model
def audit_layout(
    model_or_target: nn.Module | str | Subject,
    input_size: InputSize | Any = None,
    *,
    scenario: str = "as-given",
    progress: Callable[[str], None] | None = None,
    **given: Unpack[InputOptions],
) -> LayoutReport:
    """What channels last does to a model: which layers keep it, which op loses it, and what is copied to rearrange.

    The model and its input are given as to `report`. It is run as it is, and once more with the weights and inputs that
    are images in ``torch.channels_last``, volumes in ``torch.channels_last_3d``, both times under `scenario`.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    asked = scenario_named(scenario)
    with opened(Subject.of(model_or_target, input_size, **given), progress or (lambda _: None)) as found:
        from memsize.analysis.findings.layout import RULES
        from memsize.analysis.layout import audit
        from memsize.analysis.runner import Runner
        from memsize.records.layout import LayoutReport

        runner = Runner(*found.run)
        audited = audit(lambda: runner.setup(asked))
        return LayoutReport(audited, found.notes, RULES.findings(audited))


def shape_rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a custom op returns, for ops that PyTorch has no `meta` kernel of: a decorator.

    `names` are operators as their schema names them (``"mylib::scan"``). The function takes the op's arguments, `meta`
    tensors, and returns what the op would, on `meta`; NotImplemented leaves the answer to PyTorch. A name that has a
    rule already raises ValueError.
    """
    from memsize.meta_kernels.registry import shape_rule as register

    return register(*names)


def _training(train: Training | str | None) -> Training | None:
    return Training(train) if isinstance(train, str) else train
