"""What an answer says that Ctrl-C ended before it was complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memsize.records.finding import Finding

INTERRUPTED: Final = "interrupted"


def interrupted(missing: Sequence[str], hint: str = "") -> tuple[Finding, ...]:
    """What is missing, as the finding that comes before all others; none where nothing is. `hint` says what to do."""
    if not missing:
        return ()
    text = f"Interrupted: {{missing}} {'is' if len(missing) == 1 else 'are'} missing.{hint}"
    return (Finding(INTERRUPTED, None, (), text, {"missing": tuple(missing)}, brief=text),)
