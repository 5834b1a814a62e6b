"""Two of anything side by side: modules, targets of now or of a revision, saved runs, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memsize.api.file_readers import checkpoint, load
from memsize.api.keywords import takes
from memsize.api.models import report
from memsize.errors import InputError
from memsize.loading.revision import parse_revision
from memsize.loading.target import LIBRARIES, is_checkpoint
from memsize.records.answer import Saveable
from memsize.records.run_file import is_run_file
from memsize.records.trace import Trace
from memsize.spec.model_request import ModelRequest
from memsize.spec.requests import DiffRequest, ReportRequest

if TYPE_CHECKING:
    from memsize.records.comparison import Comparison


@takes(DiffRequest)
def diff(request: DiffRequest, *, progress: Callable[[str], None] | None = None) -> Comparison:
    """Compare two models: what changed, what did not, and why: between two versions of its code, or before and
    after `.half()`, `quantize_`, pruning.

    `before` and `after` are modules, targets, traces, steps, reports, saved runs or checkpoints; a target may be that
    of a git revision, as in ``"HEAD~1:model.py:Net"``, which is checked out beside and run in a process of its own.
    Modules and targets are run when an input is given (`input_size` and the other keywords as in `report`, `scenarios`
    being ``"as-given"`` by default); without one only what they store is compared.

    Raises `MemsizeError` for anything else, and what `report` and `checkpoint` raise.
    """
    if not any(map(_is_run, (request.before, request.after))):
        _refuse_run_options(request)
    from memsize.analysis.compare import compare_sides
    from memsize.analysis.differences import Side

    settings = ReportRequest(
        model=request.model,
        training=request.training,
        gpu=request.gpu,
        execute=request.execute,
        scenarios=request.scenarios,
    )

    def side(of: Any) -> Side:
        if isinstance(of, Trace | Saveable):
            return Side.of(of)
        model = of if isinstance(of, ModelRequest) else replace(request.model, model=_named(of))
        answer = answer_of(replace(settings, model=model), progress)
        return Side.of(answer, model.model if isinstance(model.model, str) else "")

    return compare_sides(side(request.before), side(request.after))


def _is_run(side: Any) -> bool:
    """Whether a side is a model, or a target, and no answer or file that is there already."""
    if isinstance(side, str | os.PathLike):
        return not (is_run_file(os.fspath(side)) or is_checkpoint(os.fspath(side)))
    return not isinstance(side, Trace | Saveable | ModelRequest)


def _refuse_run_options(request: DiffRequest) -> None:
    """Raise `InputError` for what is asked of models that are run where both sides are there already."""
    plain = DiffRequest(before=request.before, after=request.after)
    options = {"model": "an input", "training": "train", "gpu": "a GPU", "execute": "execute", "scenarios": "scenarios"}
    for name, option in options.items():
        if getattr(request, name) != getattr(plain, name):
            raise InputError(f"{option} is for models that are run, and both sides are there already")


def _named(model: Any) -> Any:
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def answer_of(request: ReportRequest, progress: Callable[[str], None] | None = None) -> Any:
    """The answer about a model: the one that a file holds, or a report.

    Of a model without an input that is what it stores.
    """
    text = request.model.model
    if isinstance(text, str):
        if is_run_file(text):
            return load(text)
        if revision := parse_revision(text):
            from memsize.api.revision_process import answer_at

            if progress:
                progress(f"running {text}")
            return answer_at(revision, answer_of, request)
        if is_checkpoint(text):
            return checkpoint(text)
    library = isinstance(text, str) and text.partition(":")[0] in LIBRARIES
    if not (request.model.has_input or library or request.training or request.execute):
        return report(request.model)
    scenarios = "as-given" if request.scenarios is None else request.scenarios
    return report(replace(request, scenarios=scenarios), progress=progress)
