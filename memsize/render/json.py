"""An answer as JSON for scripts: its document's data with stable names and exact integers."""

from __future__ import annotations

import json
from typing import Any

from memsize.documents import Document


def draw(document: Document[Any], unit: str, width: int | None = None) -> str:
    """The data of `document`; `unit` is for the sentences of findings, figures are in bytes."""
    return json.dumps(document.data(unit), indent=document.indent, ensure_ascii=False) + "\n"
