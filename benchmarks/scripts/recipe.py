"""What a recipe is: whose script, how it is started, and what data it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.scripts.data import Maker


@dataclass(frozen=True, slots=True)
class Recipe:
    """One script of a repository, started in a copy of `folder`, a part of it."""

    name: str
    repository: str
    folder: str
    command: str
    """The script, or -m and a module, with the script's own options."""
    data: tuple[Maker, ...] = ()
    needs: tuple[str, ...] = ()
    """Modules that have to be installed, besides PyTorch and what the data needs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    options: str = ""
    """memsize's own options."""
