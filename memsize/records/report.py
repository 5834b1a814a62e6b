"""`Report`: what `memsize report` found out about one model, as a value that can be read, drawn and tabulated.

The figures stand in the record (`trace`, `scenario_results`, `findings`); everything else here is a view of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from memsize.errors import UnknownOutputError
from memsize.records.aggregates import Row, Totals, own_rows, stored_dtypes, totals
from memsize.records.answer import Answer, TableFrame
from memsize.records.fields import (
    SCENARIO,
    Field,
    Fields,
    FlatTable,
    Label,
    Missing,
    Words,
    field,
    share_of,
    shown,
)
from memsize.records.finding import Finding
from memsize.records.gpu import GpuEstimate
from memsize.records.roles import Role
from memsize.records.trace import Failure, StoredTensor, Trace

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

Status = Literal["run", "unavailable"]
"""Whether a scenario was run."""


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One scenario's figures. `reason` says why the scenario does not apply to the model.

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

    @property
    def label(self) -> Label:
        """The scenario's name in tables."""
        return Label(self.name, hint=self.title)

    def figure(self, name: str) -> int | None:
        """One of `FIGURES`, in bytes; None when the scenario is unavailable."""
        return None if self.totals is None else int(getattr(self.totals, name))

    def share(self, name: str, baseline: Totals | None) -> float | None:
        """A figure as a share of the baseline's; None when either is missing or the baseline's is 0."""
        return share_of(self.figure(name), getattr(baseline, name) if baseline else None)


class ScenarioRow(NamedTuple):
    """A scenario beside the figures that its shares are of."""

    result: ScenarioResult
    baseline: Totals | None


def _figure(
    name: str, key: str, title: str, weight: int, hint: str, share_weight: int = 0, role: Role | None = None
) -> tuple[Field[ScenarioRow], Field[ScenarioRow]]:
    """A figure of `Totals`, and its share of float32's, which documents show where it has a weight."""
    share: Any = {"get": lambda row: row.result.share(name, row.baseline), "key": f"{key}_of_fp32", "beside": key}
    title_of_share = "% of fp32" if share_weight else ""
    return (
        field(name, title, "bytes", weight, hint, get=lambda row: row.result.figure(name), key=key, role=role),
        field(f"{name}_of_fp32", title_of_share, "share", share_weight, f"{title} ÷ fp32's", **share),
    )


_INFERENCE = "the model, its input, cast copies and all outputs; the peak is smaller, as outputs are freed"
_TRAINING = "the model, its input, cast copies and what is kept for backward: without gradients and optimizer state"
_MASTER = "float32 copies of parameters that the optimizer keeps"
_CAST = "copies of parameters in another dtype, made while it runs"
_FIGURE_FIELDS: Final = (
    _figure("parameter_bytes", "stored", "parameters", 95, "bytes of stored parameters", 85, "parameter"),
    _figure("buffer_bytes", "buffers", "buffers", 42, "bytes of registered buffers", 0, "buffer"),
    _figure("attribute_bytes", "unregistered", "not registered", 43, "bytes of tensors held as plain attributes"),
    _figure("master_bytes", "master", "master weights", 44, _MASTER, 0, "master weight"),
    _figure("cast_bytes", "cast", "cast copies", 75, _CAST, 0, "cast copy"),
    _figure("output_bytes", "new", "outputs", 60, "new memory that layers' outputs take", 35, "output"),
    _figure("saved_bytes", "saved", "kept for backward", 80, "activations that backward needs", 45, "activation"),
    _figure("input_bytes", "input", "input", 30, "bytes of the model's input", 0, "input"),
    _figure("inference", "inference", "inference total", 70, _INFERENCE, 50),
    _figure("training", "training", "training up to backward", 90, _TRAINING, 55),
)

FIGURES: Final = tuple(figure.name for figure, _ in _FIGURE_FIELDS)
"""The figures of a scenario, by their names in `Totals`."""
SHARES: Final = tuple(share.name for _, share in _FIGURE_FIELDS)
"""Their shares of float32's."""

SCENARIO_FIELDS: Final = Fields[ScenarioRow](
    field("name", "scenario", "name", 100, SCENARIO.help, get="result.name", key="scenario"),
    field("status", get="result.status"),
    field("reason", get="result.reason"),
    *chain.from_iterable(_FIGURE_FIELDS),
    cell={"name": lambda row, _: row.result.label},
    nullable=FIGURES,
    lacks=lambda row: row.result.totals is None,
    missing=lambda row: Missing(row.result.reason or row.result.status),
)


