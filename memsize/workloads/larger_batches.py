"""The largest of a data loader's batches, where they vary in size: texts are padded to the longest of their batch.

The steps that are run first rarely meet it, while a training runs out of memory where it comes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from memsize.model.tensor_storage import spec_of
from memsize.torch_internals.pytree import tensors_in

_MOST: Final = 256
_SECONDS: Final = 20.0
"""No more batches than these are looked at, for no longer than this."""


class LargerBatches:
    """Finds a batch of a loader larger than those that its training steps had; `note` takes a sentence on it."""

    def __init__(self, note: Callable[[str], object], progress: Callable[[str], None]) -> None:
        self._note = note
        self._progress = progress
        self._sizes = weakref.WeakKeyDictionary[Any, set[int]]()
        """The bytes of the batches that each iterator had for the steps."""

    def seen(self, iterator: Any, batch: Any) -> None:
        """Remember the size of a batch that a training step gets."""
        self._sizes.setdefault(iterator, set()).add(_size(batch))

    def vary(self) -> bool:
        """Whether the batches of a loader that was not searched yet differ in size."""
        return any(len(sizes) > 1 for sizes in self._sizes.values())

    def search(self, following: Callable[[Any], Any], iterator: Any) -> Any:
        """The largest of the batches to come, if it is larger than those before; None otherwise, or if none varies."""
        sizes = self._sizes.pop(iterator, set[int]())
        if len(sizes) < 2:
            return None
        largest, most, number, until = None, max(sizes), 0, time.monotonic() + _SECONDS
        while number < _MOST and time.monotonic() < until:
            try:
                batch = following(iterator)
            except StopIteration:
                break
            number += 1
            self._progress(f"every step is made, looking at batch {number} for the largest")
            if (size := _size(batch)) > most:
                largest, most = batch, size
        if largest is not None:
            widest = spec_of(max(tensors_in(largest), key=lambda tensor: tensor.nbytes))
            self._note(f"batches vary in size: one more step has the largest of the next {number}, {widest}")
        return largest


def _size(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))
