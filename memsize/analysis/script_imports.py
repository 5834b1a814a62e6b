"""What a script imports from installed packages, imported once before it is run in several processes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

from memsize.analysis.program import virtual_gpu
from memsize.device.allocator_config import AllocatorConfig
from memsize.processes.user_code import is_library, parsed
from memsize.records.gpu import Card

_LATE: Final = ("torch._dynamo", "torch.distributed.optim")
"""What the first optimizer of a process imports, and the first process group."""


def import_packages(path: str, card: Card, config: AllocatorConfig | None) -> None:
    """Import what the script at `path` imports at its top level from installed packages, and what PyTorch will."""
    with virtual_gpu(card, config, steps=0, allow_writes=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*_imported(path), *_LATE):
            # What fails here fails in the script too, or was meant to.
            with contextlib.suppress(Exception):
                if _is_installed(name):
                    importlib.import_module(name)


def _imported(path: str) -> Iterator[str]:
    tree = parsed(path)
    for node in tree.body if tree else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _is_installed(name: str) -> bool:
    spec: Any = find_spec(name.partition(".")[0])
    return spec is not None and bool(spec.origin) and is_library(spec.origin)
