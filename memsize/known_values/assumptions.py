"""Assumptions where only real data could tell, in the words that a report shows.

Each assumption is the least surprising one for memory: finite numbers, balanced routing, conditions that hold. It is
shown only when a decision of the model relied on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memsize.known_values.values import MAX_ASSUMED_ELEMENTS, ConstantState, set_constant
from memsize.processes.user_code import running_line

ALL_FINITE = "every value is finite (isnan and isinf answer no)"
NOT_EQUAL = "no value that depends on the data equals a given number (x == 0 answers no): none was padded with it"
BALANCED = "choices by activations (top-k, argmax, sort) fall evenly: a router sends every expert the same share"
ALL_SELECTED = (
    "a selection by values that depend on the data (a boolean index, nonzero, nms) keeps every element: the most"
)
ALL_DISTINCT = (
    "the indices of a sparse tensor, such as the rows of a table that get a gradient, are all different: the most"
)
MASKS_COVER_IMAGE = "objects whose masks a detector pastes into the image cover all of it: the most"
COMPARED_EQUAL = "two tensors that the model compares as a whole (torch.equal, torch.allclose) are equal"
CHECKS_PASS = "what PyTorch itself checks (that istft's windows add up to something) is in order"
FIXED_DRAW = "random numbers that the model decides by are one fixed draw"
ITEM_IS_ONE = "a number read out of an activation (.item()) is taken to be 1.0"
REDUCED_IS_ONE = "a number that ranks reduce or exchange on the GPU is taken to be 1.0 where the program reads it"
EXCHANGED_ARE_ALIKE = "what other ranks send is taken to be what this rank sends"
PADDING_COMPUTED = (
    "the encoder computes the padding along: PyTorch's nested tensors, which leave it out, are not followed"
)
COPIED_VALUES = "values that the model copies to the CPU are taken to be 1.0, integers 0, conditions true"

MIXED_DEVICES = "the forward makes a tensor on the CPU and mixes it with the model's; on a GPU that line fails"
CPU_AUTOCAST = 'the model opens torch.autocast("cpu"), which casts nothing on a GPU: what runs in it keeps its dtypes'
UNCOMPILED = "torch.compile is left out: compiled code fuses ops, and often needs less memory than what is shown"
"""Not assumptions but notes."""


def mixed_devices() -> str:
    """Not an assumption but a note: what runs here, and on a CPU, would not run as it is on a GPU; with the line."""
    line = running_line()
    return f"{MIXED_DEVICES}: {line}" if line else MIXED_DEVICES


def first_assumption(states: Sequence[ConstantState | None]) -> str | None:
    """The first assumption among `states`."""
    return next((state.assumption for state in states if state is not None and state.assumption), None)


def spread_evenly(indices: torch.Tensor, dim: int | None, choices: int) -> None:
    """Let the unknown `indices` along `dim` be distinct, and every one of `choices` equally frequent over the rows.

    Row ``r`` takes ``r·k, r·k + 1, …, r·k + k - 1`` modulo `choices`. `dim` is None where there is one index per row.
    """
    if not 0 < indices.numel() <= MAX_ASSUMED_ELEMENTS or not choices:
        return
    flat = torch.arange(indices.numel(), dtype=indices.dtype, device="cpu") % choices
    if dim is None or not indices.dim():
        even = flat.view(indices.shape)
    else:
        dim %= indices.dim()
        others = [size for position, size in enumerate(indices.shape) if position != dim]
        even = flat.view(*others, indices.shape[dim]).movedim(-1, dim).contiguous()
    set_constant(indices, even, ConstantState(BALANCED))


def even_counts(total: int, bins: int) -> torch.Tensor:
    """`total` things counted into `bins` evenly."""
    return torch.tensor([total // bins + (index < total % bins) for index in range(bins)], device="cpu")


def compared_with_number(op: str, number: Any) -> bool | None:
    """Whether data is (not) exactly a finite `number`, for ``eq`` and ``ne``; None for any other question."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or op not in ("eq", "ne"):
        return None
    return op == "ne"


def compared_with_zero(op: str, number: Any) -> bool | None:
    """How one number of the data, which is taken to be 1.0 where it is read, compares with 0; None for any other."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number:
        return None
    return {"lt": False, "le": False, "gt": True, "ge": True}.get(op)


def compared_with_infinity(op: str, number: Any) -> bool | None:
    """How finite values compare with an infinite `number`; None where `number` is not infinite."""
    if not isinstance(number, float) or not math.isinf(number):
        return None
    return {"eq": False, "ne": True, "lt": number > 0, "le": number > 0, "gt": number < 0, "ge": number < 0}[op]
