"""The phases of a pipeline's generation as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from memsize.documents.sections import Table
from memsize.records.fields import BYTES, NAME, SCENARIO, TEXT, WORDS, Fields, Path, shown
from memsize.records.gpu import PhasePeak
from memsize.records.report import ScenarioResult


class _PhaseRow(NamedTuple):
    """A phase of a pipeline's generation under a scenario."""

    result: ScenarioResult
    peak: PhasePeak


_ACTIVATIONS: Final = "temporaries, workspaces, inputs, and weights that the pipeline casts"
_PHASE_FIELDS: Final = Fields[_PhaseRow](
    shown("scenario", "scenario", NAME, 100, SCENARIO.help, get=lambda row: row.result.label),
    shown("peak.phase", "phase", TEXT, 99, "a phase of the generation", key="phase"),
    shown("parts", "parts", WORDS, 70, "the parts that run in it", get=lambda row: list(row.peak.parts)),
    shown("peak.requested", "requested", BYTES, 98, "what tensors ask for at most", key="requested"),
    shown("peak.allocated", "allocated", BYTES, 80, "the caching allocator's blocks at most", key="allocated"),
    shown("peak.reserved", "reserved", BYTES, 85, "its segments, those of earlier phases included", key="reserved"),
    shown("peak.weights", "weights", BYTES, 95, "weights of these parts", key="weights", role="parameter"),
    shown("peak.other_weights", "other weights", BYTES, 95, "those of all other parts", key="other_weights"),
    shown("peak.activations", "activations", BYTES, 95, _ACTIVATIONS, key="activations"),
    shown("layer", "at", NAME, 60, "the layer of its peak", alone="layer"),
    cell={"layer": lambda row, _: Path(row.peak.layer) if row.peak.layer else ""},
)


def phase_tables(results: Sequence[ScenarioResult]) -> Iterator[Table]:
    """One row per scenario and phase of a pipeline: its peak, which its weights, others and activations add up to."""
    peaks = [(result, result.inference.phases) for result in results if result.inference]
    if rows := [_PhaseRow(result, peak) for result, phases in peaks for peak in phases]:
        yield Table.of("phases", "Phases", _PHASE_FIELDS, rows, caption="Peaks of the phases of a generation")
