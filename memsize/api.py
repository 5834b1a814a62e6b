"""The composition: from a model or a target to an answer. The command line and notebooks call the same functions.

Every question about a model takes the same `Subject`: what `memsize.spec.subject.Subject.of` says of its arguments is
true of `report`, `trace`, `fit`, `verify` and `audit_layout` alike.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from memsize.errors import ExitError, MemsizeError, exits_caught
from memsize.records.trace import Trace
from memsize.spec.scenario import SCENARIOS, scenario_named, select
from memsize.spec.stack import Stack
from memsize.spec.subject import InputOptions, InputSize, Subject
from memsize.spec.training import Training

if TYPE_CHECKING:
    from torch import nn

    from memsize.analysis.program import VirtualGpu
    from memsize.analysis.step import StepTrace
    from memsize.checkpoint.report import CheckpointReport
    from memsize.device.config import AllocatorConfig
    from memsize.model.inputs import ModelInputs
    from memsize.records.comparison import Comparison
    from memsize.records.fit import Fit
    from memsize.records.layout import LayoutReport
    from memsize.records.program import ProgramRun
    from memsize.records.report import Report
    from memsize.records.verification import Verification
    from memsize.spec.request import InputMaker

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
    at their peak; `gpu` is the GPU to simulate, `stack` the PyTorch and CUDA that it has (``"torch=2.6,cuda=12.4"``;
    None: the installed ones), `config` the settings of its caching allocator. `execute` really computes, on the CPU,
    for models with data-dependent control flow. `progress` is called with what is being done.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    from memsize.device.cards import card
    from memsize.records.gpu import DEFAULT_GPU

    subject = Subject.of(model_or_target, input_size, **given)
    asked, say, software = select(scenarios), progress or (lambda _: None), Stack.of(stack)
    with _loaded(subject, say) as loaded:
        from memsize.analysis.report import ReportBuilder, stored_report
        from memsize.analysis.runner import Runner, plans_of

        if not (subject.has_input or loaded.maker or train or execute or scenarios is not None):
            return stored_report(loaded.name, loaded.model, loaded.notes)
        found = _with_inputs(subject, loaded)
        where, trained = card(gpu) if gpu else None, _training(train)
        plans = plans_of(where or card(DEFAULT_GPU)) if where or trained else None
        runner = Runner(*found.run, gpu=where, execute=execute, plans=plans, stack=software)
        builder = ReportBuilder(runner, trained, peaks=where is not None, config=config, say=say)
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
    copy of the model and returns the body of the loop, which is called `steps` times with the inputs. `gpu` is the GPU
    to simulate, `stack` its PyTorch and CUDA, `config` the settings of its caching allocator, as
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
    with _opened(subject) as found:
        from memsize.analysis.runner import Runner, plans_of
        from memsize.workloads.training import OwnLoop, step_workload

        runner = Runner(*found.run, gpu=where, execute=execute, plans=plans_of(where), stack=software)
        workload = step_workload(training) if step is None else OwnLoop(step, steps)
        return StepTrace(runner.run(workload, asked), where.name, settings)


def shape_rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a custom op returns, for ops that PyTorch has no `meta` kernel of: a decorator.

    `names` are operators as their schema names them (``"mylib::scan"``). The function takes the op's arguments, `meta`
    tensors, and returns what the op would, on `meta`; NotImplemented leaves the answer to PyTorch. A name that has a
    rule already raises ValueError.
    """
    from memsize.meta_kernels.registry import shape_rule as register

    return register(*names)


def run(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    gpu: str | None = None,
    steps: int = 3,
    module: bool = False,
    config: AllocatorConfig | str | None = None,
    allow_writes: bool = False,
) -> ProgramRun:
    """What a script that was written for a GPU would do to one, from a run of it on a GPU that isn't there.

    `script` runs in this process with `arguments` as its command line (with `module`, the module of that name, as
    ``python -m`` runs it), until its optimizer has made `steps` steps; 0 runs it to its end. What it computes on the
    GPU has no values, and numbers that it reads from there are stand-ins. Files that were there before are left alone
    unless `allow_writes` is set. `gpu` and `config` are as for `trace`.

    Raises `InputError` where there is no such script, and `ForwardError` when the script itself fails.
    """
    from memsize.analysis.program import run_program
    from memsize.device.cards import card
    from memsize.device.config import AllocatorConfig
    from memsize.errors import ForwardError
    from memsize.records.gpu import DEFAULT_GPU

    where = card(gpu or DEFAULT_GPU)
    found, error = run_program(
        os.fspath(script),
        tuple(arguments),
        where,
        AllocatorConfig.of(config),
        steps=steps,
        module=module,
        allow_writes=allow_writes,
    )
    if error is not None and not found.refused:
        raise ForwardError(f"{script} failed: {type(error).__name__}: {error}", found.trace) from error
    return found


