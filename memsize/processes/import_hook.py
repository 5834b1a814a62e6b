"""`ImportHook`: something to do when a module is executed, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import dropwhile
from types import ModuleType

Execute = Callable[[ModuleType], None]


class ImportHook(MetaPathFinder):
    """At the head of `sys.meta_path`: runs `execute` in place of the execution, which it is passed, of modules it is
    `about`; not when code only asks whether a module is installed.
    """

    def __init__(self, about: Callable[[str], bool], execute: Callable[[Execute, ModuleType], None]) -> None:
        self._about = about
        self._execute = execute

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self._about(name):
            return None
        _, *others = dropwhile(lambda finder: finder is not self, [*sys.meta_path])
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec
