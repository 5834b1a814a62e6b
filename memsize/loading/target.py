"""Where a model is, as a value: ``"nets/model.py:Test"`` or ``"package.module:name"`` → `Target`. No torch needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from memsize.errors import TargetError

_EXAMPLES = "write it like model.py:Net or package.module:build"


@dataclass(frozen=True, slots=True)
class Target:
    """A Python file or a module's dotted name, and the name inside it (None: its only Module class)."""

    file: Path | None
    module: str | None
    name: str | None

    @property
    def place(self) -> str:
        """The file or module as messages call it: ``model.py``, ``package.module``."""
        return self.file.name if self.file else str(self.module)


def parse_target(text: str) -> Target:
    """The target that ``path.py:Name`` or ``package.module:name`` names; raises `TargetError` when it cannot be one.

    A file must exist; a module is looked for when it is imported.
    """
    place, name = _split(text.strip())
    if name is not None and not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{name!r} in {text!r} is not a name: {_EXAMPLES}")
    if _is_path(place):
        return Target(_existing_file(Path(place).expanduser()), None, name)
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(f"cannot read {text!r} as a target: {_EXAMPLES}")
    return Target(None, place, name)


def _split(text: str) -> tuple[str, str | None]:
    """The place and the name. A path may hold a colon itself (a drive), so the last one counts, and none after .py."""
    place, colon, name = text.rpartition(":")
    if not colon or text.endswith(".py") or os.sep in name:
        return text, None
    if not name:
        raise TargetError(f"{text!r} ends with a colon and no name: {_EXAMPLES}")
    return place, name


def _is_path(place: str) -> bool:
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    path = Path(place)
    folder = bool(place) and path.is_dir() and not (path / "__init__.py").is_file()
    return place.endswith(".py") or any(separator in place for separator in separators) or path.is_file() or folder


def _existing_file(path: Path) -> Path:
    if path.is_file():
        return path.absolute()
    if path.is_dir():
        raise TargetError(f"{path} is a folder: name a Python file in it, such as {path / 'model.py'}:Net")
    if path.suffix != ".py" and path.with_name(f"{path.name}.py").is_file():
        raise TargetError(f"no such file: {path} (did you mean {path}.py?)")
    near = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
    hint = f" ({path.parent} holds {', '.join(near[:8])}{' …' if len(near) > 8 else ''})" if near else ""
    raise TargetError(f"no such file: {path}{hint}")
