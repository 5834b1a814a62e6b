"""Heads that tensor parallelism leaves a GPU a part of: the view that fails, and what to change."""

from __future__ import annotations

import math
import re
from typing import Final

from memsize.records.trace import Trace

_VIEW: Final = re.compile(r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)")
_DISTRIBUTED: Final = "torch DTensor"
"""What the record calls parameters that are divided among processes."""


def undivided(failure: str, trace: Trace, ranks: int) -> tuple[str, str] | None:
    """A sentence with a place for the ``{shape}`` that a view wants, and that shape; None where the run that `trace`
    records, one of so many `ranks`, failed for another reason.
    """
    found = _VIEW.search(failure)
    if found is None or not any(tensor.wrapper == _DISTRIBUTED for tensor in trace.tensors):
        return None
    sizes, part = list(map(int, found[1].split(","))), int(found[2])
    unit = math.prod(size for size in sizes if size > 0)
    wholes = [part * count for count in range(2, ranks + 1) if ranks % count == 0]
    if -1 in sizes and any(whole % unit == 0 for whole in wholes):
        sentence = (
            "The view as {shape} finds no whole number of heads on this GPU: parallelize_module gives each an equal "
            "part of a layer's features, so the number of GPUs that share a layer has to divide its heads, and those "
            "of keys and values."
        )
    elif unit in wholes:
        sentence = (
            "The view as {shape} wants the heads of all GPUs, and finds the part of this one: write -1 for their "
            "number, or divide it by the number of GPUs that share the layer."
        )
    else:
        return None
    return sentence, f"[{found[1]}]"
