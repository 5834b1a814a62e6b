"""Functions of a request that people call with keywords: `report(model, (3, 64, 64), train="adamw")`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from memsize.errors import InputError
from memsize.spec.model_request import ModelRequest
from memsize.spec.options import of_keywords, options_of, python_keywords

Answer = TypeVar("Answer")


def takes(request: type) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Let a function of a `request` be called with the keywords of its options, or with the request itself.

    Its own keyword-only parameters, such as `progress`, stay keywords. `help` and notebooks show all of them.
    """

    def decorate(function: Callable[..., Answer]) -> Callable[..., Answer]:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        positional = _positional(request)

        @wraps(function)
        def call(*values: Any, **keywords: Any) -> Answer:
            if values and isinstance(values[0], request):
                return function(*values, **keywords)
            if len(values) > len(positional):
                raise InputError(f"{function.__name__} takes {', '.join(positional)}, and the rest by keywords")
            beside = {p.name: keywords.pop(p.name) for p in own if p.name in keywords}
            named = dict(zip(positional, values, strict=False))
            if twice := next((name for name in named if name in keywords), None):
                raise InputError(f"{twice} is given twice, by its place and by its name")
            return function(of_keywords(request, named | keywords, [p.name for p in own]), **beside)

        call.__signature__ = _signature(request, positional, own)  # type: ignore[attr-defined]
        return call

    return decorate


def _positional(request: type) -> tuple[str, ...]:
    """The keywords that also come by place: the model and its input, or the arguments of the command."""
    arguments = [choice.key for choice in options_of(request).values() if choice.positional and choice.key != "target"]
    names = python_keywords(request)
    return tuple(dict.fromkeys((*arguments, *(name for name in ("model", "input_size") if name in names))))


def _signature(request: type, positional: Sequence[str], own: Sequence[inspect.Parameter]) -> inspect.Signature:
    """The signature that `help` shows: the arguments by place, the options, and the function's `own` parameters."""
    defaults = {name: p.default for name, p in inspect.signature(ModelRequest.of).parameters.items()}
    defaults |= {choice.key: choice.default for choice in options_of(request).values()}
    rest = [name for name in python_keywords(request) if name not in positional]
    parameters = [
        *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in positional[:1]),
        *(_parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, defaults) for name in positional[1:]),
        *(_parameter(name, inspect.Parameter.KEYWORD_ONLY, defaults) for name in rest),
    ]
    return inspect.Signature([*parameters, *own])


def _parameter(name: str, kind: Any, defaults: dict[str, Any]) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=defaults.get(name))


def renamed_to(function: Callable[..., Answer], old: str) -> Callable[..., Answer]:
    """Return `function` under its `old` name, which warns of the new one."""

    @wraps(function)
    def call(*values: Any, **keywords: Any) -> Answer:
        warnings.warn(f"{old} is now {function.__name__}", DeprecationWarning, stacklevel=2)
        return function(*values, **keywords)

    call.__name__ = call.__qualname__ = old
    return call
