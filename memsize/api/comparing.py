"""Two of anything side by side: modules, targets of now or of a revision, saved runs, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memsize.api.file_readers import load, read_checkpoint
from memsize.api.models import report
from memsize.loading.revision import parse_revision
from memsize.loading.target import LIBRARIES, is_checkpoint
from memsize.records.answer import Saveable
from memsize.records.run_file import is_run_file
from memsize.records.trace import Trace
from memsize.spec.model_request import InputOptions, InputSize, ModelRequest

if TYPE_CHECKING:
    from memsize.records.comparison import Comparison


def compare(before: Any, after: Any, input_size: InputSize | Any = None, **options: Any) -> Comparison:
    """What changed from one model to another, what did not, and why: between two versions of its code, or before and
    after `.half()`, `quantize_`, pruning.

    `before` and `after` are modules, targets, traces, steps, reports, saved runs or checkpoints; a target may be that
    of a git revision, as in ``"HEAD~1:model.py:Net"``, which is checked out beside and run in a process of its own.
    Modules and targets are run when an input is given (`input_size` and `options` as in `report`, `scenarios` being
    ``"as-given"`` by default); without one only what they store is compared.

    Raises `MemsizeError` for anything else, and what `report` and `read_checkpoint` raise.
    """
    from memsize.analysis.compare import compare_sides
    from memsize.analysis.comparison_sides import Side

    given = {name: options.pop(name) for name in InputOptions.__annotations__ if name in options}

    def side(of: Any) -> Side:
        if isinstance(of, Trace | Saveable):
            return Side.of(of)
        subject = ModelRequest.of(os.fspath(of) if isinstance(of, os.PathLike) else of, input_size, **given)
        return Side.of(answer_of(subject, options), subject.model if isinstance(subject.model, str) else "")

    return compare_sides(side(before), side(after))


def answer_of(subject: ModelRequest, options: Mapping[str, Any]) -> Any:
    """The answer about a subject: the one that a file holds, or a report on a model with `options`.

    Of a model without an input that is what it stores.
    """
    text = subject.model
    if isinstance(text, str):
        if is_run_file(text):
            return load(text)
        if revision := parse_revision(text):
            from memsize.api.revision_process import answer_at

            if say := options.get("progress"):
                say(f"running {text}")
            return answer_at(revision, answer_of, subject, {k: v for k, v in options.items() if k != "progress"})
        if is_checkpoint(text):
            return read_checkpoint(text)
    library = isinstance(text, str) and text.partition(":")[0] in LIBRARIES
    is_run = subject.has_input or library or options.get("train") or options.get("execute")
    if not is_run:
        return report(subject)
    given = {name: value for name, value in options.items() if value is not None}
    return report(subject, **({"scenarios": "as-given"} | given))
