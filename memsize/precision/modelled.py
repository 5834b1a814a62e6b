"""Figures that a run on `meta` cannot show: derived from a run in another precision, and marked as modelled."""

from __future__ import annotations

from dataclasses import replace

from memsize.records.trace import Layer, Output, TensorSpec, Trace
from memsize.spec.scenario import Scenario


def modelled(trace: Trace, scenario: Scenario) -> tuple[Trace, str | None]:
    """The trace as `scenario` would have it, and what in it is modelled: None where the run itself shows everything.

    Only static int8 is modelled. Its modules return quint8 tensors of one byte per element (scale and zero point are
    numbers, not tensors) and keep nothing for backward, since quantized ops have no gradient.
    """
    if not scenario.is_modelled:
        return trace, None
    layers = tuple(_int8_layer(layer) for layer in trace.layers)
    storages = tuple(storage._replace(saved_by=-1) for storage in trace.storages)
    reason = "activations are taken to be quint8, one byte per element, and none is kept for backward"
    return replace(trace, layers=layers, storages=storages), reason


def _int8_layer(layer: Layer) -> Layer:
    outputs = tuple(_int8_output(output) for output in layer.outputs)
    return replace(layer, outputs=outputs, output_bytes=sum(output.bytes for output in outputs), saved_bytes=0)


def _int8_output(output: Output) -> Output:
    if output.spec.dtype != "float32":
        return output
    return Output(TensorSpec("quint8", output.spec.shape), output.memory, output.bytes // 4)
