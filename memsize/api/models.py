"""Questions about a model: what it holds, step by step, and in which layout.

All take a `ModelRequest`, made of the keywords that `ModelRequest.of` explains.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memsize.analysis.step import Guard
from memsize.api.keywords import takes
from memsize.api.opened import model_of, opened, refuse_resizing, with_inputs
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import InputError, quoted
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.model_request import ModelRequest
from memsize.spec.parallel import spread_of
from memsize.spec.requests import (
    GuardRequest,
    LayoutRequest,
    ReportRequest,
    TimelineRequest,
    TraceRequest,
    VerifyRequest,
)
from memsize.spec.scenario import Scenario, compiled_from, refuse_compiled, scenario_named, selected
from memsize.spec.training import USUAL_STEPS, Training
from memsize.spec.vary import Lengths
from memsize.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from memsize.analysis.step import StepTrace
    from memsize.records.layout import LayoutReport
    from memsize.records.report import Report
    from memsize.records.timeline import Timeline
    from memsize.records.trace import Trace
    from memsize.records.verification import Verification
    from memsize.records.world import World
    from memsize.workloads import Workload


@takes(ReportRequest)
def report(request: ReportRequest, *, progress: Callable[[str], None] | None = None) -> Report:
    """Report what each byte of a model is, scenario by scenario, and why it did or didn't shrink.

    The model is a module, which is never run or changed, or a target such as ``"model.py:Net"`` or
    ``"timm:resnet18"``, which is built with `arguments`. Its input is one of:

    - `input_size`, without the batch dimension: ``(3, 64, 64)``, the command line's text such as
      ``"input_ids=512:int64"``, or several of either; `batch_size` comes on top;
    - `input_data`, real inputs with their batch dimension: a tensor, a tuple of positional arguments, a mapping of
      keyword arguments; or a function that returns one of these, or its name as ``"file.py:make_inputs"``. What is no
      size is also understood in the place of `input_size`;
    - `args` and `kwargs`, real positional and keyword arguments, alone or together; `kwargs` also beside `input_data`;
    - nothing for a library's model: memsize makes its inputs. Of any other model without an input, the report shows
      what it stores.

    With `train`, each scenario says what a GPU would show at the peak of training steps.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    model, training, gpu = request.model, request.training, request.gpu
    scenarios, report_progress = selected(request.scenarios, request.compile), progress or (lambda _: None)
    spread = spread_of(request.parallel, training, execute=request.execute)
    _refuse_run_compiled(scenarios, world=None, execute=request.execute)
    refuse_resizing(model)
    where = card(gpu.name or DEFAULT_GPU)
    allocator = AllocatorConfig.parse_optional(gpu.allocator, gpu.releases.release)
    with model_of(model, report_progress, gpu.name, own=training is not None and training.is_own) as loaded:
        from memsize.analysis.model_setups import plans_of
        from memsize.analysis.report import ReportBuilder, stored_report
        from memsize.analysis.runner import Runner

        if not (
            model.has_input
            or loaded.maker
            or training
            or request.execute
            or request.compile
            or request.scenarios is not None
        ):
            _refuse_options_of_runs(request)
            return stored_report(loaded.name, loaded.model, loaded.notes)
        if request.scenarios is None and not (request.compile or request.execute):
            scenarios = (*scenarios, *_own_compiled(loaded.model))
        run = with_inputs(model, loaded)
        plans = plans_of(where, gpu.releases) if gpu.name or training else None
        runner = Runner(
            *run.run, gpu=where, execute=request.execute, plans=plans, stack=gpu.releases, whole=model.whole
        )
        builder = ReportBuilder(
            runner, training, parallel=spread, peaks=bool(gpu.name), config=allocator, progress=report_progress
        )
        return builder.build(scenarios, default=request.scenarios is None and not request.compile, notes=run.notes)