def virtual_gpu(
    gpu: str | None = None,
    *,
    steps: int = 0,
    config: AllocatorConfig | str | None = None,
    allow_writes: bool = False,
) -> AbstractContextManager[VirtualGpu]:
    """Let the code in a ``with`` block have a GPU that isn't there, as `run` gives it to a script.

        with memsize.virtual_gpu("t4") as gpu:
            train(Net().cuda())
        gpu.run, gpu.trace

    The block ends after `steps` optimizer steps (0: at its own end). Raises `InputError` when one is open already.
    """
    from memsize.analysis import program
    from memsize.device.cards import card
    from memsize.device.config import AllocatorConfig
    from memsize.records.gpu import DEFAULT_GPU

    where = card(gpu or DEFAULT_GPU)
    settings = AllocatorConfig.of(config)
    return program.virtual_gpu(where, settings, steps=steps, allow_writes=allow_writes)


@_asks_about_a_model
def fit(
    model_or_target: nn.Module | str | Subject,
    input_size: InputSize | Any = None,
    *,
    vary: str = "batch",
    scenarios: str | Iterable[str] | None = None,
    train: Training | str | None = None,
    gpu: str | Iterable[str] | None = None,
    budget: str | int | None = None,
    margin: str | int = 0,
    stack: Stack | str | None = None,
    config: AllocatorConfig | str | None = None,
    remedies: bool | None = None,
    crossovers: bool = False,
    progress: Callable[[str], None] | None = None,
    **given: Unpack[InputOptions],
) -> Fit:
    """The largest batch that fits a GPU, scenario by scenario; or whether one does, and what would make it fit.

    The model and its input are given as to `report`. `batch_size` asks whether that batch fits and, where it doesn't,
    for remedies; None finds the largest. `vary` searches for another size at that batch: ``"seq_len"``, ``"image"``, or
    dimensions such as ``"input_ids:1,attention_mask:1"``, counted with the batch as 0. `train` asks for training steps
    with that optimizer, None for inference; `mode` is ``"train"`` with it and ``"eval"`` without, unless it is given.
    `gpu` is the name of a GPU, several of them, or ``"local"``; `budget` is a size of its memory instead, in bytes or
    as ``"15109MiB"``. The CUDA context and `margin` (bytes, a size, or ``"5%"``) are subtracted from either. `stack` is
    its PyTorch and CUDA, `config` holds the caching allocator's settings. `remedies` tries them in any case (True) or
    never (False); `crossovers` looks for the sizes from which on autocast pays or the peak moves.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    from memsize.device.budget import budgets
    from memsize.device.config import AllocatorConfig
    from memsize.spec.vary import parse_vary

    subject = Subject.of(model_or_target, input_size, **given)
    asked, varied = select(scenarios), parse_vary(vary)
    software = Stack.of(stack)
    settings = AllocatorConfig.of(config, software.release)
    capacities = budgets(gpu, budget, margin, software, settings.memory_fraction)
    trained, say = _training(train), progress or (lambda _: None)
    with _opened(replace(subject, mode=subject.mode or ("train" if trained else "eval")), say) as found:
        from memsize.analysis.fit.fit import FitRequest, find_fit
        from memsize.analysis.fit.trials import Trials

        trials = Trials(*found.run, varied, say, stack=software)
        one = subject.batch_size if varied.batch else None
        request = FitRequest(asked, capacities, trained, settings, one, remedies, crossovers, default=scenarios is None)
        return find_fit(trials, request, found.notes)


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
    with _opened(subject, say) as found:
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
    with _opened(Subject.of(model_or_target, input_size, **given), progress or (lambda _: None)) as found:
        from memsize.analysis.findings.layout import RULES
        from memsize.analysis.layout import audit
        from memsize.analysis.runner import Runner
        from memsize.records.layout import LayoutReport

        runner = Runner(*found.run)
        audited = audit(lambda: runner.setup(asked))
        return LayoutReport(audited, found.notes, RULES.findings(audited))


def compare(before: Any, after: Any, input_size: InputSize | Any = None, **options: Any) -> Comparison:
    """What changed from one model to another, what did not, and why: before and after `.half()`, `quantize_`, pruning.

    `before` and `after` are modules, targets, traces, steps, reports or saved runs. Modules and targets are run when an
    input is given (`input_size` and `options` as in `report`); without one only what they store is compared.

    Raises `MemsizeError` for anything else, and what `report` raises.
    """
    from memsize.analysis.compare import compare_traces

    return compare_traces(_as_trace(before, input_size, options), _as_trace(after, input_size, options))


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    against: nn.Module | str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> CheckpointReport:
    """What a checkpoint weighs and why: a file, an index of several, or a folder. Only its headers are read.

    `against` is a module, or a target built with `arguments`, whose tensors the file is compared with.

    Raises `CheckpointError` for what is not a checkpoint, is damaged, or names what runs code when it is loaded; and
    `TargetError` for the target.
    """
    from memsize.checkpoint import read
    from memsize.checkpoint.report import CheckpointReport

    found = CheckpointReport(read(path))
    if against is None:
        return found
    from memsize.checkpoint.state_dict_diff import compared, expected_from

    with _loaded(Subject.of(against, arguments=arguments)) as (name, model, *_):
        return CheckpointReport(found.contents, compared(found.breakdown, expected_from(model), name))


def load(path: str | os.PathLike[str]) -> Any:
    """What `save` or ``--save`` wrote: a `Report`, `StepTrace`, `Fit`, `LayoutReport`, `CheckpointReport`,
    `Verification` or `Comparison`, equal to the one that was saved. torch is not imported.

    Raises `InputError` for a file that is no saved run, that is damaged, or that a newer memsize wrote.
    """
    from memsize.analysis.saved import load as loaded

    return loaded(path)


def _as_trace(subject: Any, input_size: Any, options: dict[str, Any]) -> Trace:
    from memsize.analysis.step import StepTrace
    from memsize.records.report import Report
    from memsize.records.run_file import is_run_file

    if isinstance(subject, (str, os.PathLike)) and is_run_file(subject):
        subject = load(subject)
    if isinstance(subject, Trace):
        return subject
    if isinstance(subject, (Report, StepTrace)):
        return subject.trace
    asked = Subject.of(subject, input_size, **{k: v for k, v in options.items() if k in InputOptions.__annotations__})
    if asked.has_input:
        return report(subject, input_size, **({"scenarios": "as-given"} | options)).trace
    with _loaded(asked) as (name, model, *_):
        from memsize.tracing.run import stored_only

        return stored_only(name, model)


def _training(train: Training | str | None) -> Training | None:
    return Training(train) if isinstance(train, str) else train


class _Opened(NamedTuple):
    """A subject as something to run: its name, the model, its inputs and its training flag; and the notes on it."""

    run: tuple[str, nn.Module, ModelInputs, bool]
    notes: tuple[str, ...]


class _Loaded(NamedTuple):
    """A subject's model: its name, what is to be said of it, and what makes its inputs."""

    name: str
    model: nn.Module
    notes: tuple[str, ...]
    maker: InputMaker | None


