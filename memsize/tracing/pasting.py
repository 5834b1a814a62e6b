"""Where a detector puts its masks: torchvision's Mask R-CNN reads the corners of every box that it found.

Each object's mask is resized to its box and pasted into a picture of the whole image, so that the boxes decide how much
is made on the way, and their corners are asked for as numbers (`paste_masks_in_image`). Boxes that
are not known are taken to cover the image.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memsize.semantics.substitution import Function, Substitution, Substitutions
from memsize.tracing.assumptions import COVERED
from memsize.tracing.known import Cell, known, remember

_MODULE = "torchvision.models.detection.transform"
_FUNCTION = "paste_masks_in_image"


class _Thread(threading.local):
    inside = 0


_thread = _Thread()


@contextmanager
def boxes_answered() -> Iterator[None]:
    """While open, this thread's boxes have corners, if torchvision's detectors are imported."""
    module = sys.modules.get(_MODULE)
    if not hasattr(module, _FUNCTION):
        yield
        return
    assert module is not None
    _thread.inside += 1
    try:
        with _pasting(module).standing():
            yield
    finally:
        _thread.inside -= 1


@cache
def _pasting(module: ModuleType) -> Substitutions:
    substitution = Substitution(module, _FUNCTION, _pasted)
    return Substitutions(lambda: (substitution,), lambda: bool(_thread.inside))


def _pasted(original: Function) -> Function:
    def pasted(masks: Tensor, boxes: Tensor, img_shape: tuple[int, int], *args: Any, **kwargs: Any) -> Any:
        if boxes.is_meta and known(boxes) is None:
            height, width = img_shape
            corners = torch.tensor([0, 0, width, height], dtype=boxes.dtype, device="cpu")
            boxes = remember(boxes.detach(), corners.repeat(len(boxes), 1), Cell(COVERED))
        return original(masks, boxes, img_shape, *args, **kwargs)

    return pasted
