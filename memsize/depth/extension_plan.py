"""`ExtensionPlan`: which rows of a short model's run those of a deep one's are like, and their indexes in the deep one.

A plan is made from two short runs, and gives the deep run of any other that makes the same steps with other sizes: of
another batch, or another number of bytes for each parameter. Then a single short run is enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from memsize.depth.alignment import Integers
from memsize.records.columns import Columns, Shapes, in_columns
from memsize.records.trace import DeferredFree, Event, Layer, Storage, StoredTensor, Trace

_FIELDS: Final = {kind: (tuple(kind.__slots__), attrgetter(*kind.__slots__)) for kind in (Layer, StoredTensor)}


class LayerRow(NamedTuple):
    """A layer of the deep model: the short one that it is like, its names, tensors, and figures that grow."""

    origin: int
    path: str
    aliases: tuple[str, ...]
    outputs: int
    inputs: int
    grown: dict[str, Any]


class TensorRow(NamedTuple):
    """A stored tensor of the deep model: the one of the short model that it is like, and its names."""

    origin: int
    name: str
    layer: str
    tied_to: str | None


@dataclass(frozen=True, eq=False)
class IndexedRows:
    """Storages or events of the deep model: the `origin` of each, the columns of indexes by their field, and the sizes
    (bytes and dimensions) of those `grown` with the depth.
    """

    origin: Integers
    indexes: dict[str, Integers]
    grown: Integers
    sizes: Integers


@dataclass(frozen=True, eq=False)
class ExtensionPlan:
    """The rows of the deep model's run, by the tables of a trace; `structure` is that of the short model's run."""

    structure: Hashable
    layers: Sequence[LayerRow]
    outputs: Sequence[int]
    inputs: Sequence[int]
    tensors: Sequence[TensorRow]
    storages: IndexedRows
    events: IndexedRows
    deferred: tuple[DeferredFree, ...]
    emptied: tuple[int, ...]
    collectives: Sequence[tuple[int, int, int]]
    """For each its origin, its layer, and the event behind it."""
    notes: tuple[str, ...]

    @property
    def has_grown(self) -> bool:
        """Whether a size depends on the depth: then the plan is that of one run only."""
        return len(self.storages.grown) + len(self.events.grown) > 0 or any(layer.grown for layer in self.layers)

    def fits(self, structure: Hashable) -> bool:
        """Whether the run of a short model, of this structure, makes the same steps."""
        return not self.has_grown and structure == self.structure

    def applied(self, short: Trace) -> Trace:
        """Return the run of the deep model, with the sizes of `short`."""
        outputs = [output for layer in short.layers for output in layer.outputs]
        inputs = [tensor for layer in short.layers for tensor in layer.inputs]
        passed_on = iter([outputs[origin] for origin in self.outputs])
        passed_in = iter([inputs[origin] for origin in self.inputs])
        layers = [(layer, _values(layer)) for layer in short.layers]
        tensors = [(tensor, _values(tensor)) for tensor in short.tensors]
        return replace(
            short,
            layers=tuple(_layer(*layers[row.origin], row, passed_on, passed_in) for row in self.layers),
            tensors=tuple(_tensor(*tensors[row.origin], row) for row in self.tensors),
            storages=_rows(short.storages, self.storages, Storage, "bytes"),
            events=_rows(short.events, self.events, Event, "delta"),
            deferred=self.deferred,
            emptied=self.emptied,
            collectives=tuple(
                short.collectives[origin]._replace(layer=layer, event=event)
                for origin, layer, event in self.collectives
            ),
            notes=self.notes,
        )


def structure_of(trace: Trace) -> Hashable:
    """Return all of a run but for sizes and dtypes."""
    storages = [
        (storage.role, storage.layer, storage.op, len(storage.shape), *storage[6:]) for storage in trace.storages
    ]
    return (
        tuple((layer.path, layer.type, layer.calls, len(layer.outputs), len(layer.inputs)) for layer in trace.layers),
        tuple((tensor.name, tensor.tied_to) for tensor in trace.tensors),
        tuple(storages),
        tuple((storage, delta > 0, phase, layer, op) for storage, delta, phase, layer, op in trace.events),
        (trace.phases, trace.lines, trace.deferred, trace.emptied, trace.notes, trace.roots, trace.failure),
        tuple(collective._replace(bytes=0, ranks=0) for collective in trace.collectives),
    )


def _layer(alike: Layer, values: dict[str, Any], row: LayerRow, passed_on: Any, passed_in: Any) -> Layer:
    outputs = tuple(next(passed_on) for _ in range(row.outputs))
    inputs = tuple(next(passed_in) for _ in range(row.inputs))
    counts = len(alike.outputs), len(alike.inputs)
    if row.path == alike.path and (row.outputs, row.inputs) == counts and not row.grown:
        return alike
    output_bytes = sum([output.bytes for output in outputs])
    names = {"path": row.path, "aliases": row.aliases}
    return Layer(**{**values, **names, "outputs": outputs, "inputs": inputs, **row.grown, "output_bytes": output_bytes})


def _tensor(alike: StoredTensor, values: dict[str, Any], row: TensorRow) -> StoredTensor:
    if row.name == alike.name:
        return alike
    return StoredTensor(**(values | {"name": row.name, "layer": row.layer, "tied_to": row.tied_to}))


def _values(record: Layer | StoredTensor) -> dict[str, Any]:
    """The fields of a record: `replace`, which asks for them each time, would take twice as long."""
    names, values = _FIELDS[type(record)]
    return dict(zip(names, values(record), strict=True))


def _rows(short: Sequence[Any], rows: IndexedRows, kind: type[Any], size: str) -> Sequence[Any]:
    alike = in_columns(short)
    if not isinstance(alike, Columns):
        return alike
    columns = dict(zip(kind._fields, alike.at(rows.origin).columns, strict=True)) | rows.indexes
    if len(rows.grown):
        columns[size] = columns[size].astype(np.int64)
        columns[size][rows.grown] = rows.sizes[:, 0]
        if "shape" in columns:
            shapes, dimensions = columns["shape"], rows.sizes[:, 1:]
            starts = shapes.starts.copy()
            starts[rows.grown] = len(shapes.sizes) + np.arange(len(rows.grown)) * dimensions.shape[1]
            columns["shape"] = Shapes(np.concatenate((shapes.sizes, dimensions.ravel())), starts, shapes.ranks)
    return Columns(kind, *columns.values())
