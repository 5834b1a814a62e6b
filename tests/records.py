"""Records made by hand for tests of everything that reads one: no torch, every figure with its arithmetic."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

from memsize.analysis.matching import matched as matched
from memsize.records import run_file as run_file
from memsize.records.aggregates import (
    Row as Row,
    Totals as Totals,
    alive as alive,
    live_bytes as live_bytes,
    own_rows as own_rows,
    peak as peak,
    split_phase as split_phase,
    stored_dtypes as stored_dtypes,
    totals,
    traffic as traffic,
    visible as visible,
)
from memsize.records.byte_ownership import (
    Extent as Extent,
    Ownership as Ownership,
    own_bytes as own_bytes,
    strided_extent as strided_extent,
)
from memsize.records.check import (
    Baseline as Baseline,
    CheckedModel as CheckedModel,
    Figure as Figure,
    LayerFigures as LayerFigures,
    Problem as Problem,
    read_baselines as read_baselines,
    write_baselines as write_baselines,
)
from memsize.records.codec import coder as coder
from memsize.records.columns import Columns as Columns, in_columns as in_columns, numbers as numbers, places as places
from memsize.records.comparison import Change as Change, Comparison, LayerChange as LayerChange
from memsize.records.fields import (
    Cell as Cell,
    Column as Column,
    ColumnKind as ColumnKind,
    FlatTable as FlatTable,
    Label as Label,
    Missing as Missing,
    Path as Path,
    Share as Share,
    Signed as Signed,
    Specs as Specs,
    Words as Words,
    role_fields as role_fields,
)
from memsize.records.finding import Finding, Moment as Moment, Rules as Rules
from memsize.records.fit import (
    Bind as Bind,
    Budget as Budget,
    FitRow as FitRow,
    FitRun as FitRun,
    Remedied as Remedied,
    RemedyRow as RemedyRow,
)
from memsize.records.gpu import (
    Card as Card,
    GpuEstimate as GpuEstimate,
    Interval as Interval,
    LiveStorage as LiveStorage,
    Platform as Platform,
    RecordStreamCost as RecordStreamCost,
    Shortage as Shortage,
    StreamShare,
)
from memsize.records.layout import (
    Audit as Audit,
    Copy as Copy,
    Format as Format,
    LayerFormats as LayerFormats,
    Loss as Loss,
    Run as Run,
)
from memsize.records.program import (
    Assumed as Assumed,
    ChildRun as ChildRun,
    Growth as Growth,
    Holder as Holder,
    KeptGradients as KeptGradients,
    LiveTensor as LiveTensor,
    ModuleShare as ModuleShare,
    NeedsGpu as NeedsGpu,
    ProgramRun as ProgramRun,
    Refused as Refused,
    WentOn as WentOn,
    peak_by_module as peak_by_module,
)
from memsize.records.ranks import RankGroup as RankGroup, spans as spans
from memsize.records.report import (
    COLUMNS as COLUMNS,
    FIGURES as FIGURES,
    LAYER_FIELDS as LAYER_FIELDS,
    Report,
    ScenarioResult,
    column_keys as column_keys,
    figures as figures,
)
from memsize.records.roles import (
    FIXED as FIXED,
    PER_PARAMETER as PER_PARAMETER,
    ROLES as ROLES,
    TITLES as TITLES,
    Role as Role,
    in_order as in_order,
    noun as noun,
)
from memsize.records.run_file import (
    NEWEST as NEWEST,
    is_run_file as is_run_file,
    read_data as read_data,
    read_run as read_run,
    write_run as write_run,
)
from memsize.records.serving import Concurrency as Concurrency
from memsize.records.sweep import Outcome as Outcome, SweepRow as SweepRow, results_file as results_file
from memsize.records.timeline import (
    PeakMoment as PeakMoment,
    Phase as Phase,
    Segment,
    Stretch as Stretch,
    Timeline,
    courses as courses,
    step_courses as step_courses,
    to_data as to_data,
)
from memsize.records.trace import (
    Event,
    Failure,
    HostRow as HostRow,
    HostUse as HostUse,
    InputTensor,
    Layer,
    Output,
    Storage,
    StoredTensor,
    TensorSpec,
    Trace,
)
from memsize.records.verification import (
    Alignment as Alignment,
    AllocationDifference as AllocationDifference,
    DifferenceKind as DifferenceKind,
    FigureComparison as FigureComparison,
    Prediction as Prediction,
    VerifiedRun as VerifiedRun,
    off_by as off_by,
)
from memsize.records.world import Collective as Collective, Traffic as Traffic, World
from memsize.render.cell_text import (
    draw_cell as draw_cell,
    draw_specs as draw_specs,
    draw_strip as draw_strip,
    shorten as shorten,
    shorten_path as shorten_path,
)
from memsize.render.data import draw_csv as draw_csv, draw_json as draw_json
from memsize.render.text import _table as _table, draw as draw
from memsize.units import Bytes

_IN_TIMELINES = {
    "phases": Phase,
    "storages": Storage,
    "segments": Segment,
    "streams": StreamShare,
    "collectives": Traffic,
}


def from_data(data: Any) -> Timeline:
    """The timeline that is in JSON as `to_data` wrote it."""

    def in_tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: in_tuples(member) for name, member in value.items()}
        return tuple(map(in_tuples, value)) if isinstance(value, list | tuple) else value

    members = {column.name: in_tuples(data[column.name]) for column in fields(Timeline)}
    rows = {name: tuple(row(**entry) for entry in members[name]) for name, row in _IN_TIMELINES.items()}
    card = members["card"] and Card(**members["card"])
    return Timeline(**members | rows | {"world": World(**members["world"]), "card": card})


SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int8": 1}


def spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(dtype, shape)


def elements(shape: tuple[int, ...]) -> int:
    return list(accumulate(shape, lambda a, b: a * b, initial=1))[-1]


def output(dtype: str, *shape: int, memory: str = "new") -> Output:
    size = elements(shape) * SIZES[dtype] if memory == "new" else 0
    return Output(TensorSpec(dtype, shape), memory, size)  # type: ignore[arg-type]


def layer(path: str, type: str, *, leaf: bool = True, calls: int = 1, **figures: object) -> Layer:
    """A layer at the depth that its path says, with nothing in it but `figures`."""
    plain: dict[str, object] = dict.fromkeys(("parameters", "trainable", "parameter_bytes", "buffer_bytes"), 0)
    plain |= dict.fromkeys(("output_bytes", "saved_bytes", "cast_bytes"), 0) | {"outputs": ()}
    depth = path.count(".") + 1 if path else 0
    return Layer(path=path, type=type, depth=depth, leaf=leaf, calls=calls, **(plain | figures))  # type: ignore[arg-type]


def stored(name: str, dtype: str, *shape: int, kind: str = "parameter", **more: object) -> StoredTensor:
    """A tensor of the module that its name says, used and trainable unless told otherwise."""
    count = elements(shape)
    plain: dict[str, object] = {
        "bytes": 0 if more.get("tied_to") else count * SIZES[dtype],
        "reported_bytes": count * SIZES[dtype],
        "trainable": kind == "parameter",
        "used": True,
        "differentiable": kind == "parameter",
        "layer": name.rpartition(".")[0],
    }
    fields = {"name": name, "kind": kind, "spec": TensorSpec(dtype, shape), "elements": count}
    return StoredTensor(**(fields | plain | more))  # type: ignore[arg-type]


# The model of the question, batch 1, 3×64×64: three convolutions and a linear layer.
# Outputs: 300·62·62 = 1,153,200; 500·60·60 = 1,800,000; 1000·58·58 = 3,364,000; 1. Together 6,317,201 elements.
# Parameters: 300·3·9 + 300 = 8,400; 500·300·9 + 500 = 1,350,500; 1000·500·9 + 1000 = 4,501,000; 3,364,001.

_CONVS = (("conv.0", 3, 300, 62), ("conv.1", 300, 500, 60), ("conv.2", 500, 1000, 58))


def toy(scenario: str = "fp32", dtype: str = "float32", compute: str | None = None) -> Trace:
    """The toy CNN stored in `dtype` and run in `compute` (None: the same), as its trace reads."""
    compute = compute or dtype
    size, cast = SIZES[compute], compute != dtype
    layers = [layer("", "Test", leaf=False, outputs=(output(compute, 1, 1, memory="passed"),))]
    layers.append(layer("conv", "Sequential", leaf=False, outputs=(output(compute, 1, 1000, 58, 58, memory="passed"),)))
    tensors: list[StoredTensor] = []
    given = 3 * 64 * 64 * size  # each layer keeps its input, and the linear layer keeps the last convolution's output
    for path, before, after, side in _CONVS:
        held = stored(f"{path}.weight", dtype, after, before, 3, 3), stored(f"{path}.bias", dtype, after)
        out = output(compute, 1, after, side, side)
        copies = sum(t.elements for t in held) * size * cast
        kept = given + held[0].elements * size * cast  # a convolution keeps its weight's copy, not its bias's
        figures = {"output_bytes": out.bytes, "saved_bytes": kept, "cast_bytes": copies}
        layers.append(layer(path, "Conv2d", outputs=(out,), **figures))
        tensors += held
        given = out.bytes
    held = stored("fc.weight", dtype, 1, 3364000), stored("fc.bias", dtype, 1)
    out, copies = output(compute, 1, 1), 3364001 * size * cast
    kept = given + 3364000 * size * cast
    layers.append(layer("fc", "Linear", outputs=(out,), output_bytes=out.bytes, saved_bytes=kept, cast_bytes=copies))
    return Trace(
        model="model.py:Test",
        scenario=scenario,
        training=True,
        batch_size=1,
        torch="2.13.0",
        inputs=(InputTensor("0", spec("float32", 1, 3, 64, 64), 49152),),
        layers=tuple(layers),
        tensors=(*tensors, *held),
        storages=_toy_storages(compute, cast),
        events=_toy_events(),
    )


def _toy_storages(compute: str, cast: bool) -> tuple[Storage, ...]:
    """The input, a copy of the weights that are kept when they are cast, and the last output."""
    weights = 8100 + 1350000 + 4500000 + 3364000
    copied = weights * SIZES[compute] * cast
    first = 3 * 64 * 64 * SIZES[compute]
    return (
        Storage(first, "temporary" if cast else "input", -1, "", compute, (1, 3, 64, 64), 2),
        Storage(copied, "cast copy", 2, "aten._to_copy", compute, (weights,), 2),
        Storage(SIZES[compute], "output", 5, "aten.addmm", compute, (1, 1), -1),
    )


def _toy_events() -> tuple[Event, ...]:
    return (Event(0, 49152, 0, -1, ""), Event(2, 4, 0, 5, "aten.addmm"), Event(0, -49152, 0, -1, ""))


def structures() -> Trace:
    """A model with one of everything that a table must show.

    A class token and a position buffer on the model itself, an embedding (7·4 = 28) tied to the head, blocks called
    three times, an in-place activation, a view, a layer never called, a frozen norm, a tensor that is not registered.
    """
    wide = (1, 5, 4)
    return Trace(
        model="nets:Tiny",
        scenario="as-given",
        training=True,
        batch_size=1,
        torch="2.13.0",
        inputs=(InputTensor("ids", spec("int64", 1, 5), 40), InputTensor("mask", spec("int64", 1, 5), 40)),
        layers=(
            layer("", "Tiny", leaf=False, outputs=(output("float32", *wide),), output_bytes=80, saved_bytes=80),
            layer("embed", "Embedding", outputs=(output("float32", *wide),), output_bytes=80, saved_bytes=40),
            layer("blocks", "ModuleList", leaf=False, calls=0),
            layer("blocks.0", "Block", leaf=False, calls=3, outputs=(output("float32", *wide),) * 3, output_bytes=240),
            layer(
                "blocks.0.lstm",
                "LSTM",
                calls=3,
                outputs=(output("float32", *wide), output("float32", 1, 1, 4), output("float32", 1, 1, 4)) * 3,
                output_bytes=336,
                saved_bytes=400,
            ),
            layer("blocks.0.act", "ReLU", calls=3, outputs=(output("float32", *wide, memory="in place"),) * 3),
            layer("norm", "LayerNorm", outputs=(output("float32", *wide),), output_bytes=80, saved_bytes=120),
            layer("flat", "Flatten", outputs=(output("float32", 1, 20, memory="view"),)),
            layer("spare", "Linear", calls=0),
            layer("head", "Linear", outputs=(output("float32", 1, 5, 7),), output_bytes=140, saved_bytes=60),
        ),
        tensors=(
            stored("token", "float32", 1, 1, 4, layer=""),
            stored("position", "int64", 1, 5, kind="buffer", layer=""),
            stored("table", "float32", 2, 2, kind="attribute", layer=""),
            stored("embed.weight", "float32", 7, 4),
            stored("blocks.0.lstm.weight_ih_l0", "float32", 16, 4),
            stored("blocks.0.lstm.bias_ih_l0", "float32", 16, used=False),
            stored("norm.weight", "float32", 4, trainable=False),
            stored("spare.weight", "float32", 3, 4, used=False, differentiable=False),
            stored("head.weight", "float32", 7, 4, tied_to="embed.weight"),
        ),
        assumptions=("a mask was taken to be all ones",),
        notes=("aten::_odd has no meta kernel and ran on the CPU",),
    )


def failing() -> Trace:
    """The toy CNN given 3×32×32: its linear layer wants 3,364,000 features and gets 1000·26·26 = 676,000."""
    whole = toy("as-given")
    sides = (None, None, (1, 300, 30, 30), (1, 500, 28, 28), (1, 1000, 26, 26), None)
    outputs = [() if shape is None else (output("float32", *shape),) for shape in sides]
    ran = [
        replace(old, outputs=new, output_bytes=sum(o.bytes for o in new), saved_bytes=0, calls=int(bool(new)))
        for old, new in zip(whole.layers, outputs, strict=True)
    ]
    return replace(
        whole,
        inputs=(InputTensor("0", spec("float32", 1, 3, 32, 32), 12288),),
        layers=tuple(ran),
        tensors=tuple(replace(tensor, used=None, differentiable=None) for tensor in whole.tensors),
        failure=Failure(
            layer="fc",
            type="Linear",
            op="aten.addmm",
            inputs=("float32[1,676000]",),
            reason="mat1 and mat2 shapes cannot be multiplied (1x676000 and 3364000x1)",
        ),
    )


def _run(trace: Trace, title: str) -> ScenarioResult:
    return ScenarioResult(trace.scenario, title, "run", None, totals(trace), trace)


def compared(before: Trace, after: Trace) -> Comparison:
    """The comparison of two traces."""
    from memsize.analysis.compare import compare_sides
    from memsize.analysis.differences import Side

    return compare_sides(Side(before), Side(after))


def toy_report() -> Report:
    """The report of the question, with one modelled and one unavailable scenario."""
    fp32 = toy()
    amp = toy("amp-fp16", "float32", "float16")
    quantized = replace(totals(fp32), parameter_bytes=5859900 * 4 + 3364000 + 5)
    return Report(
        model="model.py:Test",
        trace=replace(fp32, scenario="as-given"),
        scenario_results=(
            _run(fp32, "every floating tensor in float32"),
            _run(toy("fp16", "float16"), "model.half()"),
            _run(amp, "float32 under torch.autocast(float16)"),
            ScenarioResult(
                "int8-weight",
                "int8 weights, one scale per output channel",
                "run",
                totals=quantized,
            ),
            ScenarioResult(
                "int4-weight",
                "int4 weights, one scale per 128 values of a row",
                "unavailable",
                "torchao converts Linear; this model has none that it can convert",
            ),
        ),
        findings=(
            Finding(
                "half-is-stored",
                "fp16 does halve what is stored, {before} → {after}. A summary that still says {before} multiplies "
                "every parameter by 4 bytes.",
                {"before": Bytes(36895604), "after": Bytes(18447802)},
                bytes=18447802,
                brief="fp16 halves what is stored, {before} → {after}.",
            ),
            Finding(
                "amp-keeps-fp32-parameters",
                "AMP casts no parameter: {count} elements stay float32 in {layers}, and {copies} of fp16 copies come "
                "on top. With this input it keeps more than fp32 at batch {more} and less from batch {less} on.",
                {
                    "count": 9223901,
                    "layers": ("conv.0", "conv.1", "conv.2", "fc"),
                    "copies": Bytes(18447802),
                    "more": 1,
                    "less": 2,
                },
                bytes=18447802,
                layers=("conv.0", "conv.1", "conv.2", "fc"),
                brief="AMP casts no parameter: {copies} of fp16 copies come on top.",
            ),
        ),
    )


def structures_report() -> Report:
    return Report(model="nets:Tiny", trace=structures())


def failing_report() -> Report:
    return Report(model="model.py:Test", trace=failing())


def deep_report() -> Report:
    """Long paths and every column filled: what a terminal has too little room for."""
    parents = ("", "model", "model.language_model", "model.language_model.layers")
    layers = [layer(parent, "Container", leaf=False) for parent in parents]
    tensors: list[StoredTensor] = []
    for number in range(4):
        block = f"model.language_model.layers.{number}"
        path = f"{block}.self_attention.query_key_value_projection"
        layers.append(layer(block, "TransformerDecoderLayer", leaf=False))
        layers.append(layer(f"{block}.self_attention", "SelfAttention", leaf=False))
        out = output("bfloat16", 1, 2048, 12288)
        layers.append(
            layer(
                path,
                "QueryKeyValueParallelLinear",
                calls=2,
                outputs=(out,),
                output_bytes=out.bytes,
                saved_bytes=out.bytes // 3,
                cast_bytes=4096 * 12288 * 2,
            )
        )
        tensors.append(stored(f"{path}.weight", ("float32", "bfloat16")[number % 2], 12288, 4096))
        tensors.append(stored(f"{path}.cache", "float32", 4096, kind="buffer"))
    return Report(
        model="transformers:MegaForCausalLM",
        trace=Trace(
            model="transformers:MegaForCausalLM",
            scenario="amp-bf16",
            training=True,
            batch_size=1,
            torch="2.13.0",
            inputs=(InputTensor("input_ids", spec("int64", 1, 2048), 16384),),
            layers=tuple(layers),
            tensors=tuple(tensors),
        ),
    )
