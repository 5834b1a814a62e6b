"""Questions about files and earlier answers: checkpoints, saved runs, and two of anything compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memsize.api.models import report
from memsize.api.opened import model_of
from memsize.records.trace import Trace
from memsize.spec.subject import InputOptions, InputSize, Subject

if TYPE_CHECKING:
    from torch import nn

    from memsize.checkpoint.report import CheckpointReport
    from memsize.records.comparison import Comparison


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

    with model_of(Subject.of(against, arguments=arguments)) as (name, model, *_):
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
    with model_of(asked) as (name, model, *_):
        from memsize.tracing.run import stored_only

        return stored_only(name, model)
