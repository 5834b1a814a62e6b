"""Inputs that a function of the user's makes (``--inputs file.py:make_inputs``), and a forward's arguments in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memsize.errors import InputError, TargetError
from memsize.loading.building import random_numbers_kept, user_traceback, weightless
from memsize.loading.scope import ImportScope, is_users
from memsize.spec.inputs import InputMaker, InputRequest

if TYPE_CHECKING:
    from torch import nn


def input_maker(function: Callable[..., Any], label: str, scope: ImportScope | None = None) -> InputMaker:
    """Return a maker of inputs that calls `function` with the arguments ``batch_size``, ``seq_len`` and ``training``,
    if it takes them, and without the memory of large tensors, if it can run so.

    Calling it raises `InputError` where the function fails, needs other arguments, or returns nothing.
    """
    taken = _taken(function, label)

    def make(request: InputRequest) -> Any:
        arguments = {name: value for name, value in asdict(request).items() if name in taken}
        if request.seq_len is None:
            arguments.pop("seq_len", None)
        elif "seq_len" not in taken:
            raise InputError(f"{label} takes no seq_len, so --seq-len means nothing to it")
        if request.batch_size > 1 and "batch_size" not in taken:
            raise InputError(f"{label} takes no batch_size, so it says itself how many samples there are")
        return _call(function, arguments, label, scope)

    return InputMaker(make, resizable="batch_size" in taken, untyped=False)


def _taken(function: Callable[..., Any], label: str) -> set[str]:
    """The names of `InputRequest` fields that `function` has parameters for."""
    names = {"batch_size", "seq_len", "training"}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return names
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in names - {"seq_len"}]
    if missing:
        raise InputError(f"{label} needs {', '.join(missing)}: it may only ask for batch_size, training, seq_len=None")
    return names & {p.name for p in named}


def _call(function: Callable[..., Any], arguments: dict[str, Any], label: str, scope: ImportScope | None) -> Any:
    is_theirs = scope.owns if scope else is_users
    try:
        with random_numbers_kept():
            inputs = weightless(function, arguments, is_theirs)[0]
    except TargetError:
        raise
    except Exception as error:
        raise InputError(f"{label} failed {user_traceback(error, is_theirs)}") from error
    if inputs is None:
        raise InputError(f"{label} returned None, not the model's inputs")
    return inputs


def wanted_inputs(model: nn.Module) -> str:
    """Say in words which arguments the model's forward takes, and how to give them on the command line."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return "give one with --input SHAPE"
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in taken if p.default is p.empty]
    names = ", ".join(needed or [p.name for p in taken][:3]) or "nothing by name"
    how = (
        "give each with --input SHAPE or --input name=SHAPE:DTYPE, without the batch dimension (in Python: input_size)"
    )
    return f"its forward takes {names}; {how}"
