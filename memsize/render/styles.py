"""A flat table as a notebook shows it: its bytes in one unit, each over a bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memsize.records.fields import FlatTable
from memsize.records.roles import TITLES
from memsize.units import amount_in

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

_BAR: Final = TITLES["parameter"].colour + "55"
"""Light enough for the figure that stands on it, whatever the theme."""


def draw(table: FlatTable, unit: str) -> Styler:
    """Style `table` with a bar in each cell of bytes, to the scale of its column; unknown values are empty cells."""
    frame = table.frame()
    sizes = [*frame.attrs["units"]]
    # Pandas measures bars in floats: it cannot compare integers of which some are missing, nor columns of zeros alone.
    frame = frame.astype(dict.fromkeys(sizes, "float64"))
    some = [name for name in sizes if frame[name].fillna(0).any()]

    def amount(size: Any) -> str:
        return amount_in(int(size), unit)

    styler = frame.style.hide(axis="index").format(precision=3, na_rep="", escape="html")
    styler.format(amount, subset=sizes, na_rep="").set_properties(subset=sizes, **{"text-align": "right"})
    return styler.bar(subset=some, color=_BAR).set_caption(f"bytes in {unit}")
