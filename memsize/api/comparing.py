"""Questions about files, and two of anything side by side: modules, targets of now or of a revision, files."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memsize.api.keywords import takes
from memsize.api.models import report
from memsize.api.opened import model_of
from memsize.errors import InputError, MemsizeError, TargetError
from memsize.loading.target import (
    LIBRARIES,
    Checkout,
    Revision,
    checked_out,
    is_checkpoint,
    parse_revision,
    parse_target,
)
from memsize.records.answer import Saveable
from memsize.records.run_file import is_run_file
from memsize.records.trace import Trace
from memsize.spec.file_requests import CheckpointRequest, ExplainRequest
from memsize.spec.model_request import ModelRequest
from memsize.spec.requests import DiffRequest, ReportRequest

if TYPE_CHECKING:
    from memsize.checkpoints.checkpoint_report import CheckpointReport
    from memsize.records.comparison import Comparison
    from memsize.records.error import OutOfMemoryReport
    from memsize.records.explanation import Explanation


@takes(CheckpointRequest)
def checkpoint(request: CheckpointRequest) -> CheckpointReport:
    """Report what a checkpoint weighs and why: a file, an index of several, or a folder. Only its headers are read.

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
def explain(request: ExplainRequest) -> Explanation | OutOfMemoryReport:
    """Explain a memory snapshot of a real GPU: what was alive, where it was allocated, and whether fragmentation is to
    blame; or PyTorch's out-of-memory error in a text, such as a log: what the GPU held, and what would have helped.

    `snapshot` is a file that `torch.cuda.memory._dump_snapshot` wrote, one with the text (``"-"``: stdin), or the text
    itself, as in ``explain(str(error))``. A snapshot is explained at the moment when memory ran out, else at the peak
    of its history. `against`, for a snapshot alone, may also be an answer of `run`, `trace` or `report(train=…)`.

    Raises `InputError` for a file that is neither or is damaged, and for a saved run that predicts no peak.
    """
    from memsize.analysis.explain.error_text import explain_errors, is_snapshot
    from memsize.analysis.explain.explanation import explain as explained

    if not is_snapshot(request.snapshot):
        if request.against is not None:
            raise InputError("--against compares with a snapshot: a text of errors has too few figures")
        return explain_errors(request.snapshot, request.device)

    against = request.against
    if isinstance(against, (str, os.PathLike)):
        against = load(against) if is_run_file(against) else explained(against, device=request.device)
    return explained(request.snapshot, against, request.device)


def load(path: str | os.PathLike[str]) -> Any:
    """Read what `save` or ``--save`` wrote: a `Report`, `StepTrace`, `ProgramRun`, `Fit`, `LayoutReport`,
    `CheckpointReport`, `Verification`, `Comparison` or `Explanation`, equal to the one that was saved. torch is not
    imported.

    Raises `InputError` for a file that is no saved run, that is damaged, or that a newer memsize wrote.
    """
    from memsize.analysis.step import load as loaded

    return loaded(path)


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
    _refuse_unused_options(request)
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
        model = of if isinstance(of, ModelRequest) else replace(request.model, model=of)
        answer = answer_of(replace(settings, model=model), progress)
        return Side.of(answer, model.model if isinstance(model.model, str) else "")

    return compare_sides(side(request.before), side(request.after))


def _refuse_unused_options(request: DiffRequest) -> None:
    """Raise `InputError` for an option that neither side takes: an answer is there, a `ModelRequest` has its input."""
    plain, run = DiffRequest(before=None, after=None), []
    for side in (request.before, request.after):
        is_file = isinstance(side, str | os.PathLike) and (is_run_file(side) or is_checkpoint(os.fspath(side)))
        if not (is_file or isinstance(side, Trace | Saveable)):
            run.append(side)
    options = {"training": "train", "gpu": "a GPU", "execute": "execute", "scenarios": "scenarios"}
    if all(isinstance(side, ModelRequest) for side in run) and request.model != plain.model:
        raise InputError("an input is for models without one: both sides have theirs")
    for name, option in options.items():
        if not run and getattr(request, name) != getattr(plain, name):
            raise InputError(f"{option} is for models that are run: both sides are saved already")


