"""Which known names an unknown one may have meant, as the end of an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """``"did you mean int64?"`` when names in `known` are near to `name`, else all of them: ``"known: …"``."""
    names = tuple(known)
    lowered = {other.lower(): other for other in reversed(names)}
    near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known: {', '.join(names)}" if names else "there is none"
