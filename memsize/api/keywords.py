"""Functions of a request that people call with keywords: `report(model, (3, 64, 64), train="adamw")`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeVar

from memsize.errors import InputError, MemsizeError, TorchMissingError
from memsize.spec.options import keywords_of, of_keywords, options_of
from memsize.spec.project import usual_values

Answer = TypeVar("Answer")


def takes(request: type[Any]) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Let a function of a `request` be called with the keywords of its options, or with the request itself.

    Its own keyword-only parameters, such as `progress`, stay keywords. `help` and notebooks show all of them, with the
    help of each option behind the function's docstring.
    """

    def decorate(function: Callable[..., Answer]) -> Callable[..., Answer]:
        plain = inspect.signature(function)
        own = {name: p for name, p in plain.parameters.items() if p.kind is p.KEYWORD_ONLY}
        keywords_of_request = keywords_of(request)  # type: ignore[arg-type]
        positional = [p.name for p in keywords_of_request.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

        @wraps(function)
        def call(*values: Any, **keywords: Any) -> Answer:
            if values and isinstance(values[0], request):
                with _torch_wanted():
                    return function(*values, **keywords)
            if len(values) > len(positional):
                raise InputError(f"{function.__name__} takes {', '.join(positional)}, and the rest by keywords")
            named = dict(zip(positional, values, strict=False))
            if twice := next((name for name in named if name in keywords), None):
                raise InputError(f"{twice} is given twice, by its place and by its name")
            try:
                usual = usual_values(request, {*named, *keywords})
                parsed, own_values = of_keywords(request, usual | named | keywords, own)
                with _torch_wanted():
                    return function(parsed, **own_values)
            except MemsizeError as error:
                error.args = (_in_python(error.args[0], request), *error.args[1:])
                raise

        call.__signature__ = plain.replace(parameters=[*keywords_of_request.values(), *own.values()])  # type: ignore[attr-defined]
        lines = _described(request, tuple(keywords_of_request), own)
        call.__doc__ = "\n".join((f"{(function.__doc__ or '').rstrip()}\n", "    Keywords:", *lines))
        return call

    return decorate


_PROGRESS: Final = "A function that is called with what is being done."


def _described(request: type, keywords: tuple[str, ...], own: Mapping[str, object]) -> Iterator[str]:
    """Yield a line for each keyword that is an option with a help text."""
    for key, choice in options_of(request).items():
        if key in keywords and choice.help:
            yield f"        {key}: {_in_python(choice.description, request)}"
    if "progress" in own:
        yield f"        progress: {_PROGRESS}"


@contextmanager
def _torch_wanted() -> Iterator[None]:
    """Say how to install PyTorch where it is missing; much of memsize does without."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchMissingError from None


def _in_python(text: str, request: type) -> str:
    """The text of an error with the options of a request by their keywords, but where it quotes a command."""
    keywords = {flag: choice.python or key for key, choice in options_of(request).items() for flag in choice.flags}

    def keyword(flag: re.Match[str]) -> str:
        if flag[1] not in keywords or re.search(r"memsize [a-z-]+ [^,;:()]*$", text[: flag.start()]):
            return flag[0]
        key, value = keywords[flag[1]], flag[2]
        return key if value is None else f"{key}={value}" if value.isdecimal() else f'{key}="{value}"'

    return re.sub(r"(?<![\w-])(--[a-z][a-z-]*)(?: (\d(?:[\w,:]*\w)?))?", keyword, text).replace("(in Python: ", "(")
