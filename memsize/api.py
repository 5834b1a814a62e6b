"""The composition: from a model or a target to a `Report`. The command line and notebooks call the same functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from memsize.errors import InputError, MemsizeError
from memsize.records.trace import Trace
from memsize.spec.inputs import InputSpec, parse_input
from memsize.spec.scenario import SCENARIOS, scenario_named, select
from memsize.spec.training import Training

if TYPE_CHECKING:
    from torch import nn

    from memsize.analysis.step import StepTrace
    from memsize.checkpoint.document import CheckpointReport
    from memsize.cuda.cudnn.plans import Plans
    from memsize.device.config import AllocatorConfig
    from memsize.model.inputs import Feed
    from memsize.records.comparison import Comparison
    from memsize.records.fit import Fit
    from memsize.records.gpu import Card
    from memsize.records.layout import LayoutReport
    from memsize.records.report import Report
    from memsize.records.verification import Verification
    from memsize.spec.request import InputMaker

Mode = Literal["train", "eval"]
InputSize = str | Sequence[int] | Sequence[Sequence[int] | str]


def report(
    model_or_target: nn.Module | str,
    input_size: InputSize | None = None,
    *,
    inputs: Sequence[InputSpec] = (),
    input_data: Any = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    scenarios: str | Iterable[str] | None = None,
    mode: Mode = "train",
    train: Training | str | None = None,
    gpu: str | None = None,
    config: AllocatorConfig | None = None,
    execute: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """What each byte of a model is, scenario by scenario, and why it did or didn't shrink.

    `model_or_target` is a module, which is never run or changed, or a target such as ``"model.py:Test"`` or
    ``"timm:resnet18"``, built with `arguments`. Its input is one of: `input_size` without the batch dimension
    (``(3, 64, 64)``, several of them, or the command line's text such as ``"input_ids=512:int64"``); `inputs`, the same
    already parsed; `input_data`, real inputs with their batch dimension (a tensor, a tuple of positional ones, a
    mapping of keyword ones), a function that returns those, or ``"file.py:make_inputs"``, which names one. A library's
    model needs none: memsize makes them, texts of `seq_len` tokens. `scenarios` is a comma
    list, names or ``"all"``; None takes the usual ones. `mode` is the training flag that the forward runs under.
    `train` asks for training steps with that optimizer (``"adamw"``, ``"sgd:momentum=0.9"``, or a `Training`), so that
    each scenario says what a GPU would show at their peak; `gpu` names the card that is meant, `config` its
    allocator's settings. `execute` really
    computes on the CPU, where the model's way depends on its data. `progress` is told what is being done.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    from memsize.device.cards import card
    from memsize.records.gpu import DEFAULT_GPU

    asked = select(scenarios)
    say = progress or (lambda _: None)
    with _loaded(model_or_target, arguments or {}, say) as (name, model, notes, maker):
        feed = _feed(model, maker, input_size, inputs, input_data, (batch_size, seq_len, mode == "train"))

        from memsize.analysis.runner import Study

        where, trained = card(gpu) if gpu else None, _training(train)
        plans = _plans(where or card(DEFAULT_GPU)) if where or trained else None
        study = Study(name, model, feed, mode == "train", say, where, trained, execute, config, plans)
        return study.report(asked, default=scenarios is None, notes=(*notes, *([feed.note] if feed.note else [])))


def trace(
    model_or_target: nn.Module | str,
    inputs: Any = None,
    *,
    input_data: Any = None,
    scenario: str = "fp32",
    optimizer: str | Callable[[Any], Any] | None = "adamw",
    loss: str | Callable[[Any], Any] | None = None,
    steps: int = 3,
    step: Callable[..., Any] | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
    ema: bool = False,
    scaler: bool | None = None,
    gpu: str | None = None,
    config: AllocatorConfig | str | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Mode = "train",
    execute: bool = False,
) -> StepTrace:
    """What is alive at every moment of a training step, and what a GPU would show at its peak.

    `inputs` is a size without the batch dimension, text as on the command line, or several of either (or of them,
    parsed), with `batch_size`; or real inputs with their batch dimension: a tensor, a tuple of tensors, a mapping, or a
    function that returns those. `input_data` is the latter alone, or the function's name as ``"file.py:make_inputs"``;
    a library's model (``"hf:config.json"``) needs neither. `optimizer` is a name (``"adamw"``, ``"adamw:fused"``,
    ``"sgd:momentum=0.9"``), a function from parameters to an optimizer, or None for one inference without gradients;
    `loss` a name of `memsize.spec.training.LOSSES`, a function of the output, or None for the one that the output
    suggests. `step` replaces all of that by the user's own loop: ``step(model)`` is called once with the twin and
    returns the body, which is called `steps` times with the inputs. `gpu` names the card that is meant and `config` the
    allocator's settings, as `PYTORCH_CUDA_ALLOC_CONF` writes them.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    from memsize.analysis.step import StepTrace
    from memsize.device.cards import card
    from memsize.device.config import AllocatorConfig
    from memsize.records.gpu import DEFAULT_GPU

    where = card(gpu or DEFAULT_GPU)
    training = None if optimizer is None else Training(optimizer, loss, steps, accumulate, set_to_none, ema, scaler)
    settings = AllocatorConfig.parse(config) if isinstance(config, str) else config or AllocatorConfig()
    size, specs, data = _given(inputs)
    if input_data is not None and (size is not None or specs or data is not None):
        raise InputError("give the input once: as inputs, or as input_data")
    data = data if input_data is None else input_data
    with _loaded(model_or_target, arguments or {}, lambda _: None) as (name, model, _, maker):
        feed = _feed(model, maker, size, specs, data, (batch_size, seq_len, mode == "train"))

        from memsize.analysis.runner import Study

        plans = _plans(where)
        study = Study(name, model, feed, mode == "train", lambda _: None, where, training, execute, plans=plans)
        return StepTrace(study.run(scenario_named(scenario), step, steps), where.name, settings)


def _plans(card: Card) -> Plans:
    """What cuDNN takes on a card, by this machine's cuDNN where it has one."""
    from memsize.cuda.cudnn.library import installed
    from memsize.cuda.cudnn.plans import Plans

    return Plans(card.capability, installed)


def shape_rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a custom op returns, for ops that PyTorch has no `meta` kernel of: a decorator.

    `names` are operators as their schema names them (``"mylib::scan"``). The function takes the op's arguments, `meta`
    tensors, and returns what the op would, on `meta`; NotImplemented leaves the answer to PyTorch. A name that has a
    rule already raises ValueError.
    """
    from memsize.meta_kernels.registry import shape_rule as register

    return register(*names)


def fit(
    model_or_target: nn.Module | str,
    input_size: InputSize | None = None,
    *,
    inputs: Sequence[InputSpec] = (),
    input_data: Any = None,
    batch: int | None = None,
    seq_len: int | None = None,
    vary: str = "batch",
    scenarios: str | Iterable[str] | None = None,
    train: Training | str | None = None,
    mode: Mode | None = None,
    gpu: str | Iterable[str] | None = None,
    budget: str | int | None = None,
    margin: str | int = 0,
    config: AllocatorConfig | str | None = None,
    remedies: bool | None = None,
    crossovers: bool = False,
    arguments: Mapping[str, object] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Fit:
    """The largest batch that fits a GPU, scenario by scenario; or whether one does, and what would make it fit.

    The model and its input are given as to `report`. `batch` asks whether that batch fits and, where it doesn't, for
    remedies; None finds the largest. `vary` searches for another size at that batch: ``"seq_len"``, ``"image"``, or
    dimensions such as ``"input_ids:1,attention_mask:1"``, counted with the batch as 0. `train` asks for training steps
    with that optimizer, None for inference; `mode` is the training flag (None: as it suits). `gpu` is the name of a
    card, several of them, or ``"local"``; `budget` a size of the device instead, such as ``"15109MiB"``. Of either the
    CUDA context and `margin` (bytes, a size or ``"5%"``) are taken off. `config` holds the allocator's settings.
    `remedies` tries them in any case or never, `crossovers` looks for the sizes from which on something else is so.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model runs under no scenario.
    """
    from memsize.analysis.fit.budget import budgets
    from memsize.device.config import AllocatorConfig
    from memsize.spec.vary import parse_vary

    asked, varied = select(scenarios), parse_vary(vary)
    found = budgets(gpu, budget, margin)
    settings = AllocatorConfig.parse(config) if isinstance(config, str) else config or AllocatorConfig()
    trained, say = _training(train), progress or (lambda _: None)
    with _loaded(model_or_target, arguments or {}, say) as (name, model, notes, maker):
        flag = (mode or ("train" if trained else "eval")) == "train"
        feed = _feed(model, maker, input_size, inputs, input_data, (batch or 1, seq_len, flag))

        from memsize.analysis.fit.answer import Question, answer
        from memsize.analysis.fit.trials import Trials

        trials = Trials(name, model, feed, flag, varied, say)
        one = batch if varied.batch else None
        question = Question(asked, found, trained, settings, one, remedies, crossovers, default=scenarios is None)
        return answer(trials, question, (*notes, *([feed.note] if feed.note else [])))


def verify(
    model_or_target: nn.Module | str,
    input_size: InputSize | None = None,
    *,
    inputs: Sequence[InputSpec] = (),
    input_data: Any = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    scenario: str = "fp32",
    train: Training | str | None = None,
    mode: Mode = "train",
    against: str | os.PathLike[str] | None = None,
    device: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """What is predicted beside what a GPU shows: the same step is run there for real.

    The model and its input are given as to `report`. `train` asks for training steps with that optimizer, None for one
    inference; `mode` is the training flag. The step is run on CUDA device `device` of this machine, by a process that
    holds nothing there yet; or it is `against` the file that `Verification.save` wrote, which needs no GPU.

    Raises `InputError` where there is no GPU, or the file is no measurement of this step; and `TargetError`,
    `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    from memsize.records.verification import read_measurements

    asked, say, trained = scenario_named(scenario), progress or (lambda _: None), _training(train)
    saved = None if against is None else read_measurements(os.fspath(against))
    if saved is None:
        # Before anything else: this may be all there is to say, and it must see the device untouched.
        from memsize.analysis.verify.cuda_memory import CudaMemory

        memory = CudaMemory(device)
    with _loaded(model_or_target, arguments or {}, say) as (name, model, notes, maker):
        feed = _feed(model, maker, input_size, inputs, input_data, (batch_size, seq_len, mode == "train"))

        from memsize.analysis.verify.verification import Experiment, verify_measurements, verify_step

        case = Experiment(name, model, feed, asked, mode == "train", trained)
        found = verify_step(case, memory, say) if saved is None else verify_measurements(case, saved)
    return replace(found, notes=(*found.notes, *notes, *([feed.note] if feed.note else [])))


def audit_layout(
    model_or_target: nn.Module | str,
    input_size: InputSize | None = None,
    *,
    inputs: Sequence[InputSpec] = (),
    input_data: Any = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    scenario: str = "as-given",
    mode: Mode = "train",
    progress: Callable[[str], None] | None = None,
) -> LayoutReport:
    """What channels last does to a model: which layers keep it, which op loses it, and what is copied to rearrange.

    The model and its input are given as to `report`. It is run as it is, and once more with the weights and inputs that
    are images in ``torch.channels_last``, volumes in ``torch.channels_last_3d``, under `scenario`.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    asked, say = scenario_named(scenario), progress or (lambda _: None)
    with _loaded(model_or_target, arguments or {}, say) as (name, model, notes, maker):
        feed = _feed(model, maker, input_size, inputs, input_data, (batch_size, seq_len, mode == "train"))

        from memsize.analysis.layout import audit
        from memsize.analysis.runner import Study
        from memsize.records.layout import LayoutReport

        study = Study(name, model, feed, mode == "train", say)
        found = audit(lambda: study.prepared(asked, batch_size))
        return LayoutReport(found, (*notes, *([feed.note] if feed.note else [])))


def _given(inputs: Any) -> tuple[InputSize | None, Sequence[InputSpec], Any]:
    """`inputs` as a size, as parsed specs or as data: sizes are text, integers, or sequences of those."""

    def is_size(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, (tuple, list)) and all(isinstance(n, int) for n in value))

    if isinstance(inputs, (tuple, list)) and all(isinstance(spec, InputSpec) for spec in inputs):
        return None, inputs, None
    several = isinstance(inputs, (tuple, list)) and all(map(is_size, inputs))
    return (inputs, (), None) if is_size(inputs) or several else (None, (), inputs)


def compare(before: Any, after: Any, input_size: InputSize | None = None, **options: Any) -> Comparison:
    """What changed from one model to another, what did not, and why: before and after `.half()`, `quantize_`, pruning.

    `before` and `after` are modules, targets, traces or reports. Modules and targets are run when an input is given
    (`input_size` and `options` as in `report`); without one only what they store is compared.

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
    from memsize.checkpoint.document import CheckpointReport

    found = CheckpointReport(read(path))
    if against is None:
        return found
    from memsize.checkpoint.state_dict_diff import compared, expected_from

    with _loaded(against, arguments or {}, lambda _: None) as (name, model, *_):
        return CheckpointReport(found.contents, compared(found.breakdown, expected_from(model), name))


def _as_trace(subject: Any, input_size: InputSize | None, options: dict[str, Any]) -> Trace:
    from memsize.records.report import Report

    if isinstance(subject, Trace):
        return subject
    if isinstance(subject, Report):
        return subject.trace
    if input_size is not None or options.get("inputs") or options.get("input_data") is not None:
        return report(subject, input_size, **({"scenarios": "as-given"} | options)).trace
    with _loaded(subject, options.get("arguments") or {}, lambda _: None) as (name, model, *_):
        from memsize.tracing.run import stored_only

        return stored_only(name, model)


def _training(train: Training | str | None) -> Training | None:
    return Training(train) if isinstance(train, str) else train


@contextmanager
def _loaded(
    subject: object, arguments: Mapping[str, object], say: Callable[[str], None]
) -> Iterator[tuple[str, nn.Module, tuple[str, ...], InputMaker | None]]:
    """The name, the model, what is to be said of it and what makes its inputs; while open, a target's own imports work
    as it expects.
    """
    if isinstance(subject, str):
        from memsize.loading import load

        say(f"loading {subject}")
        loaded = load(subject, arguments)
        with loaded.importable():
            yield loaded.name, loaded.module, loaded.notes, loaded.inputs
        return
    from torch import nn

    if not isinstance(subject, nn.Module):
        got = type(subject).__name__
        raise MemsizeError(f"expected a torch.nn.Module or a target such as 'model.py:Test', got {got}")
    yield type(subject).__name__, subject, (), None


def _feed(
    model: nn.Module,
    maker: InputMaker | None,
    input_size: InputSize | None,
    inputs: Sequence[InputSpec],
    input_data: Any,
    wanted: tuple[int, int | None, bool],
) -> Feed:
    """The inputs that were given, else those that `maker` knows. `wanted` are the batch size, the length of texts where
    one was chosen, and whether the model is to train.
    """
    from memsize.model.inputs import feed_from_data, feed_from_maker, feed_from_specs
    from memsize.spec.request import Request

    request = Request(*wanted)
    given = (input_size is not None, bool(inputs), input_data is not None)
    if sum(given) > 1:
        raise InputError("give the input once: as input_size, as inputs, or as input_data")
    own = _maker_of(input_data)
    if own is None and input_data is not None:
        return feed_from_data(input_data)
    specs = tuple(inputs) or _specs(input_size)
    maker = own or (None if specs else maker)
    if maker is not None:
        return feed_from_maker(maker, request)
    if not specs:
        from memsize.loading.signature import wanted_inputs

        raise InputError(f"the model needs an input: {wanted_inputs(model)}")
    if request.seq_len is not None:
        raise InputError("a sequence length is for inputs that are made: these say their own sizes")
    return feed_from_specs(specs, request.batch_size)


def _maker_of(data: Any) -> InputMaker | None:
    """What makes the inputs where `data` is a function or names one."""
    from memsize.loading import load_inputs
    from memsize.loading.inputs import input_maker

    if isinstance(data, str):
        return load_inputs(data)
    if callable(data) and not isinstance(data, Mapping):
        return input_maker(data, getattr(data, "__name__", type(data).__name__))
    return None


def _specs(input_size: InputSize | None) -> tuple[InputSpec, ...]:
    """`input_size` in any of its forms: one size, one text, or a sequence of either."""
    if input_size is None:
        return ()
    if isinstance(input_size, str):
        return (parse_input(input_size),)
    if all(isinstance(size, int) for size in input_size):
        return (parse_input(",".join(map(str, input_size))),)
    texts = [size if isinstance(size, str) else ",".join(map(str, size)) for size in input_size]  # type: ignore[arg-type]
    return tuple(parse_input(text) for text in texts)


__all__ = ["SCENARIOS", "audit_layout", "compare", "fit", "read_checkpoint", "report", "trace"]
