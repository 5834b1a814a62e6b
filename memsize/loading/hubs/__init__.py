"""Models by the names of the libraries that define them: ``hf:config.json``, ``timm:resnet18``, ``torchvision:vgg11``.

Each is built from its definition alone, without weights and without the network, and comes with inputs that suit it.
One file per library; each needs that library only.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from memsize.loading.building import random_numbers_kept
from memsize.loading.hubs.library import Named, quiet
from memsize.loading.target import Target

__all__ = ["Named", "named"]

_FILES = {"hf": "huggingface", "timm": "pytorch_image_models", "torchvision": "vision"}


def named(target: Target, arguments: Mapping[str, object]) -> Named:
    """The model that a library's target names, built with its options and `arguments`.

    Raises `TargetError` where the library is missing or broken, does not know the name, or cannot build it.
    """
    assert target.library is not None and target.name is not None
    library = importlib.import_module(f"memsize.loading.hubs.{_FILES[target.library]}")
    with random_numbers_kept(), quiet():
        found: Named = library.load(target.name, {**dict(target.options), **arguments})
    return found
