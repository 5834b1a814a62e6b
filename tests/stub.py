"""The types of `memsize`'s public names, for type checkers and editors: ``python -m tests.stub`` writes them.

The functions take the keywords of their requests, which only `inspect.signature` knows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import memsize

STUB = Path(memsize.__file__).with_name("__init__.pyi")
_STANDARD = {
    "collections.abc": ("Callable", "Iterable", "Mapping", "Sequence"),
    "contextlib": ("AbstractContextManager",),
    "os": ("PathLike",),
    "pathlib": ("Path",),
    "typing": ("Any", "Literal"),
}


def stub() -> str:
    """The text of the stub: what it imports, and a definition of each public function."""
    functions = [name for name in memsize.__all__ if inspect.isfunction(getattr(memsize, name))]
    definitions = [line for name in functions for line in _definition(name)]
    words = set(re.findall(r"\w+", "\n".join(definitions)))
    standard = {module: [name for name in names if name in words] for module, names in _STANDARD.items()}
    homes = memsize._homes()
    classes = {
        home: [f"{name} as {name}" for name in memsize.__all__ if homes[name] == home and name not in functions]
        for home in sorted(set(homes.values()))
    }
    return "\n".join(
        (
            '"""Written by `python -m tests.stub` from the signatures of the functions."""',
            "",
            *_imports(standard),
            "",
            "from torch import nn, optim",
            "",
            *_imports(classes),
            "",
            "__version__: str",
            "",
            *definitions,
            "",
        )
    )


def _imports(names_by_module: Mapping[str, list[str]]) -> Iterator[str]:
    for module, names in names_by_module.items():
        line = f"from {module} import {', '.join(names)}"
        if len(line) > 120:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
        if names:
            yield line


def _definition(name: str) -> Iterator[str]:
    signature = inspect.signature(getattr(memsize, name))
    yield f"def {name}("
    by_keyword = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not by_keyword:
            yield "    *,"
            by_keyword = True
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}".replace("'", '"')
        yield f"    {star}{parameter.name}: {parameter.annotation}{default},".replace("os.PathLike", "PathLike")
    yield f") -> {signature.return_annotation}: ..."


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
