"""The two sides of a comparison, and their differences: tensors, layers, figures, live storages at a peak, findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from memsize.analysis.matching import Node, Pair, local_name
from memsize.analysis.step import StepTrace
from memsize.checkpoints.checkpoint_report import CheckpointReport
from memsize.errors import InputError
from memsize.records.aggregates import COUNTED, split_phase, totals
from memsize.records.comparison import Change, FigureChange, FigureOf, How, LayerChange, LayerSizes, LivingChange
from memsize.records.finding import Finding
from memsize.records.gpu import GpuEstimate, LiveStorage
from memsize.records.program import ProgramRun
from memsize.records.report import FIGURES, Report
from memsize.records.roles import in_order
from memsize.records.trace import Layer, StoredTensor, Trace


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its run, what it is called (empty: as its model is), and what was found about it.

    `runs` are the runs and `peaks` the peaks of inference and training by scenario, where those are known. `file` has
    the size of a checkpoint's files and the bytes of its parts.
    """

    trace: Trace
    name: str = ""
    runs: tuple[tuple[str, Trace], ...] = ()
    peaks: tuple[tuple[str, FigureOf, GpuEstimate], ...] = ()
    findings: tuple[Finding, ...] = ()
    gpu: str = ""
    optimizer: str = ""
    notes: tuple[str, ...] = ()
    file: Mapping[str, int] | None = None

    @classmethod
    def of(cls, answer: Any, name: str = "") -> Side:
        """The side that an answer is; raises `InputError` for one that is about no single model."""
        match answer:
            case Trace():
                return cls(answer, name)
            case Report():
                peaks: list[tuple[str, FigureOf, GpuEstimate]] = []
                for result in answer.scenario_results:
                    peaks += [(result.name, "inference peak", result.inference)] if result.inference else []
                    peaks += [(result.name, "training peak", result.training)] if result.training else []
                return cls(
                    trace=answer.trace,
                    name=name,
                    runs=tuple((result.name, result.trace) for result in answer.scenario_results if result.trace),
                    peaks=tuple(peaks),
                    findings=answer.findings,
                    gpu=answer.gpu,
                    optimizer=answer.optimizer,
                    notes=(*answer.assumptions, *answer.remarks),
                )
            case StepTrace(trace, gpu):
                return cls(trace, name, peaks=((trace.scenario, _peak_of(trace), answer.peak),), gpu=gpu)
            case ProgramRun(trace=trace, peak=peak, findings=findings, card=card):
                of_run = ((trace.scenario, _peak_of(trace), peak),)
                return cls(trace, name, peaks=of_run, findings=findings, gpu=card.name)
            case CheckpointReport():
                parts: dict[str, int] = {part.kind: part.bytes for part in answer.breakdown.parts}
                return cls(_as_trace(answer), name, findings=answer.findings, file={"size": answer.size, **parts})
        kind = getattr(answer, "kind", type(answer).__name__)
        raise InputError(
            f"a {kind} cannot be compared: give models, reports, steps, saved runs of these, or checkpoints"
        )


def _peak_of(trace: Trace) -> FigureOf:
    return "training peak" if any(split_phase(phase)[0] == "backward" for phase in trace.phases) else "inference peak"


def _as_trace(report: CheckpointReport) -> Trace:
    """The tensors of a file as those of a model, with a layer for each key. A file does not tell which are buffers."""
    weights = {id(tensor) for tensor in report.breakdown.of("model")}
    tensors = tuple(
        StoredTensor(
            name=tensor.name,
            kind="parameter" if (id(tensor) in weights) else "attribute",
            layer=tensor.name.rpartition(".")[0],
            spec=tensor.spec,
            elements=tensor.elements,
            bytes=tensor.bytes,
            reported_bytes=tensor.bytes,
            trainable=bool(tensor.trainable),
            tied_to=tensor.shared_with,
            wrapper=tensor.wrapper,
        )
        for tensor in report.contents.tensors
    )
    paths: dict[str, None] = {"": None}
    for tensor in tensors:
        steps = tensor.layer.split(".") if tensor.layer else []
        paths |= dict.fromkeys(".".join(steps[: depth + 1]) for depth in range(len(steps)))
    above = {path.rpartition(".")[0] for path in paths if path}
    no_figures = (0,) * 7
    layers = (
        Layer(path, "", path.count(".") + 1 if path else 0, path not in above, 0, (), *no_figures) for path in paths
    )
    return Trace(
        model=report.contents.path,
        scenario="as saved",
        training=False,
        batch_size=None,
        torch="",
        inputs=(),
        layers=tuple(layers),
        tensors=tensors,
    )


