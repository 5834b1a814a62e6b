"""Findings on runs that end early: interrupted by Ctrl-C, or out of memory in the figures of PyTorch's own error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memsize.records.finding import Finding, Moment, moment_in_words, sizes
from memsize.records.gpu import RecordStreamCost, Shortage
from memsize.units import Bytes

_PHASES: Final = {"optimizer": "optimizer's update", "zero_grad": "zeroing of gradients"}


def moment(phase: str, layer: str) -> str:
    """A moment of a run in words that follow "in the": the phase, and the layer where there is one."""
    return moment_in_words(phase if layer else _PHASES.get(phase, phase), layer)


def out_of_memory(
    shortage: Shortage, what: str, gpu: str, scenario: str | None = None, fitting: tuple[str, ...] = ()
) -> Finding:
    """Say that `what` (a sentence's subject) does not fit on `gpu`, where it stops, and what PyTorch's error would be.

    `scenario` is that of the run which a page shows over time, if it is this one; `fitting` are those that do fit.
    """
    takes = "context and NCCL's buffers take" if shortage.nccl else "context takes"
    brief = f"{{what}} may not fit on {{gpu}}: if the CUDA {takes} {{context}}, it runs out of memory in the {{where}}."
    if shortage.certain:
        brief = "{what} does not fit on {gpu}: it runs out of memory in the {where}."
    if fitting:
        brief += f" {{fitting}} fit{'s' if len(fitting) == 1 else ''}."
    text = f"{brief} The peaks are those of the same run with enough memory." if shortage.certain else brief
    text += " PyTorch's error would then say that it tried to allocate {tried}; of {total}, {free} are free, "
    text += "{allocated} are allocated by PyTorch, and {idle} are reserved but unallocated."
    where = moment(shortage.phase, shortage.layer)
    values: dict[str, object] = {"what": what[:1].upper() + what[1:], "gpu": gpu, "where": where, "fitting": fitting}
    values |= sizes(tried=shortage.tried, free=shortage.free, total=shortage.total, allocated=shortage.allocated)
    values |= sizes(idle=shortage.reserved - shortage.allocated)
    values |= sizes(context=shortage.total - shortage.free - shortage.reserved)
    return Finding(
        "out-of-memory",
        text,
        values,
        bytes=shortage.tried,
        layers=(shortage.layer,) if shortage.layer else (),
        brief=brief,
        moment=None if scenario is None or shortage.event is None else Moment(scenario, shortage.event),
    )


def lagging(lag: RecordStreamCost, reserved: int, code: str = "record-stream") -> Finding:
    """The bytes beyond `reserved` that may be reserved if the GPU lags behind the program, and why."""
    more, handed = lag.reserved - reserved, "a tensor" if lag.tensors == 1 else f"{lag.tensors} tensors"
    text = "Up to {reserved} are reserved if the GPU lags behind, {more} more"
    if not more:
        text = "At most {reserved} are reserved if the GPU lags behind"
    text += ": {tensors}, whose memory can be reused only after that stream is done with it"
    if lag.runs_out:
        text += "; PyTorch waits for that stream before it gives up, and may still run out of memory"
    tensors = f"record_stream handed {handed} to another stream"
    values = {"reserved": Bytes(lag.reserved), "more": Bytes(more), "tensors": tensors}
    return Finding(code, f"{text}.", values, bytes=more)


INTERRUPTED: Final = "interrupted"


def interrupted(missing: Sequence[str]) -> tuple[Finding, ...]:
    """The missing parts of an interrupted answer, as a finding before all others; empty if nothing is missing."""
    if not missing:
        return ()
    text = f"Interrupted: {{missing}} {'is' if len(missing) == 1 else 'are'} missing."
    return (Finding(INTERRUPTED, text, {"missing": tuple(missing)}, brief=text),)


def sweep_interrupted(missing: Sequence[str], cells: int, saved: bool) -> tuple[Finding, ...]:
    """The missing cells of an interrupted sweep of `cells`, and how to go on if finished ones are `saved` in a file."""
    if not missing:
        return ()
    if len(missing) == cells:
        before = "before any of {cells} cells was done" if cells > 1 else "before its cell was done"
        text = f"Interrupted {before}. The same command starts over."
    else:
        are = "is" if len(missing) == 1 else "are"
        text = f"Interrupted: {{count}} of {{cells}} cells {are} missing: {{missing}}."
        text += " The same command continues with the missing cells." if saved else ""
    values = {"count": len(missing), "cells": cells, "missing": tuple(missing)}
    return (Finding(INTERRUPTED, text, values, brief=text),)
