"""The composition: from a model or a target to a `Report`. The command line and notebooks call the same functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from memsize.device.cards import DEFAULT as DEFAULT_GPU
from memsize.document import Report
from memsize.errors import InputError, MemsizeError
from memsize.inputs import InputSpec, parse_input
from memsize.record import Trace
from memsize.scenario import SCENARIOS, scenario_named, select
from memsize.training import Training

if TYPE_CHECKING:
    from torch import nn

    from memsize.checkpoint.document import CheckpointReport
    from memsize.comparison import Comparison
    from memsize.device import AllocatorConfig
    from memsize.steptrace import StepTrace
    from memsize.tracing.feed import Feed

Mode = Literal["train", "eval"]
InputSize = str | Sequence[int] | Sequence[Sequence[int] | str]


def report(
    model_or_target: nn.Module | str,
    input_size: InputSize | None = None,
    *,
    inputs: Sequence[InputSpec] = (),
    input_data: Any = None,
    batch_size: int = 1,
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

    `model_or_target` is a module, which is never run or changed, or a target such as ``"model.py:Test"``, built with
    `arguments`. Its input is one of: `input_size` without the batch dimension (``(3, 64, 64)``, several of them, or the
    command line's text such as ``"input_ids=512:int64"``); `inputs`, the same already parsed; `input_data`, real inputs
    with their batch dimension (a tensor, a tuple of positional ones, a mapping of keyword ones). `scenarios` is a comma
    list, names or ``"all"``; None takes the usual ones. `mode` is the training flag that the forward runs under.
    `train` asks for training steps with that optimizer (``"adamw"``, ``"sgd:momentum=0.9"``, or a `Training`), so that
    each scenario says what a GPU would show at their peak; `gpu` names the card that is meant, `config` its
    allocator's settings. `execute` really
    computes on the CPU, where the model's way depends on its data. `progress` is told what is being done.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own forward fails.
    """
    from memsize.device import card

    asked = select(scenarios)
    say = progress or (lambda _: None)
    with _loaded(model_or_target, arguments or {}, say) as (name, model, notes):
        feed = _feed(model, input_size, inputs, input_data, batch_size)

        from memsize.study import Study

        study = Study(
            name, model, feed, mode == "train", say, card(gpu) if gpu else None, _training(train), execute, config
        )
        return study.report(asked, default=scenarios is None, notes=notes)


def trace(
    model_or_target: nn.Module | str,
    inputs: Any = None,
    *,
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
    arguments: Mapping[str, object] | None = None,
    mode: Mode = "train",
    execute: bool = False,
) -> StepTrace:
    """What is alive at every moment of a training step, and what a GPU would show at its peak.

    `inputs` is a size without the batch dimension, text as on the command line or several of either, with `batch_size`;
    or real inputs with their batch dimension: a tensor, a tuple of tensors, a mapping. `optimizer` is a name
    (``"adamw"``, ``"adamw:fused"``, ``"sgd:momentum=0.9"``), a function from parameters to an optimizer, or None for
    one inference without gradients; `loss` a name of `memsize.training.LOSSES`, a function of the output, or None for
    the one that the output suggests. `step` replaces all of that by the user's own loop: ``step(model)`` is called once
    with the twin and returns the body, which is called `steps` times with the inputs. `gpu` names the card that is
    meant and `config` the allocator's settings, as `PYTORCH_CUDA_ALLOC_CONF` writes them.

    Raises `TargetError`, `InputError`, `ScenarioError`, or `ForwardError` when the model's own code fails.
    """
    from memsize.device import AllocatorConfig, card
    from memsize.steptrace import StepTrace

    where = card(gpu or DEFAULT_GPU)
    training = None if optimizer is None else Training(optimizer, loss, steps, accumulate, set_to_none, ema, scaler)
    settings = AllocatorConfig.parse(config) if isinstance(config, str) else config or AllocatorConfig()
    size, data = _size_or_data(inputs)
    with _loaded(model_or_target, arguments or {}, lambda _: None) as (name, model, _):
        feed = _feed(model, size, (), data, batch_size)

        from memsize.study import Study

        study = Study(name, model, feed, mode == "train", lambda _: None, where, training, execute)
        return StepTrace(study.run(scenario_named(scenario), step, steps), where.name, settings)