def _refuse_options_of_runs(request: ReportRequest) -> None:
    """Raise `InputError` for an option that is about a run of the model, where no input is given."""
    model, gpu = request.model, request.gpu
    options: dict[str, object] = {
        "batch_size": model.batch_size,
        "seq_len": model.seq_len,
        "mode": model.mode,
        "whole": model.whole,
        "gpu": gpu.name != DEFAULT_GPU and gpu.name,  # which may be a command's default
        "stack": str(gpu.releases),
        "allocator": gpu.allocator,
    }
    if unused := next((name for name, value in options.items() if value), None):
        why = "is about a run of the model, which needs an input: give one, such as 3,224,224"
        raise InputError(f"{unused} {why}")


@takes(TraceRequest)
def trace(request: TraceRequest) -> StepTrace:
    """Trace what is alive at every moment of a training step, and what a GPU would show at its peak.

    The model and its input are given as to `report`. Without an `optimizer` it is one inference without gradients.
    `step` is called once with a copy of the model and returns the body of the loop, which is called `steps` times with
    the inputs. With `world` it runs as one process of many: ``step(model)`` shards or wraps the copy by PyTorch's own
    code (`fully_shard`, `DistributedDataParallel`, `parallelize_module`), in a process group that is there already.
    `parallel` does that without code.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    if request.world is not None and (request.step is None or request.execute):
        raise InputError(
            "one process of many runs with step=, a function that shards the model and returns the body of its loop, "
            "and without execute"
        )
    training = request.training
    if request.step is not None and training is not None and training != Training(steps=training.steps):
        raise InputError("step is a loop of your own: its optimizer, loss and backward passes are defined there")
    return step_trace(request, loop=request.step, world=request.world)


@takes(TimelineRequest)
def timeline(request: TimelineRequest, *, progress: Callable[[str], None] | None = None) -> Timeline:
    """Show the live memory of a model over training steps, by role; without `train`, over one inference.

    The model and its input are given as to `report`; `trace` also runs a loop of your own. The timeline can be drawn,
    saved as a page, and plotted.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    return step_trace(request, progress=progress).as_timeline()


def step_trace(
    request: TimelineRequest,
    *,
    loop: Callable[..., Any] | None = None,
    world: World | None = None,
    progress: Callable[[str], None] | None = None,
) -> StepTrace:
    """Return the trace that a timeline is drawn from, of a `loop` of one's own as process of a `world`."""
    from memsize.analysis.step import StepTrace

    training, gpu = request.training, request.gpu
    where, scenario = card(gpu.name or DEFAULT_GPU), scenario_named(request.scenario)
    allocator = AllocatorConfig.of(gpu.allocator, gpu.releases.release)
    scenario = compiled_from(scenario, request.compile) if request.compile and not scenario.compile else scenario
    spread = spread_of(request.parallel, training, loop=loop is not None, execute=request.execute)
    _refuse_run_compiled((scenario,), world, request.execute)
    refuse_resizing(request.model)
    own = training is not None and training.is_own
    with model_of(request.model, progress or (lambda _: None), where.name, own=own) as loaded:
        from memsize.analysis.model_setups import plans_of
        from memsize.analysis.ranks import others_asked
        from memsize.analysis.runner import Runner
        from memsize.analysis.varying_lengths import TRACED_STEPS, rows_of
        from memsize.processes.patches import collector_paused
        from memsize.workloads.parallel import RankLoop, steps_on
        from memsize.workloads.training import OwnLoop

        model = with_inputs(request.model, loaded)
        if scenario.name == "as-given" and world is None and not request.execute:
            scenario = next(iter(_own_compiled(loaded.model)), scenario)
        runner = Runner(
            *model.run,
            gpu=where,
            execute=request.execute,
            plans=plans_of(where, gpu.releases),
            stack=gpu.releases,
            whole=request.model.whole,
        )

        def traced(world: World | None) -> Trace:
            steps = training.steps if training else USUAL_STEPS
            workload: Workload = steps_on(training, spread, where) if loop is None else OwnLoop(loop, steps)
            if loop is not None and world is not None:
                workload = RankLoop(loop, world, where, steps=steps)
            return runner.run(workload, scenario).in_rows()

        def at_length(length: int) -> Trace:
            (progress or (lambda _: None))(f"{length:,} tokens")
            inputs = with_inputs(replace(request.model, seq_len=length), loaded).run[2]
            three = steps_on(replace(training or Training(), steps=TRACED_STEPS), None, where)
            return runner.with_inputs(inputs, runner.inputs.batch_size).run(three, scenario)

        with collector_paused(), others_asked(traced, world):
            step = StepTrace(traced(world), where.name, allocator)
            lengths = request.model.seq_len
            if training is None or spread or loop is not None or not isinstance(lengths, Lengths):
                return step
            capacity = where.bytes - step.peak.device.high + step.peak.reserved
            return replace(step, lengths=rows_of(at_length, lengths, runner.inputs.batch_size, allocator, capacity))