@dataclass(frozen=True, slots=True, repr=False)
class Report(Answer):
    """The memory of one model byte by byte, scenario by scenario, with findings about the causes.

    `trace` is the run that the layer table shows. `baseline` holds the figures that percentages compare with; without
    one, they are those of the `fp32` scenario, if it is among the results. `failure` says where the run of `trace`
    stopped, if it did. `gpu` and `optimizer` name the GPU and the optimizer that peaks are predicted for.
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
    """The parts of the report that are missing because of Ctrl-C; empty where it is complete."""
    active_parameters: int | None = None
    """The parameters that one token uses in a mixture of experts; None for other models."""

    @property
    def totals(self) -> Totals:
        """The totals of the layer table."""
        return totals(self.trace)

    @property
    def fp32(self) -> Totals | None:
        """The totals that percentages compare with: `baseline`, else those of `fp32`; None where there are neither."""
        candidates = (result.totals for result in self.scenario_results if result.name == "fp32")
        return self.baseline or next(candidates, None)

    @property
    def parameters(self) -> int:
        """How many elements the parameters have."""
        return self.totals.parameters

    @property
    def peak(self) -> int | None:
        """The most allocated bytes of the first scenario that has a peak, of training where steps were run."""
        peaks = (result.training or result.inference for result in self.scenario_results)
        return next((peak.allocated for peak in peaks if peak), None)

    @property
    def stopped(self) -> Failure | None:
        """Where the run stopped before its end, if it did."""
        return self.failure or self.trace.failure

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of all runs, without duplicates."""
        return tuple(dict.fromkeys(text for trace in self._traces for text in trace.assumptions))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on how the figures were made: the notes of the report and of its runs, without duplicates."""
        return tuple(dict.fromkeys((*self.notes, *(text for trace in self._traces for text in trace.notes))))

    @property
    def _traces(self) -> tuple[Trace, ...]:
        return (self.trace, *(result.trace for result in self.scenario_results if result.trace))

    def tables(self) -> dict[str, FlatTable]:
        """`layers`, `scenarios` and `tensors`, as the properties of these names have them."""
        scenarios = SCENARIO_FIELDS.only("name", "status", "reason", *FIGURES, *SHARES)
        return {
            "layers": LAYER_FIELDS.flat(own_rows(self.trace)),
            "scenarios": scenarios.flat(self.scenario_rows),
            "tensors": TENSOR_FIELDS.flat(self.trace.tensors),
        }

    layers = TableFrame("layers", "One row per module, each with its own figures: columns add up to the totals.")

    @property
    def scenarios(self) -> DataFrame:
        """One row per scenario: its figures in bytes, and each as a share of float32's (``…_of_fp32``)."""
        return self.tables()["scenarios"].frame().set_index("name")

    tensors = TableFrame("tensors", "One row per tensor that the model holds: what it claims to be and what it stores.")

    def plot_layers(self, columns: Sequence[str] = ("stored", "saved"), unit: str | None = None) -> Figure:
        """Columns of bytes of the layer table as a figure of plotly: a treemap each, which one can zoom into.

        By default what is stored and what is kept for backward. Raises `OutputError` without plotly, for a column that
        there is not, and where no layer has any of it.
        """
        return self._plotted("layers", unit, columns=tuple(columns))

    @property
    def scenario_rows(self) -> tuple[ScenarioRow, ...]:
        """The scenarios, each beside the figures that percentages compare with."""
        baseline = self.fp32
        return tuple(ScenarioRow(result, baseline) for result in self.scenario_results)


