"""torchvision, imported whether or not its build fits that of torch."""

from __future__ import annotations

import warnings
from contextlib import suppress

from memsize.loading.library_imports import torchvision_importable


def declare() -> None:
    """Import torchvision, its operators declared if they cannot be loaded; nothing where it is not installed."""
    with torchvision_importable(), warnings.catch_warnings(), suppress(ModuleNotFoundError):
        warnings.simplefilter("ignore")
        import torchvision  # noqa: F401
