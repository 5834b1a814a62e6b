"""Figures that no run on `meta` can give, computed from one that was run, and marked as such."""

from __future__ import annotations

from dataclasses import replace

from memsize.records.trace import Layer, Output, TensorSpec, Trace
from memsize.spec.scenario import Scenario


def modelled(trace: Trace, scenario: Scenario) -> tuple[Trace, str | None]:
    """`trace` as the scenario would have it and what of it is modelled; unchanged and None where it was run as it is.

    Static int8 is the one: its modules pass on quint8 tensors, one byte per element, and nothing is kept for backward,
    for quantized ops have none.
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
