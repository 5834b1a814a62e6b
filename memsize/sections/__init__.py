"""Documents as typed sections: what every text, page and table of them is drawn from."""

from memsize.sections.layers import COLUMNS, layer_table
from memsize.sections.parts import (
    Cell,
    Change,
    Column,
    Findings,
    Heading,
    Kind,
    Label,
    Missing,
    Notes,
    Path,
    Remark,
    Section,
    Share,
    Signed,
    Specs,
    Stop,
    Table,
    Title,
    Words,
)
from memsize.sections.report import heading, sections
from memsize.sections.scenarios import scenario_table

__all__ = [
    "COLUMNS",
    "Cell",
    "Change",
    "Column",
    "Findings",
    "Heading",
    "Kind",
    "Label",
    "Missing",
    "Notes",
    "Path",
    "Remark",
    "Section",
    "Share",
    "Signed",
    "Specs",
    "Stop",
    "Table",
    "Title",
    "Words",
    "heading",
    "layer_table",
    "scenario_table",
    "sections",
]
