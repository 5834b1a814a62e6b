"""Rules about the peak of a training step: where it falls, and what stands in its way down."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.analysis.findings.evidence import Evidence
from memsize.records.finding import Finding
from memsize.records.gpu import Outlook
from memsize.records.roles import Role
from memsize.units import Bytes

_STATES: tuple[Role, ...] = ("parameter", "gradient", "optimizer state", "master weight")


def training_peak(evidence: Evidence) -> Iterator[Finding]:
    """Where the peak falls and what most of it is."""
    name = next((name for name in ("as-given", "fp32", *evidence.peaks) if name in evidence.peaks), None)
    if name is None:
        return
    peak = evidence.peaks[name]
    largest = [(role, size) for role, size in peak.roles.items() if size * 20 >= peak.requested][:4]
    shares = ", ".join(f"{role} {{r{place}}}" for place, (role, _) in enumerate(largest))
    yield Finding(
        "training-peak",
        peak.requested,
        (peak.peak_layer,) if peak.peak_layer else (),
        f"A training step with {{optimizer}} under {{name}} peaks at {{requested}} in the {{where}}: {shares}. "
        f"{_advice(peak)}",
        {
            "optimizer": evidence.optimizer,
            "name": name,
            "requested": Bytes(peak.requested),
            "where": f"{peak.peak_phase} of {peak.peak_layer}" if peak.peak_layer else _phase(peak.peak_phase),
            "states": Bytes(_states(peak)),
            "temporary": Bytes(peak.roles.get("temporary", 0)),
        }
        | {f"r{place}": Bytes(size) for place, (_, size) in enumerate(largest)},
    )


def _states(peak: Outlook) -> int:
    return sum(peak.roles.get(role, 0) for role in _STATES)


def _phase(name: str) -> str:
    return {"optimizer": "optimizer's update", "zero_grad": "zeroing of gradients"}.get(name, name)


def _advice(peak: Outlook) -> str:
    if peak.peak_phase == "optimizer":
        return "The update's temporaries take {temporary} of it, whatever the batch: a fused optimizer has none."
    if _states(peak) * 2 > peak.requested:
        return "Parameters, gradients and optimizer state are {states} of it, whatever the batch."
    return "Most of it grows with the batch."