def shape_rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a custom op returns, for ops that PyTorch has no `meta` kernel of: a decorator.

    `names` are operators as their schema names them (``"mylib::scan"``). The function takes the op's arguments, `meta`
    tensors, and returns what the op would, on `meta`; NotImplemented leaves the answer to PyTorch. A name that has a
    rule already raises ValueError.
    """
    from memsize.tracing.shapes import shape_rule as register

    return register(*names)


def _size_or_data(inputs: Any) -> tuple[InputSize | None, Any]:
    """`inputs` as a size or as data: sizes are text, integers, or sequences of those."""

    def is_size(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, (tuple, list)) and all(isinstance(n, int) for n in value))

    several = isinstance(inputs, (tuple, list)) and len(inputs) > 0 and all(map(is_size, inputs))
    return (inputs, None) if is_size(inputs) or several else (None, inputs)


def compare(before: Any, after: Any, input_size: InputSize | None = None, **options: Any) -> Comparison:
    """What changed from one model to another, what did not, and why: before and after `.half()`, `quantize_`, pruning.

    `before` and `after` are modules, targets, traces or reports. Modules and targets are run when an input is given
    (`input_size` and `options` as in `report`); without one only what they store is compared.

    Raises `MemsizeError` for anything else, and what `report` raises.
    """
    from memsize.comparison import compare_traces

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
    from memsize.checkpoint.against import compared, expected_from

    with _loaded(against, arguments or {}, lambda _: None) as (name, model, _):
        return CheckpointReport(found.contents, compared(found.anatomy, expected_from(model), name))


def _as_trace(subject: Any, input_size: InputSize | None, options: dict[str, Any]) -> Trace:
    if isinstance(subject, Trace):
        return subject
    if isinstance(subject, Report):
        return subject.trace
    if input_size is not None or options.get("inputs") or options.get("input_data") is not None:
        return report(subject, input_size, **({"scenarios": "as-given"} | options)).trace
    with _loaded(subject, options.get("arguments") or {}, lambda _: None) as (name, model, _):
        from memsize.tracing.run import stored_only

        return stored_only(name, model)


def _training(train: Training | str | None) -> Training | None:
    return Training(train) if isinstance(train, str) else train


@contextmanager
def _loaded(
    subject: object, arguments: Mapping[str, object], say: Callable[[str], None]
) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """The name, the model and what is to be said of it; while open, a target's own imports work as it expects."""
    if isinstance(subject, str):
        from memsize.loading import load

        say(f"loading {subject}")
        loaded = load(subject, arguments)
        with loaded.importable():
            yield loaded.name, loaded.module, loaded.notes
        return
    from torch import nn

    if not isinstance(subject, nn.Module):
        got = type(subject).__name__
        raise MemsizeError(f"expected a torch.nn.Module or a target such as 'model.py:Test', got {got}")
    yield type(subject).__name__, subject, ()


def _feed(
    model: nn.Module, input_size: InputSize | None, inputs: Sequence[InputSpec], input_data: Any, batch_size: int
) -> Feed:
    from memsize.tracing.feed import feed_from_data, feed_from_specs

    given = (input_size is not None, bool(inputs), input_data is not None)
    if sum(given) > 1:
        raise InputError("give the input once: as input_size, as inputs, or as input_data")
    if input_data is not None:
        return feed_from_data(input_data)
    specs = tuple(inputs) or _specs(input_size)
    if not specs:
        from memsize.tracing.signature import wanted_inputs

        raise InputError(f"the model needs an input: {wanted_inputs(model)}")
    return feed_from_specs(specs, batch_size)


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


__all__ = ["SCENARIOS", "compare", "read_checkpoint", "report", "trace"]
