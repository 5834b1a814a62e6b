"""The composition: a case is run on a GPU, or taken from a file, and set beside its prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from memsize.errors import InputError
from memsize.record import Trace
from memsize.verifying.case import Case
from memsize.verifying.comparison import Checked, Verification
from memsize.verifying.gauge import Gauge
from memsize.verifying.measurement import Measurement, Saved, Workload
from memsize.verifying.prediction import convolves, predicted
from memsize.verifying.running import measure

_NOT_COMPARED = ("model", "seed", "benchmark")
"""Fields of a workload that may differ between a file and the command: a file may be called by another path."""


def verified(case: Case, gauge: Gauge, say: Callable[[str], None]) -> Verification:
    """The case run for real, where convolutions run also with cuDNN's benchmark, beside its prediction.

    Raises what `measure` raises.
    """
    say("predicting")
    trace = case.trace(gauge.stack())
    found: list[Measurement] = []
    for benchmark in (False, True) if convolves(trace) else (False,):
        say(f"running on {gauge.device}{', cudnn.benchmark on' if benchmark else ''}")
        found.append(measure(case.plan(gauge.device, benchmark=benchmark), gauge))
    say("comparing")
    return Verification(tuple(_checked(each, trace) for each in found))


def replayed(case: Case, saved: Saved) -> Verification:
    """The measurements of a file beside today's prediction for the stack that they were made on.

    Raises `InputError` where the file is of another workload.
    """
    if not saved.measurements:
        raise InputError("the file holds no measurement")
    for each in saved.measurements:
        _check(each.workload, case.workload())
    trace = case.trace(saved.measurements[0].stack)
    return Verification(tuple(_checked(each, trace) for each in saved.measurements), (f"measured on {saved.date}",))


def _checked(measurement: Measurement, trace: Trace) -> Checked:
    said = predicted(trace, measurement.stack, benchmark=measurement.workload.benchmark)
    return Checked(measurement, said)


def _check(measured: Workload, asked: Workload) -> None:
    for field in fields(Workload):
        was, wanted = getattr(measured, field.name), getattr(asked, field.name)
        if field.name not in _NOT_COMPARED and was != wanted:
            raise InputError(f"the measurement is of another run: its {field.name} is {was!r}, here it is {wanted!r}")
