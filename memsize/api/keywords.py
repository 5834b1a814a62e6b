"""Functions of a request that people call with keywords: `report(model, (3, 64, 64), train="adamw")`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from memsize.errors import InputError
from memsize.spec.options import keywords_of, of_keywords

Answer = TypeVar("Answer")


def takes(request: type) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Let a function of a `request` be called with the keywords of its options, or with the request itself.

    Its own keyword-only parameters, such as `progress`, stay keywords. `help` and notebooks show all of them.
    """

    def decorate(function: Callable[..., Answer]) -> Callable[..., Answer]:
        plain = inspect.signature(function)
        own = [p for p in plain.parameters.values() if p.kind is p.KEYWORD_ONLY]
        keywords_of_request = keywords_of(request)
        positional = [p.name for p in keywords_of_request.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

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

        call.__signature__ = plain.replace(parameters=[*keywords_of_request.values(), *own])  # type: ignore[attr-defined]
        return call

    return decorate


def renamed_to(function: Callable[..., Answer], old: str) -> Callable[..., Answer]:
    """Return `function` under its `old` name, which warns of the new one."""

    @wraps(function)
    def call(*values: Any, **keywords: Any) -> Answer:
        warnings.warn(f"{old} is now {function.__name__}", DeprecationWarning, stacklevel=2)
        return function(*values, **keywords)

    call.__name__ = call.__qualname__ = old
    return call