def _own_compiled(model: nn.Module) -> tuple[Scenario, ...]:
    """The scenario of a model as it comes, where `torch.compile` was asked to compile it or parts of it."""
    from memsize.model.meta_copy import compiled_parts

    return (compiled_from(scenario_named("as-given")),) if compiled_parts(model) else ()


def _refuse_run_compiled(scenarios: Iterable[Scenario], world: World | None, execute: bool) -> None:
    if world is not None or execute:
        refuse_compiled(scenarios, "runs on the CPU" if execute else "several GPUs")


@takes(VerifyRequest)
def verify(request: VerifyRequest, *, progress: Callable[[str], None] | None = None) -> Verification:
    """Compare a prediction with a real GPU: the same step is run there and measured.

    The model and its input are given as to `report`. The step is run on this machine, by a process that holds nothing
    on the device yet; or the prediction is compared with the measurements in the file `against`, which
    `Verification.save` wrote.

    Raises `InputError` where there is no GPU, or the file is no measurement of this step; and `TargetError`,
    `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    from memsize.records.run_file import read_run
    from memsize.records.verification import Verification

    scenario, report_progress = scenario_named(request.scenario), progress or (lambda _: None)
    refuse_compiled((scenario,), "comparisons with a GPU")
    refuse_resizing(request.model)
    if request.device and request.against is not None:
        raise InputError("device is a GPU of this machine, and a saved measurement (against) needs none: leave out one")
    saved: Verification | None = None
    if request.against is not None:
        saved = read_run(request.against, {Verification.kind: Verification}.get)
    else:
        # Before anything else: this may be all there is to say, and it must see the device untouched.
        from memsize.analysis.verify.cuda_memory import CudaMemory

        memory = CudaMemory(request.device)
    with opened(request.model, report_progress) as model:
        from memsize.analysis.verify.verification import Experiment, verify_measurements, verify_step

        experiment = Experiment(*model.run, scenario, request.training)
        checked = (
            verify_step(experiment, memory, report_progress)
            if saved is None
            else verify_measurements(experiment, [run.measurement for run in saved.runs])
        )
    return replace(checked, notes=(*checked.notes, *model.notes))


@takes(LayoutRequest)
def layout(request: LayoutRequest, *, progress: Callable[[str], None] | None = None) -> LayoutReport:
    """Audit what channels last does to a model: which layers keep it, which op loses it, and what is copied to
    rearrange.

    The model and its input are given as to `report`. It is run as it is, and once more with the weights and inputs that
    are images in ``torch.channels_last``, volumes in ``torch.channels_last_3d``, both times under `scenario`.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    scenario = scenario_named(request.scenario)
    refuse_compiled((scenario,), "memory formats")
    refuse_resizing(request.model)
    with opened(request.model, progress or (lambda _: None)) as model:
        from memsize.analysis.findings.layout import RULES
        from memsize.analysis.layout import audit
        from memsize.analysis.runner import Runner
        from memsize.records.layout import LayoutReport

        runner = Runner(*model.run)
        audited = runner.looking_up(lambda: audit(lambda: runner.setup(scenario)))
        return LayoutReport(audited, (*model.notes, *runner.notes(scenario)), RULES.findings(audited))


