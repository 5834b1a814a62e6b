"""What an answer says that Ctrl-C ended before it was complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memsize.records.finding import Finding

INTERRUPTED: Final = "interrupted"


def interrupted(missing: Sequence[str]) -> tuple[Finding, ...]:
    """What is missing, as the finding that comes before all others; none where nothing is."""
    if not missing:
        return ()
    text = f"Interrupted: {{missing}} {_are(len(missing))} missing."
    return (Finding(INTERRUPTED, None, (), text, {"missing": tuple(missing)}, brief=text),)


def sweep_interrupted(missing: Sequence[str], cells: int, kept: bool) -> tuple[Finding, ...]:
    """The same of a sweep of so many `cells`, with what to do where those that are done are `kept` in a file."""
    if not missing:
        return ()
    if len(missing) == cells:
        text = (
            "Interrupted before any of {cells} cells was done" if cells > 1 else "Interrupted before its cell was done"
        )
        text += ". The same command begins anew."
    else:
        text = f"Interrupted: {{count}} of {{cells}} cells {_are(len(missing))} missing: {{missing}}."
        text += " The same command goes on with what is missing." if kept else ""
    values = {"count": len(missing), "cells": cells, "missing": tuple(missing)}
    return (Finding(INTERRUPTED, None, (), text, values, brief=text),)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
