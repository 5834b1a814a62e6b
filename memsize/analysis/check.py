"""A model's figures against its limits and its baseline: what is broken, by how much, and which layers are to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memsize.errors import InputError
from memsize.records.aggregates import COUNTED, totals
from memsize.records.check import Baseline, Figure, LayerFigures
from memsize.records.finding import Finding, moment_in_words
from memsize.records.fit import FitRow
from memsize.records.gpu import GpuEstimate
from memsize.records.report import Report, ScenarioResult
from memsize.records.trace import StoredTensor, Trace
from memsize.spec.project import LIMITS, Bound, Growth, Unit
from memsize.units import Bytes, signed_share

_BLAMED = 3
"""How many layers a sentence names."""

COMPARED = ("parameters", "stored", "activations", "inference_tensors", "training_tensors")
"""The figures of a baseline: those that do not depend on what is installed beside the model's own code. The peaks are
those of tensors, without the workspaces of CUDA's libraries."""


@dataclass(frozen=True)
class Measured:
    """One scenario of a report, as limits and baselines read it. Raises `InputError` where the scenario has none."""

    report: Report
    scenario: str

    @property
    def result(self) -> ScenarioResult | None:
        """The scenario; None where the model was not run, so that only what it stores is known."""
        result = next((result for result in self.report.scenario_results if result.name == self.scenario), None)
        if result is not None and result.trace is None:
            raise InputError(f"the scenario {self.scenario} does not apply: {result.reason}")
        return result

    @property
    def trace(self) -> Trace:
        """The run of that scenario, or of the model as it is."""
        result = self.result
        return self.report.trace if result is None or result.trace is None else result.trace

    def peak(self, of: str) -> GpuEstimate:
        """The peak of ``"inference"`` or ``"training"``; of ``"either"`` that of training where there is one."""
        result = self.result
        if result is None:
            raise InputError('its peaks need an input: name one, such as input = "3,64,64"')
        estimate = result.inference if of == "inference" else result.training
        if of == "either" and estimate is None and not result.untrained:
            estimate = result.inference
        if estimate is None:
            raise InputError(result.untrained or f"the model cannot be run for {of}")
        return estimate

    def value(self, bound: Bound) -> int:
        """The figure that `bound` limits, in its unit."""
        peak = LIMITS[bound.name].of_peak
        if peak:
            estimate = self.peak(peak)
            return {"reserved": estimate.reserved, "device": estimate.device.high}.get(bound.name, estimate.allocated)
        in_bytes = bound.name == "parameters" and bound.unit == "bytes"
        return self.figures()["parameter_bytes" if in_bytes else bound.name]

    def figures(self) -> dict[str, int]:
        """The figures that are no peaks."""
        sums = totals(self.trace)
        return {
            "parameters": sums.parameters,
            "parameter_bytes": sums.parameter_bytes,
            "trainable": sums.trainable,
            "buffers": sums.buffer_bytes,
            "stored": sums.stored,
            "activations": sums.saved_bytes,
        }

    def baseline(self, settings: Mapping[str, str]) -> Baseline:
        figures = self.figures()
        result = self.result
        peaks = {"inference": result.inference, "training": result.training} if result else {}
        for name, peak in peaks.items():
            if peak is not None and peak.tensors is not None:
                figures[f"{name}_tensors"] = peak.tensors
        return Baseline(settings, {name: figures[name] for name in COMPARED if name in figures}, self.layers())

    def layers(self) -> dict[str, LayerFigures]:
        """The bytes that each layer stores and keeps for backward; layers without either are left out."""
        stored: Counter[str] = Counter()
        for tensor in self.trace.tensors:
            stored[tensor.layer] += tensor.bytes if tensor.kind != "master" else 0
        figures = {layer.path: LayerFigures(stored[layer.path], layer.saved_bytes) for layer in self.trace.layers}
        return {path: each_layer for path, each_layer in figures.items() if any(each_layer)}


def against_limit(measured: Measured, bound: Bound) -> tuple[Figure, Finding | None]:
    """A figure beside its limit, and what is wrong where it is above."""
    value = measured.value(bound)
    figure = Figure(bound.name, unit=bound.unit, value=value, limit=bound.amount, holds=value <= bound.amount)
    if figure.holds:
        return figure, None
    sizes: Counter[str] = Counter()
    if peak := LIMITS[bound.name].of_peak:
        for living in measured.peak(peak).storages:
            sizes[living.layer or living.role] += living.bytes
    elif bound.name == "activations":
        sizes.update({path: figures.kept for path, figures in measured.layers().items()})
    else:
        for tensor in filter(_COUNTS[bound.name], measured.trace.tensors):
            sizes[tensor.layer] += tensor.bytes if bound.unit == "bytes" else (not tensor.tied_to) * tensor.elements
    blamed, draw, excess = dict(sizes.most_common(_BLAMED)), _in_unit(bound.unit), value - bound.amount
    text, values = _blame(blamed, draw)
    return figure, Finding(
        "over-limit",
        f"{{name}}: {{value}}, {{excess}} over the limit of {{limit}}{text}.",
        {"name": bound.name, "value": draw(value), "excess": draw(excess), "limit": draw(bound.amount), **values},
        bytes=excess if bound.unit == "bytes" else None,
        layers=tuple(blamed),
    )


