"""A question about another revision of the user's code, asked in a process of its own.

Two versions of one module must not meet in one process: the second import would find the first. The process works in
the revision's folder, and imports from there what this one imports from the repository.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from memsize.errors import MemsizeError, TargetError
from memsize.loading.revision import Checkout, Revision, checked_out
from memsize.spec.requests import ReportRequest

Ask = Callable[[ReportRequest], Any]
_PACKAGE: Final = Path(__file__).absolute().parents[1]
_START: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; from memsize.api.revision_process import answer; answer(sys.argv[1])"
)


def answer_at(revision: Revision, ask: Ask, request: ReportRequest) -> Any:
    """Return what `ask`, a function of a module, answers about the request's model as it was at `revision`.

    Raises `TargetError` where there is no such revision, or `ask` fails there.
    """
    with checked_out(revision.name) as checkout, tempfile.TemporaryDirectory(prefix="memsize-") as folder:
        exchange = Path(folder) / "question"
        model = replace(request.model, model=_target(revision.target, checkout))
        try:
            exchange.write_bytes(pickle.dumps((ask, replace(request, model=model), checkout)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            why = f"its input and options go to another process, and cannot: {error}"
            raise TargetError(f"cannot ask about {revision.name}: {why}") from None
        command = [sys.executable, "-P", "-c", _START, str(exchange), *_paths(checkout)]
        done = subprocess.run(command, cwd=checkout.folder, stdin=subprocess.DEVNULL, stdout=2, check=False)
        if done.returncode:
            raise TargetError(f"the process that ran {revision.name} ended with status {done.returncode}")
        answer = pickle.loads(exchange.read_bytes())
    if isinstance(answer, str):
        raise TargetError(f"at {revision.name}: {answer}")
    return answer


def _target(target: str, checkout: Checkout) -> str:
    """The target with an absolute path at the revision, where it has one in the repository."""
    path, colon, name = target.partition(":")
    if Path(path).is_absolute():
        return checkout.moved(path) + colon + name
    # As git does, a path that is not below the working folder is looked for below the repository's.
    if not (checkout.folder / path).exists() and (checkout.copy / path).exists():
        return str(checkout.copy / path) + colon + name
    return target


def _paths(checkout: Checkout) -> list[str]:
    """Where that process imports from: what lies in the repository as it was, memsize itself as it is."""
    own = str(_PACKAGE.parent)
    return [path if path == own else checkout.moved(path) for path in sys.path if path] + [own]


def answer(exchange: str) -> None:
    """In that process: answer the question in the file, and write the answer, or what went wrong, in its place."""
    ask, request, checkout = pickle.loads(Path(exchange).read_bytes())
    try:
        reply = ask(request)
        _refuse_mixture(checkout)
    except MemsizeError as error:
        reply = str(error)
    Path(exchange).write_bytes(pickle.dumps(reply))


def _refuse_mixture(checkout: Checkout) -> None:
    """Raise `TargetError` where a module came from the user's work tree: the answer would be about two versions."""
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("memsize", "__main__"):
            continue
        if Path(file).is_relative_to(checkout.top) and checkout.moved(file) != file:
            raise TargetError(f"{name} was imported from {os.path.relpath(file, checkout.top)} as it is now")
