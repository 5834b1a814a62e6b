"""`Report`: what `memsize report` found out about one model, as a value that can be read, drawn and tabulated.

The figures stand in the record (`trace`, `scenario_results`, `findings`); everything else here is a view of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memsize.records.aggregates import Row, Totals, own_rows, stored_dtypes, totals
from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.gpu import GpuEstimate
from memsize.records.trace import Failure, StoredTensor, Trace

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

Status = Literal["run", "modelled", "unavailable"]
"""How a scenario's figures came about: its trace was run, some are computed from another run, or there are none."""

FIGURES = (
    "parameter_bytes",
    "buffer_bytes",
    "attribute_bytes",
    "master_bytes",
    "cast_bytes",
    "output_bytes",
    "saved_bytes",
    "input_bytes",
    "inference",
    "training",
)
"""The figures of a scenario, by their names in `Totals`."""


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One scenario's figures. `reason` says what is modelled, or why the scenario does not apply to the model.

    `inference` and `training` are what a GPU would show of one forward without gradients and of the training that was
    asked for; `untrained` says why there is none of the latter.
    """

    name: str
    title: str
    status: Status
    reason: str | None = None
    totals: Totals | None = None
    trace: Trace | None = None
    inference: GpuEstimate | None = None
    training: GpuEstimate | None = None
    untrained: str | None = None

    def figure(self, name: str) -> int | None:
        """One of `FIGURES`, in bytes; None when the scenario is unavailable."""
        return None if self.totals is None else int(getattr(self.totals, name))

    def share(self, name: str, baseline: Totals | None) -> float | None:
        """A figure as a share of the baseline's; None when either is missing or the baseline's is 0."""
        figure = self.figure(name)
        whole = baseline and getattr(baseline, name)
        return figure / whole if figure is not None and whole else None


@dataclass(frozen=True, slots=True, repr=False)
class Report(Answer):
    """What each byte of one model is, scenario by scenario, and why.

    `trace` is the run that the layer table shows. `baseline` is what percentages compare with: unless given, the `fp32`
    scenario where it is among the results. `failure` says where the run of `trace` stopped, if it did. `gpu` and
    `optimizer` name what peaks are for.
    """

    kind: ClassVar = "report"

    model: str
    trace: Trace
    scenario_results: tuple[ScenarioResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    failure: Failure | None = None
    baseline: Totals | None = None
    gpu: str = ""
    optimizer: str = ""
    allocator: str = ""
    """The settings of the caching allocator as JSON data; empty where they are PyTorch's."""
    missing: tuple[str, ...] = ()
    """What was not run since Ctrl-C ended it before; empty where the report is complete."""

    @property
    def totals(self) -> Totals:
        """The totals of the layer table."""
        return totals(self.trace)

    @property
    def fp32(self) -> Totals | None:
        """What percentages compare with, None when no float32 figures are known."""
        found = (result.totals for result in self.scenario_results if result.name == "fp32")
        return self.baseline or next(found, None)

    @property
    def stopped(self) -> Failure | None:
        """Where the run stopped before its end, if it did."""
        return self.failure or self.trace.failure

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the runs took for granted, each once."""
        return tuple(dict.fromkeys(text for trace in self._traces for text in trace.assumptions))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader must know about how the figures were made, each once: the report's notes and its runs'."""
        return tuple(dict.fromkeys((*self.notes, *(text for trace in self._traces for text in trace.notes))))

    @property
    def _traces(self) -> tuple[Trace, ...]:
        return (self.trace, *(result.trace for result in self.scenario_results if result.trace))

    def tables(self) -> dict[str, FlatTable]:
        """`layers`, `scenarios` and `tensors`, as the properties of these names have them."""
        shares = (f"{name}_of_fp32" for name in FIGURES)
        return {
            "layers": FlatTable.of(map(_layer_record, own_rows(self.trace))),
            "scenarios": FlatTable(("name", "status", "reason", *FIGURES, *shares), self._scenario_rows(), FIGURES),
            "tensors": FlatTable.of(map(_tensor_record, self.trace.tensors)),
        }

    @property
    def layers(self) -> DataFrame:
        """One row per module, each with its own figures: columns add up to the totals."""
        return self.tables()["layers"].frame()

    @property
    def scenarios(self) -> DataFrame:
        """One row per scenario: its figures in bytes, and each as a share of float32's (``…_of_fp32``)."""
        return self.tables()["scenarios"].frame().astype(dict.fromkeys(FIGURES, "Int64")).set_index("name")

    @property
    def tensors(self) -> DataFrame:
        """One row per tensor that the model holds: what it claims to be and what it stores."""
        return self.tables()["tensors"].frame()

    def plot_layers(self, columns: Sequence[str] = ("stored", "saved"), unit: str | None = None) -> Figure:
        """Columns of bytes of the layer table as a figure of plotly: a treemap each, which one can zoom into.

        By default what is stored and what is kept for backward. Raises `OutputError` without plotly, for a column that
        there is not, and where no layer has any of it.
        """
        return self._plotted("layers", unit, columns=tuple(columns))

    def _scenario_rows(self) -> Iterator[tuple[object, ...]]:
        baseline = self.fp32
        for result in self.scenario_results:
            shares = (result.share(name, baseline) for name in FIGURES)
            yield (result.name, result.status, result.reason, *map(result.figure, FIGURES), *shares)


def _layer_record(row: Row) -> dict[str, object]:
    return {
        "path": row.path,
        "type": row.type,
        "depth": row.depth,
        "calls": row.calls,
        "kernel": "×".join(map(str, row.kernel)),
        "input": ", ".join(map(str, row.inputs)),
        "output": ", ".join(str(output.spec) for output in row.outputs),
        "stored_as": ", ".join(row.dtypes),
        "parameters": row.parameters,
        "trainable": row.trainable,
        "parameter_bytes": row.parameter_bytes,
        "buffer_bytes": row.buffer_bytes,
        "attribute_bytes": row.attribute_bytes,
        "output_bytes": row.output_bytes,
        "saved_bytes": row.saved_bytes,
        "cast_bytes": row.cast_bytes,
        "multiply_adds": row.multiply_adds,
        "marks": ", ".join(row.marks),
    }


def _tensor_record(tensor: StoredTensor) -> dict[str, object]:
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "layer": tensor.layer,
        "dtype": tensor.spec.dtype,
        "stored_as": ", ".join(stored_dtypes([tensor])),
        "shape": tensor.spec.shape,
        "elements": tensor.elements,
        "bytes": tensor.bytes,
        "reported_bytes": tensor.reported_bytes,
        "trainable": tensor.trainable,
        "tied_to": tensor.tied_to,
        "wrapper": tensor.wrapper,
        "used": tensor.used,
        "differentiable": tensor.differentiable,
    }


def figures(totals: Totals | None) -> dict[str, Any]:
    """The fields of `totals` as exact integers with the two sums; every one None when there are no totals."""
    fields = asdict(totals or Totals()) | {
        "inference_bytes": totals and totals.inference,
        "training_bytes": totals and totals.training,
    }
    return {name: value if totals else None for name, value in fields.items()}