@contextmanager
def _opened(subject: Subject, say: Callable[[str], None] = lambda _: None) -> Iterator[_Opened]:
    """The subject with its model built; while open, a target's own imports work as it expects."""
    with _loaded(subject, say) as loaded:
        yield _with_inputs(subject, loaded)


def _with_inputs(subject: Subject, loaded: _Loaded) -> _Opened:
    from memsize.model.inputs import inputs_for

    training = subject.mode != "eval"
    inputs = inputs_for(subject, loaded.model, loaded.maker, training)
    run = (loaded.name, loaded.model, inputs, training)
    return _Opened(run, (*loaded.notes, *filter(None, [inputs.note])))


@contextmanager
def _loaded(subject: Subject, say: Callable[[str], None] = lambda _: None) -> Iterator[_Loaded]:
    """The subject's model. While open, a target's own imports work as it expects.

    The user's code runs only in here: one thread at a time, and the process is as it was afterwards.
    """
    if isinstance(subject.model, str):
        from memsize.loading import load, parse_target

        target = parse_target(subject.model)  # what cannot be one shows before torch is loaded
        say(f"loading {subject.model}")
        with _users_code_runs():
            loaded = load(target, subject.arguments)
            with loaded.importable(), _told(loaded.module), _untouched(loaded.module):
                yield _Loaded(loaded.name, loaded.module, loaded.notes, loaded.inputs)
        return
    from torch import nn

    model: object = subject.model
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise MemsizeError(f"expected a torch.nn.Module or a target such as 'model.py:Test', got {got}")
    with _users_code_runs(), _told(model), _untouched(model):
        yield _Loaded(type(model).__name__, model, (), None)


def _untouched(model: nn.Module) -> AbstractContextManager[None]:
    """The globals of the model's code are kept; raises `MemsizeError` for a model that must not even be copied."""
    from memsize.model.globals_kept import globals_kept
    from memsize.model.traced import refuse_traced_model

    refuse_traced_model(model)
    return globals_kept(model)


@contextmanager
def _users_code_runs() -> Iterator[None]:
    from memsize.internals.isolation import isolated

    try:
        with exits_caught(), isolated():
            yield
    except ExitError as error:
        from memsize.loading.building import user_traceback
        from memsize.loading.scope import is_users

        raise MemsizeError(f"the model ended the program {user_traceback(error, is_users)}") from error


@contextmanager
def _told(model: nn.Module) -> Iterator[None]:
    """While open, what the user's own code raises is an error that says where; a model without end is refused."""
    from memsize.loading.building import users_failures_told
    from memsize.model.structure import refuse_endless

    with users_failures_told():
        refuse_endless(model)
        yield


__all__ = ["SCENARIOS", "audit_layout", "compare", "fit", "load", "read_checkpoint", "report", "trace"]
