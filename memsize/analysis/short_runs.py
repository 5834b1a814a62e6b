"""Runs of a deep model, extended from those of two models with fewer of its repeated blocks.

Whether that holds for a model is found out by running it: a forward of the whole model has to be the one that the short
models' forwards extend to. So a model that does something of its own in one of its layers is run whole, and so is a
workload whose short runs do not differ by repetition alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Final

from torch import nn

from memsize.depth.blocks import ModelBlocks, find_blocks, shorten
from memsize.depth.extension_plan import ExtensionPlan
from memsize.depth.repeated import FoldedPath, RepeatedBlocks
from memsize.depth.trace_extension import NotRepeatedError, plan_extension
from memsize.errors import MemsizeError
from memsize.records.trace import Trace
from memsize.workloads import Proof, Record

_LENGTHS: Final = (3, 4)
"""The periods of blocks in the shorter one of two models, in the order in which they are tried."""
_MOST_PLANS: Final = 8
_WORTHWHILE: Final = 3
"""How many periods fewer than the whole model the two short ones have together, at the least."""

_EXTENDED: Final = (
    "{:,} repeated layers in {}: a few of them were run, and the rest follows by repetition (--whole runs all)"
)

RunShort = Callable[[nn.Module], Trace]
"""Makes the run of a short model."""


class ShortRuns:
    """The repeated blocks of one model, whose meta copies `copy` makes, and its short models."""

    def __init__(self, model: nn.Module, copy: Callable[[], nn.Module]) -> None:
        self._model = model
        self._copy = copy
        self._short: dict[int, nn.Module] = {}
        self._plans = {length: deque[ExtensionPlan](maxlen=_MOST_PLANS) for length in _LENGTHS}
        self._lengths_of: dict[Hashable, tuple[int, ...]] = {}
        self.refusals: dict[Hashable, str] = {}
        """For each kind of proof that was tried: why it failed, or an empty text."""

    @cached_property
    def blocks(self) -> ModelBlocks | None:
        """The blocks that repeat; None where the whole model is run sooner than two short ones."""
        blocks = find_blocks(self._model)
        return blocks if blocks is not None and blocks.repeated.count >= 2 * _LENGTHS[0] + 1 + _WORTHWHILE else None

    def extended(self, run: RunShort, kind: Hashable, record: Record | None = None) -> Trace | None:
        """Return the run of the whole model, from those that `run` makes of short ones; None where they don't tell.

        Runs of one `kind` are taken to need equally long models. The `record` of two runs is extended as well.
        """
        if self.blocks is None:
            return None
        repeated, runs = self.blocks.repeated, dict[int, Trace]()
        try:
            for length in self._lengths_of.get(kind, _LENGTHS):
                if length not in runs:
                    runs[length] = run(self._model_with(length))
                plan = next((plan for plan in self._plans[length] if plan.fits(runs[length])), None)
                if plan is None or record:
                    runs[length + 1] = run(self._model_with(length + 1))
                    plan = self._plan(runs[length], runs[length + 1], repeated.with_count(length))
                if plan is not None and (record is None or record.extend(repeated.count - length)):
                    self._lengths_of[kind] = (length,)
                    return replace(plan.applied(runs[length]), extended_from=(length, length + 1))
        except (MemsizeError, NotRepeatedError):  # the whole model says why it fails
            return None
        self._lengths_of[kind] = ()
        return None

    def _plan(self, shorter: Trace, longer: Trace, blocks: RepeatedBlocks) -> ExtensionPlan | None:
        assert self.blocks is not None
        try:
            plan = plan_extension(shorter, longer, blocks, self.blocks.repeated.count)
        except NotRepeatedError:
            return None
        self._plans[blocks.count].append(plan)
        return plan

    @property
    def two(self) -> tuple[nn.Module, nn.Module]:
        """Two short models, the second of which has a period of blocks more."""
        return self._model_with(_LENGTHS[-1]), self._model_with(_LENGTHS[-1] + 1)

    @property
    def left_out(self) -> int:
        """How many periods of blocks the first of `two` lacks."""
        assert self.blocks is not None
        return self.blocks.repeated.count - _LENGTHS[-1]

    def prove(self, proof: Proof, whole: Trace, run: RunShort) -> None:
        """Find whether `whole`, the run of a proof, is what the runs of short models extend to."""
        extended = self.extended(run, proof)
        if extended is None:
            self.refusals[proof.kind] = "the runs of short models differ by more than repetition"
        else:
            part = different_part(whole, extended)
            self.refusals[proof.kind] = f"{part} of the whole model are not those of its short models" if part else ""

    @property
    def note(self) -> str:
        """A note on a run that is extended, the same for all of them."""
        assert self.blocks is not None
        repeated, path = self.blocks.repeated, self.blocks.path or "the model"
        return _EXTENDED.format(repeated.period * repeated.count, path)

    def folded(self, model: nn.Module, layers: Mapping[str, str]) -> dict[FoldedPath, str]:
        """Return what is said of `layers` of one of the short models, by paths that hold for any number of blocks."""
        assert self.blocks is not None
        repeated = next(
            self.blocks.repeated.with_count(count) for count, short in self._short.items() if short is model
        )
        return {repeated.fold(path)[0]: text for path, text in layers.items()}

    def unfolded(self, trace: Trace, layers: Mapping[FoldedPath, str]) -> dict[str, str]:
        """Return what is said of `layers`, by the paths of the whole model, whose run is `trace`."""
        assert self.blocks is not None
        paths = ((layer.path, self.blocks.repeated.fold(layer.path)[0]) for layer in trace.layers)
        return {path: layers[folded] for path, folded in paths if folded in layers}

    def _model_with(self, count: int) -> nn.Module:
        if count not in self._short:
            assert self.blocks is not None
            self._short[count] = self._copy()
            shorten(self._short[count], self.blocks, count)
        return self._short[count]


def different_part(a: Trace, b: Trace) -> str:
    """Return the name of a part in which two runs differ, apart from how they were made; empty where there is none."""
    parts = (part.name for part in fields(Trace) if part.name != "extended_from")
    return next((name for name in parts if not _equal(getattr(a, name), getattr(b, name))), "")


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b or b == a)