def _joined(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


_OUTPUT = "new memory that its outputs take; views and in-place results: 0"
_SAVED = "bytes that its ops keep for backward, without parameters"
_NOTES = "other paths, ties, views, calls, what was never called or used"
LAYER_FIELDS: Final = Fields[Row](
    field("path", "layer", "path", 100, "the module's path in the model", key="layer"),
    field("type", "type", "text", 60, "its class"),
    field("depth", kind="count"),
    field("kernel", "kernel", "text", 21, "size of its window", get=lambda row: "×".join(map(str, row.kernel))),
    field("input", get=lambda row: _joined(row.inputs)),
    shown("inputs", "input", "specs", 22, "its input tensors", key="input"),
    field("output", get=lambda row: _joined(output.spec for output in row.outputs)),
    shown("outputs", "output", "specs", 70, "its output tensors", key="output"),
    field("calls", "calls", "count", 20, "number of calls"),
    field("parameters", "parameters", "count", 80, "elements of its own parameters, tied ones once"),
    field("trainable", "trainable", "count", 23, "parameters that require a gradient"),
    shown("parameters_share", "% of parameters", "share", 24, "its part of the model's parameters", key="share"),
    field("stored_as", "stored as", "words", 50, "the dtypes in which its parameters are stored", key="dtype"),
    field("parameter_bytes", "stored", "bytes", 95, "bytes of its own parameters", key="stored", role="parameter"),
    field("buffer_bytes", "buffers", "bytes", 62, "bytes of its own buffers", key="buffers", role="buffer"),
    field("attribute_bytes", "not registered", "bytes", 88, "bytes of tensors that it holds as plain attributes"),
    field("cast_bytes", "cast copies", "bytes", 65, _CAST, key="cast", role="cast copy"),
    field("output_bytes", "new output", "bytes", 85, _OUTPUT, key="new", role="output"),
    field("saved_bytes", "kept for backward", "bytes", 90, _SAVED, key="saved", role="activation"),
    field("multiply_adds", "multiply-adds", "count", 25, "of matrix products and convolutions", key="mult_adds"),
    shown("multiply_adds_share", "% of multiply-adds", "share", 24, "its share of the forward's multiply-adds"),
    field("marks", "notes", "words", 92, _NOTES, get=lambda row: _joined(row.marks), key="notes"),
    get={"outputs": lambda row: [output.spec for output in row.outputs], "stored_as": lambda row: _joined(row.dtypes)},
    cell={
        "parameters_share": lambda row, whole: share_of(row.parameters, whole.parameters),
        "stored_as": lambda row, _: Words(row.dtypes),
        "multiply_adds_share": lambda row, whole: share_of(row.multiply_adds, whole.multiply_adds),
        "marks": lambda row, _: Words(row.marks),
    },
    key={"attribute_bytes": "unregistered", "multiply_adds_share": "mult_adds_share"},
    optional="kernel inputs calls trainable parameters_share multiply_adds multiply_adds_share".split(),
    adds=(
        "parameters trainable parameters_share parameter_bytes buffer_bytes attribute_bytes cast_bytes output_bytes "
        "saved_bytes multiply_adds multiply_adds_share"
    ).split(),
)
"""The fields of a layer in the order of the layer table; the totals of the report are their answer."""

COLUMNS: Final = tuple(column.key for column in LAYER_FIELDS.columns)
"""The columns of the layer table, in the order in which they stand by default."""

_TORCHINFO_NAMES: Final = {
    "input_size": "input",
    "output_size": "output",
    "num_params": "parameters",
    "params_percent": "share",
    "kernel_size": "kernel",
}
"""torchinfo's names of the same columns, where they differ."""


def column_keys(names: Iterable[str]) -> tuple[str, ...]:
    """Columns of the layer table by their names, or by torchinfo's; raises `OutputError` for one that there is not."""
    keys = tuple(_TORCHINFO_NAMES.get(name, name) for name in names)
    for name in keys:
        if name not in COLUMNS:
            raise UnknownOutputError("column", name, COLUMNS)
    return keys


TENSOR_FIELDS: Final = Fields[StoredTensor](
    field("name"),
    field("kind"),
    field("layer"),
    field("dtype", get="spec.dtype"),
    field("stored_as", get=lambda tensor: _joined(stored_dtypes([tensor]))),
    field("shape", get="spec.shape"),
    field("elements", kind="count"),
    field("bytes", kind="bytes"),
    field("reported_bytes", kind="bytes"),
    field("trainable"),
    field("tied_to"),
    field("wrapper"),
    field("used"),
    field("differentiable"),
)


def figures(totals: Totals | None) -> dict[str, Any]:
    """The fields of `totals` as exact integers with the two sums; every one None when there are no totals."""
    fields = asdict(totals or Totals()) | {
        "inference_bytes": totals and totals.inference,
        "training_bytes": totals and totals.training,
    }
    return {name: value if totals else None for name, value in fields.items()}