def paired_tensors(before: Trace, after: Trace, layers: Iterable[Pair]) -> tuple[Change, ...]:
    """Every tensor of both models once: those of layers that are the same by their names there, others by their own."""
    unpaired = {tensor.name: tensor for tensor in after.tensors}
    renamed: dict[str, str] = {}
    for old, new in layers:
        if old and new:
            names = {local_name(tensor): tensor.name for tensor in new.tensors}
            locals_ = {tensor.name: local_name(tensor) for tensor in old.tensors}
            renamed |= {name: names[local] for name, local in locals_.items() if local in names}
    moved = set(renamed.values())
    pairs = []
    for tensor in before.tensors:
        name = renamed.get(tensor.name) or (tensor.name if tensor.name not in moved else None)
        other = unpaired.pop(name, None) if name else None
        pairs.append(Change(other.name if other else tensor.name, tensor, other))
    return (*pairs, *(Change(name, None, tensor) for name, tensor in unpaired.items()))


def layer_changes(layers: Sequence[Pair]) -> tuple[LayerChange, ...]:
    """The layers that changed, in the order of the second model. What is below a layer that was added, removed or
    renamed as a whole is counted with it, so that the rows and the layers that did not change add up to the model.
    """
    parents = {child: node for pair in layers for node in pair if node for child in node.children}
    partners = {old: new for old, new in layers if old and new}
    groups: dict[Pair, list[Pair]] = {}
    heads: dict[Node | None, tuple[Pair, tuple[How, ...]]] = {}
    for pair in layers:
        how = tuple(_how(pair, parents, partners))
        node = pair.after or pair.before
        head, whole = heads.get(parents.get(node) if node else None, (pair, ()))
        follows = not how if "renamed" in whole else how == whole != ()
        if how or follows:
            heads[node] = head, how = (head, whole) if follows else (pair, how)
            groups.setdefault(head, []).append(pair)
    changes: list[LayerChange] = []
    for head, members in groups.items():
        old, new = head
        change = LayerChange(
            before=old.layer.path if old else None,
            after=new.layer.path if new else None,
            types=(old.layer.type if old else None, new.layer.type if new else None),
            how=heads[new or old][1],
            sizes=(_sizes(pair.before for pair in members), _sizes(pair.after for pair in members)),
            layers=len(members),
        )
        changes.append(change)
    return tuple(changes)


def _how(pair: Pair, parents: Mapping[Node, Node], partners: Mapping[Node, Node]) -> Iterator[How]:
    old, new = pair.before, pair.after
    if old is None or new is None:
        yield "added" if old is None else "removed"
        return
    above = parents.get(old)
    if old.name != new.name or (above and partners.get(above)) != parents.get(new):
        yield "renamed"
    shapes, stored = ([_stored(node, exact) for node in (old, new)] for exact in (False, True))
    if shapes[0] != shapes[1]:
        yield "resized"
    if old.layer.type != new.layer.type and old.layer.type and new.layer.type:
        yield "replaced"
    elif stored[0] != stored[1] and shapes[0] == shapes[1]:
        yield "stored differently"
    elif stored[0] == stored[1] and _sizes([old])[2:] != _sizes([new])[2:]:
        yield "output shape changed"


def _stored(node: Node, exact: bool) -> set[object]:
    return {
        (local_name(tensor), tensor.spec.shape, *((tensor.spec.dtype, tensor.bytes, tensor.parts) if exact else ()))
        for tensor in node.tensors
    }


def _sizes(nodes: Iterable[Node | None]) -> LayerSizes:
    present = [node for node in nodes if node]
    tensors = [tensor for node in present for tensor in node.tensors]
    return LayerSizes(
        sum(tensor.elements for tensor in tensors if tensor.kind in COUNTED and not tensor.tied_to),
        stored=sum(tensor.bytes for tensor in tensors if tensor.kind != "master"),
        outputs=sum(node.layer.output_bytes for node in present),
        kept=sum(node.layer.saved_bytes for node in present),
    )