def answer_of(request: ReportRequest, progress: Callable[[str], None] | None = None) -> Any:
    """The answer about a model: the one that a file holds, or a report.

    Of a model without an input that is what it stores.
    """
    text = request.model.model
    if isinstance(text, str):
        if is_run_file(text):
            return load(text)
        if revision := parse_revision(text):
            if progress:
                progress(f"running {text}")
            return _answer_at(revision, request)
        if is_checkpoint(text):
            return checkpoint(text)
    library = isinstance(text, str) and text.partition(":")[0] in LIBRARIES
    run_options = (request.model.has_input, library, request.training, request.execute, request.scenarios is not None)
    if not any(run_options):
        return report(ReportRequest(model=request.model, gpu=request.gpu))
    scenarios = "as-given" if request.scenarios is None else request.scenarios
    return report(replace(request, scenarios=scenarios), progress=progress)


# -- a model of another revision, in a process of its own --------------------------------------------------------------
#
# Two versions of one module must not meet in one process: the second import would find the first. The process works in
# the revision's folder, and imports from there what this one imports from the repository.

_PACKAGE: Final = Path(__file__).absolute().parents[1]
_START: Final = "import sys; sys.path[:] = sys.argv[2:]; from memsize.api.comparing import answer; answer(sys.argv[1])"


def _answer_at(revision: Revision, request: ReportRequest) -> Any:
    """Return the answer about the request's model as it was at `revision`; raise `TargetError` where there is none."""
    with checked_out(revision.name) as checkout, tempfile.TemporaryDirectory(prefix="memsize-") as folder:
        exchange = Path(folder) / "question"
        model = replace(request.model, model=_target(revision.target, checkout))
        try:
            exchange.write_bytes(pickle.dumps((replace(request, model=model), checkout)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            why = f"its input and options go to another process, and cannot: {error}"
            raise TargetError(f"cannot ask about {revision.name}: {why}") from None
        # It imports what lies in the repository as it was, and memsize itself as it is.
        own = str(_PACKAGE.parent)
        paths = [path if path == own else checkout.moved(path) for path in sys.path if path]
        command = [sys.executable, "-P", "-c", _START, str(exchange), *paths, own]
        done = subprocess.run(command, cwd=checkout.folder, stdin=subprocess.DEVNULL, stdout=2, check=False)
        if done.returncode:
            raise TargetError(f"the process that ran {revision.name} ended with status {done.returncode}")
        answer = pickle.loads(exchange.read_bytes())
    if isinstance(answer, str):
        raise TargetError(f"at {revision.name}: {answer}")
    return answer


def _target(target: str, checkout: Checkout) -> str:
    path, colon, name = target.partition(":")
    if Path(path).is_absolute():
        return checkout.moved(path) + colon + name
    # As git does, a path that is not below the working folder is looked for below the repository's.
    if not (checkout.folder / path).exists() and (checkout.copy / path).exists():
        return str(checkout.copy / path) + colon + name
    return target


def answer(exchange: str) -> None:
    """Answer the question in the file, in that process; write the answer, or what went wrong, in its place."""
    request, checkout = pickle.loads(Path(exchange).read_bytes())
    try:
        reply = answer_of(request)
        for name, module in tuple(sys.modules.items()):  # one of the work tree makes it about two versions
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or name.partition(".")[0] in ("memsize", "__main__"):
                continue
            if Path(file).is_relative_to(checkout.top) and checkout.moved(file) != file:
                raise TargetError(f"{name} was imported from {os.path.relpath(file, checkout.top)} as it is now")
    except MemsizeError as error:
        reply = str(error)
    Path(exchange).write_bytes(pickle.dumps(reply))
