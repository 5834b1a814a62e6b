"""Explain why a forward failed, with advice on what to change."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from memsize.internals.user_code import LIBRARIES
from memsize.records.trace import Failure
from memsize.tracing.ledger import Ledger
from memsize.tracing.module_calls import Calls, Seen

if TYPE_CHECKING:
    from types import TracebackType


def explain(error: Exception, calls: Calls, ledger: Ledger) -> Failure:
    """The failing layer, its inputs, and the reason, with advice where the cause is a common one."""
    running = calls.failed
    seen = calls.seen[running.layer if running else max(0, ledger.clock.layer)]
    reason = _reason(error, seen)
    return Failure(seen.path, seen.type, ledger.last_op or None, running.inputs if running else (), reason)


def _reason(error: Exception, seen: Seen) -> str:
    text = str(error).strip().split("\n")[0].partition(". This could be because")[0] or type(error).__name__
    plain = isinstance(error, (RuntimeError, ValueError, IndexError))
    parts = [text if plain else f"{type(error).__name__}: {text}"]
    parts += [advice for advice in (_wanted(seen), _advice(str(error))) if advice]
    place = _place(error.__traceback__)
    if place:
        parts.append(f"at {place}")
    return "\n  ".join(parts)


def _wanted(seen: Seen) -> str:
    """How the layer was built, from its own `extra_repr`."""
    described = seen.module.extra_repr() if seen.leaf else ""
    return f"{seen.path or seen.type} is built as {seen.type}({described})" if described else ""


def _advice(text: str) -> str:
    if "Expected more than 1 value per channel" in text:
        return "a batch norm in training mode needs more than one value per channel: use --batch-size 2, or --mode eval"
    if "must have the same dtype" in text or "same dtype" in text:
        return "two dtypes meet here: a tensor that .half() or .to() does not reach, or an input of another dtype"
    if "missing" in text and "required positional argument" in text:
        return "the forward takes more inputs: repeat --input, or name them with --input name=SHAPE:DTYPE"
    if "Expected tensor for argument #1 'indices'" in text:
        return "an embedding looks up integers: give the input a dtype, --input SHAPE:int64"
    if "is only available for these backends" in text:
        return "say what the op returns with memsize.shape_rule, or compute it with memsize report --execute"
    if "depends on the data" in text or "reads a value" in text:
        return (
            "memsize runs the model without data and cannot know which way it goes: "
            "memsize report --execute computes it on the CPU"
        )
    return ""


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code."""
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(LIBRARIES) and f.filename[0] != "<"]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