_COUNTS: Mapping[str, Callable[[StoredTensor], bool]] = {
    "parameters": lambda tensor: tensor.kind in COUNTED,
    "trainable": lambda tensor: tensor.kind in COUNTED and tensor.trainable,
    "buffers": lambda tensor: tensor.kind == "buffer",
    "stored": lambda tensor: tensor.kind != "master",
}


def against_batch(row: FitRow, bound: Bound) -> tuple[Figure, Finding | None]:
    """Whether the batch that has to fit does. Raises `InputError` where that could not be run."""
    if row.status == "unavailable":
        raise InputError(f"whether a batch of {bound.amount} fits: {row.reason}")
    fits = row.status == "fits"
    figure = Figure(bound.name, unit=bound.unit, value=bound.amount if fits else None, limit=bound.amount, holds=fits)
    if fits:
        return figure, None
    needed = row.peak or row.next_peak
    text = "Batch {batch} does not fit on {gpu}"
    values: dict[str, object] = {"batch": bound.amount, "gpu": row.gpu}
    if needed is not None:
        text += ": it needs {needed}, {excess} more than PyTorch can use"
        values |= {"needed": Bytes(needed), "excess": Bytes(needed - row.budget)}
    layer = (row.bind.layer,) if row.bind and row.bind.layer else ()
    if row.bind and layer:
        text += "; it runs out of memory in {where}"
        values |= {"where": moment_in_words(row.bind.phase, row.bind.layer)}
    return figure, Finding(
        "does-not-fit", f"{text}.", values, bytes=None if needed is None else needed - row.budget, layers=layer
    )


def against_baseline(now: Baseline, before: Baseline, growth: Growth) -> Iterator[tuple[Figure, Finding | None]]:
    """Each figure beside its baseline, which has to be of the same setting, and what is to be said where it moved."""
    if changed := [
        key for key in {**before.settings, **now.settings} if before.settings.get(key) != now.settings.get(key)
    ]:
        was = ", ".join(f"{key} {before.settings.get(key, 'none')}" for key in changed)
        raise InputError(f"its baseline is for another setting ({was}): memsize check --update rewrites it")
    for name, value in now.figures.items():
        if name not in before.figures:
            raise InputError(f"its baseline has no {name}: memsize check --update rewrites it")
        base = before.figures[name]
        allowed = growth.most(base)
        unit: Unit = "elements" if name == "parameters" else "bytes"
        figure = Figure(
            name=name, unit=unit, value=value, limit=None, baseline=base, allowed=allowed, holds=value <= allowed
        )
        yield figure, _moved(figure, now, before) if value > allowed or value < base else None


def _moved(figure: Figure, now: Baseline, before: Baseline) -> Finding:
    value, base, allowed = figure.value or 0, figure.baseline or 0, figure.allowed or 0
    draw = _in_unit(figure.unit)
    grew = value > base
    sign = 1 if grew else -1
    nothing = LayerFigures(0, 0)
    sizes: Counter[str] = Counter()
    for path in {**before.layers, **now.layers}:
        old, new = before.layers.get(path, nothing), now.layers.get(path, nothing)
        stored, saved = new.stored - old.stored, new.kept - old.kept
        change = {"activations": saved, "parameters": stored, "stored": stored}.get(figure.name, stored + saved)
        if change * sign > 0:
            sizes[path] = change * sign
    blamed = dict(sizes.most_common(_BLAMED))
    text, values = _blame(blamed, Bytes, "+" if grew else "−")
    over = ", {excess} more than allowed" if grew and allowed > base else ""
    return Finding(
        "grew" if grew else "shrank",
        f"{{name}} {'grew' if grew else 'shrank'} from {{before}} to {{after}} ({{share}}){over}{text}."
        + ("" if grew else " memsize check --update lowers the baseline."),
        {
            "name": figure.name,
            "before": draw(base),
            "after": draw(value),
            "share": signed_share(base, value),
            "excess": draw(value - allowed),
            **values,
        },
        bytes=value - base if figure.unit == "bytes" else None,
        layers=tuple(blamed),
    )


def _in_unit(unit: str) -> Callable[[int], int]:
    return Bytes if unit == "bytes" else int


def _blame(layers: Mapping[str, int], draw: Callable[[int], int], sign: str = "") -> tuple[str, dict[str, object]]:
    if not layers:
        return "", {}
    parts: Sequence[str] = [f"{{layer{n}}} ({sign}{{size{n}}})" for n in range(len(layers))]
    *first, last = parts
    named = f"{', '.join(first)} and {last}" if first else last
    values: dict[str, object] = {f"layer{n}": path or "the model itself" for n, path in enumerate(layers)}
    return f", mostly in {named}", values | {f"size{n}": draw(size) for n, size in enumerate(layers.values())}
