"""Questions about files: checkpoints, memory snapshots and saved runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memsize.api.opened import model_of
from memsize.spec.model_request import ModelRequest

if TYPE_CHECKING:
    from torch import nn

    from memsize.checkpoint.checkpoint_report import CheckpointReport
    from memsize.records.explanation import Explanation


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
    from memsize.checkpoint.checkpoint_report import CheckpointReport

    found = CheckpointReport(read(path))
    if against is None:
        return found
    from memsize.checkpoint.state_dict_diff import compared, expected_from

    with model_of(ModelRequest.of(against, arguments=arguments)) as (name, model, *_):
        return CheckpointReport(found.contents, compared(found.breakdown, expected_from(model), name))


def explain(snapshot: str | os.PathLike[str], *, beside: Any = None, device: int | None = None) -> Explanation:
    """What was alive in a memory snapshot of a real GPU, where it was made, and whether fragmentation is to blame.

    `snapshot` is a file that `torch.cuda.memory._dump_snapshot` wrote. It is explained at the moment when memory ran
    out, else at the peak of its history. `beside` is a prediction to compare with: a saved run, or the answer of `run`,
    `trace` or `report(train=…)`. `device` is the GPU, by default the one that ran out or holds most.

    Raises `InputError` for a file that is no snapshot or is damaged, and for a saved run that predicts no peak.
    """
    from memsize.analysis.explain.explanation import explain as explained

    return explained(snapshot, load(beside) if isinstance(beside, (str, os.PathLike)) else beside, device)


def load(path: str | os.PathLike[str]) -> Any:
    """What `save` or ``--save`` wrote: a `Report`, `StepTrace`, `ProgramRun`, `Fit`, `LayoutReport`,
    `CheckpointReport`, `Verification`, `Comparison` or `Explanation`, equal to the one that was saved. torch is not
    imported.

    Raises `InputError` for a file that is no saved run, that is damaged, or that a newer memsize wrote.
    """
    from memsize.analysis.saved_runs import load as loaded

    return loaded(path)