_OF_STORED: Final = ("parameter_bytes", "buffer_bytes", "attribute_bytes")
_OF_PEAKS: Final = ("requested", "allocated", "reserved")
_Place = tuple[str, FigureOf]


def figure_changes(before: Side, after: Side) -> tuple[FigureChange, ...]:
    """Every figure of every scenario of either side, and what is alive at each peak by role.

    Where each side has one scenario, these are compared, whatever they are called.
    """
    figures = [dict(_figures(side)) for side in (before, after)]
    names = [list(dict.fromkeys(scenario for scenario, _ in side)) for side in figures]
    if [len(side) for side in names] == [1, 1] and names[0] != names[1]:
        both = f"{names[0][0]} → {names[1][0]}"
        figures = [{(both, of): of_run for (_, of), of_run in side.items()} for side in figures]
    keys = list(dict.fromkeys(key for side in figures for key in side))
    order = {scenario: number for number, scenario in enumerate(dict.fromkeys(scenario for scenario, _ in keys))}
    changes: list[FigureChange] = []
    for key in sorted(keys, key=lambda key: order[key[0]]):
        for name in dict.fromkeys(name for side in figures for name in side.get(key, ())):
            # A role that is alive at one peak alone has 0 bytes at the other.
            absent = None if name in FIGURES else 0
            first, second = (side[key].get(name, absent) if key in side else None for side in figures)
            changes.append(FigureChange(*key, name, first, second))
    return tuple(changes)


def _figures(side: Side) -> Iterator[tuple[_Place, Mapping[str, int]]]:
    if side.file is not None:
        yield (side.trace.scenario, "file"), side.file
        return
    for scenario, trace in side.runs or ((side.trace.scenario, side.trace),):
        sums = totals(trace)
        yield (scenario, "run"), {name: getattr(sums, name) for name in (FIGURES if trace.ran else _OF_STORED)}
    for scenario, of, peak in side.peaks:
        sizes = {name: getattr(peak, name) for name in _OF_PEAKS} | {"device": peak.device.high}
        yield (scenario, of), sizes | {role: peak.roles[role] for role in in_order(peak.roles)}


def living_changes(before: Side, after: Side, layers: Iterable[Pair]) -> tuple[str, tuple[LivingChange, ...]]:
    """The first peak that both sides have, of training where there is one, and which of its largest storages changed.

    Of a storage that only one of them lists, the other has none like it, or one that is smaller than all that it lists.
    """
    shared = [
        (of, scenario, peak, other)
        for scenario, of, peak in before.peaks
        for name, kind, other in after.peaks
        if (scenario, of) == (name, kind) or len(before.peaks) == len(after.peaks) == 1
    ]
    if not shared:
        return "", ()
    of, scenario, *peaks = max(shared, key=lambda peaks: peaks[0] == "training peak")
    now = {old.layer.path: new.layer.path for old, new in layers if old and new}
    least = [min((living.bytes for living in peak.storages), default=0) for peak in peaks]
    groups: dict[tuple[object, ...], tuple[list[LiveStorage], list[LiveStorage]]] = defaultdict(lambda: ([], []))
    for side, peak in enumerate(peaks):
        for living in peak.storages:
            path = now.get(living.layer, living.layer) if side == 0 and living.layer is not None else living.layer
            groups[living.role, path, living.op, split_phase(living.phase)[0]][side].append(living)
    changes: list[LivingChange] = []
    for first, second in (pair for sides in groups.values() for pair in zip_longest(*sides)):
        if first is None or second is None:
            is_listed = (first or second).bytes > least[first is not None]
        else:
            is_listed = first.bytes != second.bytes
        changes += [LivingChange(first, second)] if is_listed else []
    return f"{of} of {scenario}", tuple(changes)


def new_findings(
    before: Iterable[Finding], after: Iterable[Finding], layers: Iterable[Pair]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """The findings about the second side alone, and about the first alone: their code is new, or a layer they name."""
    now = {old.layer.path: new.layer.path for old, new in layers if old and new}
    first, second = tuple(before), tuple(after)
    was = {key for finding in first for key in _keys(finding, now)}
    is_now = {key for finding in second for key in _keys(finding, {})}
    return (
        tuple(finding for finding in second if not _keys(finding, {}) <= was),
        tuple(finding for finding in first if not _keys(finding, now) <= is_now),
    )


def _keys(finding: Finding, now: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(finding.code, now.get(layer, layer)) for layer in finding.layers or ("",)}
