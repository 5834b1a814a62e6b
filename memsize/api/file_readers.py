"""Questions about files: checkpoints, memory snapshots and saved runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from memsize.api.keywords import takes
from memsize.api.opened import model_of
from memsize.errors import InputError
from memsize.loading.target import parse_target
from memsize.spec.model_request import ModelRequest
from memsize.spec.requests import CheckpointRequest, ExplainRequest

if TYPE_CHECKING:
    from memsize.checkpoints.checkpoint_report import CheckpointReport
    from memsize.records.explanation import Explanation


@takes(CheckpointRequest)
def checkpoint(request: CheckpointRequest) -> CheckpointReport:
    """Report what a checkpoint weighs and why: a file, an index of several, or a folder. Only its headers are read.

    `against` is a module, or a target built with `arguments`, whose tensors the file is compared with.

    Raises `CheckpointError` for what is not a checkpoint, is damaged, or names what runs code when it is loaded; and
    `TargetError` for the target.
    """
    if request.against is None and request.arguments:
        raise InputError("--arg is for the constructor of a model to compare with: name it with --against")
    if isinstance(request.against, str):
        parse_target(request.against)
    from memsize.checkpoints import read
    from memsize.checkpoints.checkpoint_report import CheckpointReport

    report = CheckpointReport(read(request.path))
    if request.against is None:
        return report
    from memsize.checkpoints.state_dict_diff import compared, expected_from

    with model_of(ModelRequest.of(request.against, arguments=request.arguments)) as (name, model, *_):
        return CheckpointReport(report.contents, compared(report.breakdown, expected_from(model), name))


@takes(ExplainRequest)
def explain(request: ExplainRequest) -> Explanation:
    """Explain a memory snapshot of a real GPU: what was alive, where it was allocated, and whether fragmentation is to
    blame.

    `snapshot` is a file that `torch.cuda.memory._dump_snapshot` wrote. It is explained at the moment when memory ran
    out, else at the peak of its history. `against` is a prediction to compare with: a saved run, or the answer of
    `run`, `trace` or `report(train=…)`. `device` is the GPU, by default the one that ran out or holds most.

    Raises `InputError` for a file that is no snapshot or is damaged, and for a saved run that predicts no peak.
    """
    from memsize.analysis.explain.explanation import explain as explained

    against = load(request.against) if isinstance(request.against, (str, os.PathLike)) else request.against
    return explained(request.snapshot, against, request.device)


def load(path: str | os.PathLike[str]) -> Any:
    """Read what `save` or ``--save`` wrote: a `Report`, `StepTrace`, `ProgramRun`, `Fit`, `LayoutReport`,
    `CheckpointReport`, `Verification`, `Comparison` or `Explanation`, equal to the one that was saved. torch is not
    imported.

    Raises `InputError` for a file that is no saved run, that is damaged, or that a newer memsize wrote.
    """
    from memsize.analysis.step import load as loaded

    return loaded(path)
