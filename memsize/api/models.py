"""Questions about a model: what it holds, step by step, and in which layout.

All take the same `ModelRequest`: what `ModelRequest.of` says of its arguments is true of every one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from memsize.api.opened import model_of, opened, with_inputs
from memsize.api.question import asks_about_a_model, training_of
from memsize.errors import InputError
from memsize.spec.model_request import InputOptions, InputSize, ModelRequest
from memsize.spec.parallel import Parallel, spread_of
from memsize.spec.scenario import scenario_named, select
from memsize.spec.stack import Stack
from memsize.spec.training import Training

if TYPE_CHECKING:
    from torch import nn

    from memsize.analysis.step import StepTrace
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.records.layout import LayoutReport
    from memsize.records.report import Report
    from memsize.records.trace import Trace
    from memsize.records.verification import Verification
    from memsize.records.world import World
    from memsize.workloads import Workload

_ONE_RANK = (
    "one process of many runs with step=, a function that shards the model and returns the body of its loop, "
    "and without execute"
)


@asks_about_a_model
def report(
    model_or_target: nn.Module | str | ModelRequest,
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

    subject = ModelRequest.of(model_or_target, input_size, **given)
    asked, say, software = select(scenarios), progress or (lambda _: None), Stack.of(stack)
    trained = training_of(train)
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
        builder = ReportBuilder(runner, trained, parallel=spread, peaks=where is not None, config=config, progress=say)
        return builder.build(asked, default=scenarios is None, notes=found.notes)


@asks_about_a_model
def trace(
    model_or_target: nn.Module | str | ModelRequest,
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
    without code: ``"fsdp=8"``, ``"ddp=8"`` and ``"pp=4"`` run the usual loop as one process of many. `gpu` is
    the GPU to simulate, `stack` its PyTorch and CUDA, `config` the settings of its caching allocator, as
    `PYTORCH_CUDA_ALLOC_CONF` writes them. `execute` really computes, on the CPU.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    from memsize.analysis.step import StepTrace
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.device.cards import card
    from memsize.records.gpu import DEFAULT_GPU

    subject = ModelRequest.of(model_or_target, input_size, **given)
    where, asked, software = card(gpu or DEFAULT_GPU), scenario_named(scenario), Stack.of(stack)
    training = None if optimizer is None else Training(optimizer, loss, steps, accumulate, set_to_none, ema, scaler)
    settings = AllocatorConfig.of(config, software.release)
    if world is not None and (step is None or execute):
        raise InputError(_ONE_RANK)
    spread = spread_of(parallel, training, loop=step is not None, execute=execute)
    with opened(subject, gpu=where.name, own=training is not None and training.is_own) as found:
        from memsize.analysis.ranks import others_asked
        from memsize.analysis.runner import Runner, plans_of
        from memsize.workloads.distributed_step import RankLoop
        from memsize.workloads.parallel import steps_on
        from memsize.workloads.training import OwnLoop

        runner = Runner(*found.run, gpu=where, execute=execute, plans=plans_of(where), stack=software)

        def traced(world: World | None) -> Trace:
            workload: Workload = steps_on(training, spread, where) if step is None else OwnLoop(step, steps)
            if step is not None and world is not None:
                workload = RankLoop(step, world, where, steps)
            return runner.run(workload, asked)

        with others_asked(traced, world):
            return StepTrace(traced(world), where.name, settings)


@asks_about_a_model
def verify(
    model_or_target: nn.Module | str | ModelRequest,
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

    subject = ModelRequest.of(model_or_target, input_size, **given)
    asked, say, trained = scenario_named(scenario), progress or (lambda _: None), training_of(train)
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


@asks_about_a_model
def audit_layout(
    model_or_target: nn.Module | str | ModelRequest,
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
    with opened(ModelRequest.of(model_or_target, input_size, **given), progress or (lambda _: None)) as found:
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
    from memsize.kernels.registry import shape_rule as register

    return register(*names)
