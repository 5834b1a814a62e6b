"""`ImportScope`: one target's own modules and import path, which nothing outside of it sees.

Two targets may both be called ``model.py`` and both have a sibling ``layers.py``; the process may hold a third. So a
target's folder is on ``sys.path``, and the modules that came from it are in ``sys.modules``, only while its scope is
entered. Leaving it puts them away, entering it again brings the same modules back: an ``import`` inside a model's
forward finds its siblings, as the very modules that the constructor used, as long as the forward runs in the scope.
Modules from elsewhere (installed packages) stay imported, as after any import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from memsize.processes.patches import assign
from memsize.processes.user_code import is_library

_MEMSIZE = Path(__file__).absolute().parents[1]


class ImportScope:
    """The imports of one target from `folder`.

    `last` is a folder that comes after all installed packages. `script` replaces ``sys.argv`` meanwhile: an argument
    parser that runs on import must not read memsize's command line.
    """

    def __init__(self, folder: Path, last: Path | None = None, script: Path | None = None) -> None:
        self.folder = folder
        self._first = [str(folder)]
        self._last = [str(last)] if last else []
        self._script = script
        self._own: dict[str, ModuleType] = {}
        self._hidden: dict[str, ModuleType] = {}
        self._entered = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The target's folder is importable and its modules are imported. May be entered again inside itself."""
        if self._entered:
            yield
            return
        paths, arguments = list(sys.path), sys.argv
        sys.path[:] = [*self._first, *paths, *self._last]
        assign(sys, "argv", [str(self._script)] if self._script else arguments)
        # Modules of these names may be there already, from other folders.
        here = {entry.stem for entry in self.folder.iterdir() if entry.is_dir() or entry.suffix == ".py"}
        homes = {top: _home(sys.modules[top]) for top in here & set(sys.modules)}
        foreign = {top for top, home in homes.items() if home and home not in self._folders() and not is_taken(top)}
        clashing = foreign | {_top(name) for name in self._own}
        self._hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _top(name) in clashing}
        sys.modules.update(self._own)
        before = set(sys.modules) - set(self._own)
        self._entered = True
        try:
            yield
        finally:
            self._entered = False
            # The target may have extended sys.path itself, to find what its forward imports.
            added = [path for path in sys.path if path not in (*paths, *self._first, *self._last)]
            self._first = [*self._first, *added]
            sys.path[:] = paths
            assign(sys, "argv", arguments)
            new = [name for name in list(sys.modules) if name not in before]
            homes = {top: _home(sys.modules.get(top)) for top in {_top(name) for name in new} - before}
            tops = {top for top, home in homes.items() if home in self._folders() and not is_library(str(home))}
            own = [*(name for name in new if _top(name) in tops), *self._own]
            self._own = {name: sys.modules.pop(name) for name in own if name in sys.modules}
            sys.modules.update(self._hidden)
            self._hidden = {}

    def adopt(self, name: str, module: ModuleType) -> None:
        """Make `module` importable as `name` inside the scope, which must be entered."""
        if name in sys.modules:
            self._hidden[name] = sys.modules[name]
        self._own[name] = sys.modules[name] = module

    def owns(self, file: str) -> bool:
        """Whether the source `file` lies in one of the scope's folders, and is not an installed package's."""
        path = Path(file).absolute()
        return not is_library(str(path)) and any(path.is_relative_to(folder) for folder in self._folders())

    def _folders(self) -> list[Path]:
        return [Path(path).absolute() for path in (*self._first, *self._last)]


def is_taken(name: str) -> bool:
    """Whether Python, memsize or an installed package has a module `name` that a target's own must not replace."""
    home = _home(sys.modules.get(name))
    return name in sys.stdlib_module_names or name == _MEMSIZE.name or (home is not None and is_library(str(home)))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _home(module: ModuleType | None) -> Path | None:
    """The folder on ``sys.path`` that a top-level module came from; None for one without a file."""
    attributes = vars(module) if isinstance(module, ModuleType) else {}  # not getattr: lazy modules import on it
    file = attributes.get("__file__")
    if isinstance(file, str):
        path = Path(file).absolute()
        return path.parent.parent if path.stem == "__init__" else path.parent
    folders = list(attributes.get("__path__") or ())
    return Path(folders[0]).absolute().parent if folders and isinstance(folders[0], str) else None
