"""TorchScript's compiler knows PyTorch's functions and classes by identity, also those that are replaced here.

Source: torch/jit/_builtins.py and annotations.py (2.11 to 2.14).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.jit._builtins
import torch.jit.annotations

from memsize.processes.patches import Patch


def replacements() -> Iterator[Patch]:
    """What is replaced of the compiler: it is given the originals, and annotations with `torch.device` as it is now."""
    find: Any = torch.jit._builtins._find_builtin
    read: Any = torch.jit.annotations.try_ann_to_type

    def found(function: Any) -> Any:
        return find(inspect.unwrap(function))

    def type_of(annotation: Any, *where: Any) -> Any:
        return read(torch.device if annotation == torch.device else annotation, *where)

    yield torch.jit._builtins, "_find_builtin", found
    yield torch.jit.annotations, "try_ann_to_type", type_of
