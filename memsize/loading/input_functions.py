"""Inputs that are made on request: by memsize for a model that a library names, or by the user's function, as in
``--inputs file.py:make_inputs``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from memsize.errors import InputError, TargetError
from memsize.loading.building import random_numbers_kept, user_traceback, weightless
from memsize.loading.scope import ImportScope, is_users
from memsize.spec.input_maker import InputMaker, InputRequest


def input_maker(function: Callable[..., Any], label: str, scope: ImportScope | None = None) -> InputMaker:
    """What `function` returns, as inputs. It is given those of ``batch_size``, ``seq_len`` and ``training`` that it
    takes, and runs without the memory of large tensors where it can.

    Calling it raises `InputError` where the function fails, needs other arguments, or returns nothing.
    """
    taken = _taken(function, label)

    def make(request: InputRequest) -> Any:
        asked = {name: value for name, value in asdict(request).items() if name in taken}
        if request.seq_len is None:
            asked.pop("seq_len", None)
        elif "seq_len" not in taken:
            raise InputError(f"{label} takes no seq_len, so --seq-len means nothing to it")
        if request.batch_size > 1 and "batch_size" not in taken:
            raise InputError(f"{label} takes no batch_size, so it says itself how many samples there are")
        return _called(function, asked, label, scope)

    return InputMaker(make, resizable="batch_size" in taken, untyped=False)


def _taken(function: Callable[..., Any], label: str) -> set[str]:
    """Which parts of a request `function` has parameters for."""
    known = {"batch_size", "seq_len", "training"}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return known
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in known - {"seq_len"}]
    if missing:
        raise InputError(f"{label} needs {', '.join(missing)}: it may only ask for batch_size, training, seq_len=None")
    return known & {p.name for p in named}


def _called(function: Callable[..., Any], asked: dict[str, Any], label: str, scope: ImportScope | None) -> Any:
    is_theirs = scope.owns if scope else is_users
    try:
        with random_numbers_kept():
            found = weightless(function, asked, is_theirs)[0]
    except TargetError:
        raise
    except Exception as error:
        raise InputError(f"{label} failed {user_traceback(error, is_theirs)}") from error
    if found is None:
        raise InputError(f"{label} returned None, not the model's inputs")
    return found
