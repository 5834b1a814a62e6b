"""Runs of a deep model, extended from those of models with fewer of its repeated blocks.

Whether that holds for a model is found out by running it: a forward of the whole model has to be the one that the short
models' forwards extend to. So a model that does something of its own in one of its layers is run whole, and so is a
workload whose short runs do not differ by repetition alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from typing import Final, NamedTuple

import numpy as np
from torch import nn

from memsize.depth.alignment import origins
from memsize.depth.blocks import SHORTEST, FoldedPath, ModelBlocks, find_blocks, one_more, shorten, superfluous
from memsize.depth.extension_plan import ExtensionPlan, structure_of
from memsize.depth.trace_extension import NotRepeatedError, plan_extension
from memsize.errors import MemsizeError
from memsize.records.finding import join_names
from memsize.records.trace import UNUSED, HostUse, Trace
from memsize.workloads import Record

_LENGTHS: Final = (SHORTEST, SHORTEST + 1, SHORTEST + 2)
"""The periods of blocks in the shortest model, in the order in which they are tried."""
_MOST_PLANS: Final = 8
_WORTHWHILE: Final = 0.8
"""The part of the time of runs of the whole model that short ones may take."""
_LATER: Final = 0.6
"""The same where the first run was whole: runs of other steps, as under autocast, need a plan of their own."""
_PLAN: Final = 1.4
"""By how much the first short runs take longer than those that follow: what they extend to is planned."""
_PROOF: Final = 0.3
"""The part of the time of training steps that a forward takes: 0.26 of a GPT-2's, 0.28 of a ViT's."""

_EXTENDED: Final = "{}: a few were run, the others follow by repetition (--whole runs all)"
_REFUSED: Final = "{}: all were run, as they do not follow from a few ({})"

RunShort = Callable[[nn.Module], Trace]
"""Makes the run of a short model."""
Counts = tuple[int, ...]
"""The periods of blocks in a model, by group of stacks."""
Recorded = tuple[tuple[Hashable, ...], ...]
"""The steps of a record."""


class _Plan(NamedTuple):
    """How runs of the whole model come from those of a short one: the plan of their traces, and for each step of their
    records the positions in the short one's. `pattern` tells which values of that are equal.
    """

    of_trace: ExtensionPlan
    pattern: Recorded
    of_record: list[list[int]]


class _ShortRun(NamedTuple):
    trace: Trace
    recorded: Recorded

    @property
    def pattern(self) -> Recorded:
        """For each value of each step the position of the first that is equal."""
        return tuple(tuple(map(step.index, step)) for step in self.recorded)


class ShortRuns:
    """The repeated blocks of one model, and its short models. `copy` makes meta copies of it without some modules."""

    def __init__(self, model: nn.Module, copy: Callable[[Iterable[nn.Module]], nn.Module]) -> None:
        self._model = model
        self._copy = copy
        self._short: dict[Counts, nn.Module] = {}
        self._plans = {length: deque[_Plan](maxlen=_MOST_PLANS) for length in _LENGTHS}
        self._lengths: tuple[int, ...] = _LENGTHS
        """The lengths, beginning with one that was long enough."""
        self._refused: dict[Hashable, str] = {}
        """The kinds of which runs don't extend, and why."""
        self.whole_runs: Counter[Hashable] = Counter()
        """How many runs of the whole model were made where short ones might have been, by the kind of their proof."""
        self.refusals: dict[Hashable, str] = {}
        """For each kind of proof that was tried: why it failed, or an empty text."""

    @cached_property
    def blocks(self) -> ModelBlocks | None:
        """The blocks that repeat; None where nothing repeats often enough."""
        return find_blocks(self._model)

    def are_worthwhile(self, kind: Hashable, has_proof: bool) -> bool:
        """Whether short runs take less time than those of the whole model, if as many follow as were made."""
        if self.blocks is None:
            return False
        whole, first, later = self.blocks.whole, _PLAN * self.blocks.first_runs, self.blocks.shortest
        runs = self.whole_runs[kind] + 1
        if has_proof:  # it is made of short models once more, to compare the two
            return first + runs * later <= _LATER * whole * runs
        return _PROOF * (whole + first) + first + (runs - 1) * later <= _WORTHWHILE * whole * runs

    def extended(self, run: RunShort, kind: Hashable, record: Record | None = None) -> Trace | None:
        """Return the run of the whole model, from those that `run` makes of short ones; None where they don't tell.

        If a run of one `kind` does not extend, no other is tried. The `record` of the runs is extended as well.
        """
        if self.blocks is None or kind in self._refused:
            return None

        @cache
        def traced(counts: Counts) -> _ShortRun:
            trace = run(self.model_with(counts))
            return _ShortRun(trace, tuple(record.steps) if record else ())

        whole = self.blocks.repetition.counts
        try:
            for length in (length for length in self._lengths if length < min(whole)):
                shorter = traced((length,) * len(whole))
                structure = structure_of(shorter.trace) if self._plans[length] else None
                plans = (plan for plan in self._plans[length] if plan.of_trace.fits(structure))
                plan = next((plan for plan in plans if plan.pattern == shorter.pattern), None)
                try:
                    plan = plan or self._plan(traced, length)
                except NotRepeatedError as error:
                    self._refused[kind] = str(error)
                    continue
                self._refused.pop(kind, None)
                self._lengths = (length, *(other for other in _LENGTHS if other != length))
                host = self._host(traced, length) if shorter.trace.host != UNUSED else UNUSED
                if record is not None:
                    steps = zip(shorter.recorded, plan.of_record, strict=True)
                    record.steps = [tuple(step[position] for position in positions) for step, positions in steps]
                return replace(plan.of_trace.applied(shorter.trace), extended_from=(length, length + 1), host=host)
        except NotRepeatedError as error:  # the short model itself, whatever its length
            self._refused[kind] = str(error)
            return None
        except MemsizeError:  # the whole model says why it fails
            return None
        self._refused.setdefault(kind, "the model is too short")
        return None

    def _plan(self, traced: Callable[[Counts], _ShortRun], length: int) -> _Plan:
        """Return how the run of the whole model comes from short ones. Raises `NotRepeatedError` if they don't tell."""
        assert self.blocks is not None
        repetition = self.blocks.repetition
        counts = (length,) * len(repetition.groups)
        shorter, longer = traced(counts), [traced(one_more(counts, group)) for group in range(len(counts))]
        traces = shorter.trace, [run.trace for run in longer]
        extend = partial(plan_extension, *traces, repetition.with_counts(counts))
        plan = extend(repetition.counts)
        if plan.has_grown and length + 2 <= min(repetition.counts):
            # Two sizes don't show that they grow by the same with each block, nor with each of two kinds.
            further = tuple(count + 2 for count in counts)
            if different_part(extend(further).applied(shorter.trace), traced(further).trace):
                raise NotRepeatedError("sizes don't grow by the same with each block")
        more = [count - length for count in repetition.counts]
        recorded = zip(shorter.recorded, *(run.recorded for run in longer), strict=True)
        of_record = [origins(first, others, more) for first, *others in recorded]
        aligned = [positions for positions in of_record if positions is not None]
        if len(aligned) < len(of_record):
            raise NotRepeatedError("the caches of the short runs do not align")
        self._plans[length].append(_Plan(plan, shorter.pattern, aligned))
        return self._plans[length][-1]

    def _host(self, traced: Callable[[Counts], _ShortRun], length: int) -> HostUse:
        """Return the host memory of the whole model, which grows by the same with each period."""
        assert self.blocks is not None
        whole = self.blocks.repetition.counts
        counts = (length,) * len(whole)
        use = np.array(traced(counts).trace.host)
        more = (np.array(traced(one_more(counts, group)).trace.host) - use for group in range(len(whole)))
        return HostUse(
            *(use + sum(grown * (count - length) for grown, count in zip(more, whole, strict=True))).tolist()
        )

    def affine(self, figure: Callable[[nn.Module], int]) -> int:
        """Return a figure of the whole model from those of short ones: it grows by the same with each period."""
        assert self.blocks is not None
        whole = self.blocks.repetition.counts
        shortest = tuple(min(_LENGTHS[-1], count - 1) for count in whole)
        least = figure(self.model_with(shortest))
        longer = (figure(self.model_with(one_more(shortest, group))) for group in range(len(whole)))
        return least + sum(
            (more - least) * (count - less) for more, count, less in zip(longer, whole, shortest, strict=True)
        )

    def refusal(self, whole: Trace, run: RunShort, kind: Hashable) -> str:
        """Say why `whole`, a run of the whole model, is not what the runs of short ones extend to; empty if it is."""
        extended = self.extended(run, kind)
        if extended is None:
            return self._refused.get(kind, "the short models fail")
        part = different_part(whole, extended)
        return f"{part} of the whole model are not those of its short models" if part else ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why runs of the whole model were not extended from short ones."""
        if self.blocks is None:
            return ("nothing repeats",)
        refused = tuple(dict.fromkeys(filter(None, (*self.refusals.values(), *self._refused.values()))))
        return refused or ("too few layers repeat",)

    @property
    def note(self) -> str:
        """A note on a run that is extended, the same for all of them."""
        return _EXTENDED.format(self._repeated)

    def refusal_notes(self, proof: Hashable, kind: Hashable) -> tuple[str, ...]:
        """Notes on a run of one `kind` that is not extended, with the reason; none where that was not tried."""
        reason = self.refusals.get(proof) or self._refused.get(kind)
        return (_REFUSED.format(self._repeated, reason),) if reason and self.blocks else ()

    @property
    def _repeated(self) -> str:
        assert self.blocks is not None
        layers = sum(stack.repeated.period * stack.repeated.count for stack in self.blocks.stacks)
        paths = tuple(stack.path or "the model" for stack in self.blocks.stacks)
        return f"{layers:,} repeated layers in {join_names(paths)}"

    def folded(self, model: nn.Module, layers: Mapping[str, str]) -> dict[FoldedPath, str]:
        """Return what is said of `layers` of one of the short models, by paths that hold for any number of blocks."""
        assert self.blocks is not None
        counts = next(counts for counts, short in self._short.items() if short is model)
        repetition = self.blocks.repetition.with_counts(counts)
        return {repetition.fold(path)[0]: text for path, text in layers.items()}

    def unfolded(self, trace: Trace, layers: Mapping[FoldedPath, str]) -> dict[str, str]:
        """Return what is said of `layers`, by the paths of the whole model, whose run is `trace`."""
        assert self.blocks is not None
        paths = ((layer.path, self.blocks.repetition.fold(layer.path)[0]) for layer in trace.layers)
        return {path: layers[folded] for path, folded in paths if folded in layers}

    def shortest(self, trace: Trace) -> nn.Module:
        """Return the shortest of the models whose runs `trace` extends."""
        assert self.blocks is not None
        return self.model_with(trace.extended_from[:1] * len(self.blocks.groups))

    def refuse(self, kind: Hashable, reason: str) -> None:
        """Extend no more runs of one `kind`."""
        self._refused[kind] = reason

    def model_with(self, counts: Counts) -> nn.Module:
        """Return the model with as many periods of each group of blocks."""
        if counts not in self._short:
            assert self.blocks is not None
            self._short[counts] = self._copy(superfluous(self._model, self.blocks, counts))
            shorten(self._short[counts], self.blocks, counts)
        return self._short[counts]


def different_part(a: Trace, b: Trace) -> str:
    """Return the name of a part in which two runs differ, apart from how they were made; empty where there is none."""
    for part in fields(Trace):
        one, other = getattr(a, part.name), getattr(b, part.name)
        if part.name != "extended_from" and not (one == other or other == one):
            return part.name
    return ""
