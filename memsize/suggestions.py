"""Which known names an unknown one may have meant, as the end of an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

_LISTED: Final = 100
_SHOWN: Final = 8


def nearest(name: str, known: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """The names in `known` that are near to `name`, without regard to case, `most` at most.

    Those of which one begins with the other come first, then those that are spelt alike. A mapping gives the spelling
    of each name, and the name.
    """
    spelt = known if isinstance(known, Mapping) else {each.lower(): each for each in reversed(tuple(known))}
    key = name.lower()
    # A single letter begins too many names.
    begun = [each for each in spelt if min(len(key), len(each)) > 1 and (each.startswith(key) or key.startswith(each))]
    begun.sort(key=lambda each: abs(len(each) - len(key)))
    alike = difflib.get_close_matches(key, spelt, n=most, cutoff=0.5)
    return tuple(dict.fromkeys(spelt[each] for each in (*begun, *alike)))[:most]


def suggestion(name: str, known: Iterable[str], near: Iterable[str] | None = None) -> str:
    """``"did you mean int64?"`` when names in `known` are near to `name`, else all of them: ``"known: …"``.

    `near` are those names where they were looked for already. Of more than a hundred names the first few are shown.
    """
    names = tuple(known)
    if found := ", ".join(nearest(name, names) if near is None else near):
        return f"did you mean {found}?"
    if len(names) > _LISTED:
        return f"known: {', '.join(names[:_SHOWN])} and {len(names) - _SHOWN:,} more"
    return f"known: {', '.join(names)}" if names else "there is none"
