"""Questions about files: checkpoints and saved runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memsize.api.opened import model_of
from memsize.spec.subject import Subject

if TYPE_CHECKING:
    from torch import nn

    from memsize.checkpoint.report import CheckpointReport


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
