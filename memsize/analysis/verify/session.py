"""The composition: a experiment is run on a GPU, or taken from a file, and set beside its prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from memsize.analysis.verify.alignment import align
from memsize.analysis.verify.cuda_memory import Gauge
from memsize.analysis.verify.experiment import Experiment
from memsize.analysis.verify.running import measure
from memsize.errors import InputError
from memsize.records.measurement import MeasuredWorkload, Measurement, Saved
from memsize.records.verification import Checked, Verification

_NOT_COMPARED = ("model", "seed", "benchmark")
"""Fields of a workload that may differ between a file and the command: a file may be called by another path."""


def verified(experiment: Experiment, gauge: Gauge, say: Callable[[str], None]) -> Verification:
    """The experiment run for real, where convolutions run also with cuDNN's benchmark, beside its prediction.

    Raises what `measure` raises.
    """
    say("predicting")
    stack = gauge.stack()
    usual = experiment.predicted(stack)
    predictions = {False: usual}
    if usual.convolutional:
        predictions[True] = experiment.predicted(stack, benchmark=True)
    found: list[Checked] = []
    for benchmark, said in predictions.items():
        say(f"running on {gauge.device}{', cudnn.benchmark on' if benchmark else ''}")
        seen = measure(experiment.plan(gauge.device, benchmark=benchmark), gauge)
        found.append(Checked(replace(seen, workspaces=said.workspaces), said))
    return verification_of(tuple(found))


def replayed(experiment: Experiment, saved: Saved) -> Verification:
    """The measurements of a file beside today's prediction for the stack that they were made on.

    Raises `InputError` where the file is of another workload.
    """
    if not saved.measurements:
        raise InputError("the file holds no measurement")
    for each in saved.measurements:
        _check(each.workload, experiment.workload())
    runs = tuple(_replayed(experiment, each) for each in saved.measurements)
    return verification_of(runs, (f"measured on {saved.date}",))


def verification_of(runs: tuple[Checked, ...], notes: tuple[str, ...] = ()) -> Verification:
    """The verification of `runs`, with the allocations of the first one's last step laid side by side."""
    measured = runs[0].measurement.log
    return Verification(runs, notes, alignment=None if measured is None else align(runs[0].prediction.log, measured))


def _replayed(experiment: Experiment, seen: Measurement) -> Checked:
    said = experiment.predicted(seen.stack, benchmark=seen.workload.benchmark, recorded=seen.workspaces)
    return Checked(seen, said)


def _check(measured: MeasuredWorkload, asked: MeasuredWorkload) -> None:
    for field in fields(MeasuredWorkload):
        was, wanted = getattr(measured, field.name), getattr(asked, field.name)
        if field.name not in _NOT_COMPARED and was != wanted:
            raise InputError(f"the measurement is of another run: its {field.name} is {was!r}, here it is {wanted!r}")
