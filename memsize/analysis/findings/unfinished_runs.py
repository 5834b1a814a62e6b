"""Findings on runs that end early: interrupted by Ctrl-C, or out of memory in the figures of PyTorch's own error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memsize.records.finding import Finding, Moment, moment_in_words
from memsize.records.gpu import RecordStreamCost, Shortage
from memsize.units import Bytes

_CERTAIN: Final = (
    "{what} does not fit on {gpu}: it runs out of memory in the {where}. The peaks are those of the same run with "
    "enough. "
)
_POSSIBLE: Final = (
    "{what} may not fit on {gpu}: if the CUDA context takes {context}, it runs out of memory in the {where}. "
)
_POSSIBLE_AMONG: Final = (
    "{what} may not fit on {gpu}: if the CUDA context and NCCL's buffers take {context}, it runs out of memory in the "
    "{where}. "
)
_ERROR: Final = (
    "PyTorch's error would then say that it tried to allocate {tried}; of {total}, {free} are free, {allocated} are "
    "allocated by PyTorch, and {idle} are reserved but unallocated."
)
_CERTAIN_BRIEF: Final = "{what} does not fit on {gpu}: it runs out of memory in the {where}."
_POSSIBLE_BRIEF: Final = "{what} may not fit on {gpu}: with a large CUDA context it runs out of memory in the {where}."
_POSSIBLE_AMONG_BRIEF: Final = (
    "{what} may not fit on {gpu}: with a large CUDA context and NCCL's buffers it runs out of memory in the {where}."
)
_LAG: Final = "Up to {reserved} are reserved where the GPU lags behind, {more} more"
_LAG_ALIKE: Final = "No more than {reserved} are reserved where the GPU lags behind"
_STREAM: Final = ": {tensors}, and what is freed of them can be reused only when that stream is done with it"
_HANDED: Final = "record_stream handed {count} tensors to another stream"
_RUNS_OUT: Final = "; PyTorch waits for it before it gives up, and may still run out of memory"
_PHASES: Final = {"optimizer": "optimizer's update", "zero_grad": "zeroing of gradients"}


def moment(phase: str, layer: str) -> str:
    """A moment of a run in words that follow "in the": the phase, and the layer where there is one."""
    return moment_in_words(phase if layer else _PHASES.get(phase, phase), layer)


def out_of_memory(shortage: Shortage, what: str, gpu: str, scenario: str | None = None) -> Finding:
    """That `what` (a sentence's subject) does not fit on `gpu`, where it stops, and what PyTorch's error would say.

    `scenario` is that of the run which a page shows over time, if it is this one.
    """
    possible = (_POSSIBLE_AMONG, _POSSIBLE_AMONG_BRIEF) if shortage.nccl else (_POSSIBLE, _POSSIBLE_BRIEF)
    so, brief = (_CERTAIN, _CERTAIN_BRIEF) if shortage.certain else possible
    return Finding(
        "out-of-memory",
        so + _ERROR,
        {
            "what": what[:1].upper() + what[1:],
            "gpu": gpu,
            "where": moment(shortage.phase, shortage.layer),
            "tried": Bytes(shortage.tried),
            "free": Bytes(shortage.free),
            "total": Bytes(shortage.total),
            "allocated": Bytes(shortage.allocated),
            "idle": Bytes(shortage.reserved - shortage.allocated),
            "context": Bytes(shortage.total - shortage.free - shortage.reserved),
        },
        bytes=shortage.tried,
        layers=(shortage.layer,) if shortage.layer else (),
        brief=brief,
        moment=None if scenario is None or shortage.event is None else Moment(scenario, shortage.event),
    )


def lagging(lag: RecordStreamCost, reserved: int, code: str = "record-stream") -> Finding:
    """The bytes beyond `reserved` that may be reserved if the GPU lags behind the program, and why."""
    one = lag.tensors == 1
    tensors = "record_stream handed a tensor to another stream" if one else _HANDED.format(count=lag.tensors)
    more = lag.reserved - reserved
    values = {"reserved": Bytes(lag.reserved), "more": Bytes(more), "tensors": tensors}
    text = (_LAG if more else _LAG_ALIKE) + _STREAM + (_RUNS_OUT if lag.runs_out else "")
    return Finding(code, f"{text}.", values, bytes=more)


INTERRUPTED: Final = "interrupted"


def interrupted(missing: Sequence[str]) -> tuple[Finding, ...]:
    """The missing parts of an interrupted answer, as a finding before all others; empty if nothing is missing."""
    if not missing:
        return ()
    text = f"Interrupted: {{missing}} {_are(len(missing))} missing."
    return (Finding(INTERRUPTED, text, {"missing": tuple(missing)}, brief=text),)


def sweep_interrupted(missing: Sequence[str], cells: int, saved: bool) -> tuple[Finding, ...]:
    """The missing cells of an interrupted sweep of `cells`, and how to go on if finished ones are `saved` in a file."""
    if not missing:
        return ()
    if len(missing) == cells:
        text = (
            "Interrupted before any of {cells} cells was done" if cells > 1 else "Interrupted before its cell was done"
        )
        text += ". The same command begins anew."
    else:
        text = f"Interrupted: {{count}} of {{cells}} cells {_are(len(missing))} missing: {{missing}}."
        text += " The same command goes on with what is missing." if saved else ""
    values = {"count": len(missing), "cells": cells, "missing": tuple(missing)}
    return (Finding(INTERRUPTED, text, values, brief=text),)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