def shape_rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a custom op returns, for ops that PyTorch has no `meta` kernel of: a decorator.

    `names` are operators as their schema names them (``"mylib::scan"``). The function takes the op's arguments, `meta`
    tensors, and returns what the op would, on `meta`; NotImplemented leaves the answer to PyTorch. A name that has a
    rule already raises ValueError.
    """
    from memsize.kernels.registry import shape_rule as register

    return register(*names)


# -- before a training loop --------------------------------------------------------------------------------------------


@takes(GuardRequest)
def guard(request: GuardRequest) -> Guard:
    """Predict the peak of a training loop before its first step, and warn or stop where the memory isn't there.

        guard = memsize.guard(model, optimizer, batch)
        ...                                 # your loop
        guard.predicted, guard.measured()   # under the names of torch.cuda.memory_stats

    `optimizer` is yours, as it will be used, or None for inference; `batch` is what the model's forward takes: a
    tensor, a tuple of positional inputs, or a mapping of keyword inputs. None of them is run, moved or changed, and
    random generators stay as they are. Without a `budget` it is what is free on the CUDA device plus what PyTorch holds
    of it; without CUDA nothing is compared. `on_excess` warns with a `UserWarning` or raises `BudgetError`. The GPU is
    by default that of this machine where there is CUDA.

    Raises `BudgetError`, and what `trace` raises.
    """
    import torch

    training = request.training
    step = trace(
        TraceRequest(
            model=ModelRequest.of(request.model, input_data=request.batch),
            scenario=request.scenario,
            training=training and replace(training, optimizer=remade(request.model, training.optimizer)),
            gpu=replace(request.gpu, name=request.gpu.name or ("local" if torch.cuda.is_available() else None)),
        )
    )
    prediction = Guard(step, budget_of(request.budget), request.on_excess)
    if prediction.fits is False:
        prediction.exceed(prediction.text(), stacklevel=4)
    return prediction


def remade(model: nn.Module, optimizer: Any) -> Callable[[list[Any]], Any]:
    """Return a function that makes an optimizer like this one for another copy of the model's trained parameters."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:  # those of accelerate and Lightning
        optimizer = inner
    if not hasattr(optimizer, "param_groups"):
        raise InputError(f"optimizer is {quoted(str(optimizer))}: give the one of your loop, or None")
    trained = (p for p in model.parameters() if p.requires_grad)
    numbers = {id(parameter): number for number, parameter in enumerate(trained)}

    def plain(value: Any) -> Any:  # a learning rate may be a tensor on the GPU
        return value.item() if hasattr(value, "item") else value

    groups = []
    for group in optimizer.param_groups:
        chosen = [numbers[id(p)] for p in group["params"] if id(p) in numbers]
        groups.append((chosen, {name: plain(value) for name, value in group.items() if name != "params"}))
    arguments = inspect.signature(type(optimizer)).parameters
    defaults = {name: plain(value) for name, value in optimizer.defaults.items() if name in arguments}

    def make(parameters: list[Any]) -> Any:
        groups_of_copy = ({"params": [parameters[n] for n in chosen]} | options for chosen, options in groups if chosen)
        return type(optimizer)([*groups_of_copy], **defaults)

    make.__name__ = type(optimizer).__name__
    return make


def budget_of(budget: str | int | None) -> int | None:
    """The bytes that PyTorch may reserve: those that are given, else what is free for it; None without CUDA."""
    if budget is not None:
        return parse_bytes(budget) if isinstance(budget, str) else budget
    import torch

    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()
