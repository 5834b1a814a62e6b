"""Runs of a deep model, extended from those of two models with fewer of its repeated blocks.

Whether the model is one of which that holds is found out by running it: its first forward is run whole, and has to be
the one that the short models' forwards extend to. So a model that does something of its own in one of its layers is run
whole ever after, and so is each workload whose short runs do not differ by repetition alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from typing import Any, Final

from torch import nn

from memsize.depth.blocks import FoundBlocks, find_blocks, shorten
from memsize.depth.repeated import FoldedPath
from memsize.depth.trace_extension import NotRepeated, extended_trace
from memsize.errors import MemsizeError
from memsize.records.trace import Trace

_LENGTHS: Final = (3, 4)
"""The periods of blocks in the shorter one of two models, in the order in which they are tried."""
_WORTHWHILE: Final = 3
"""How many periods fewer than the whole model the two short ones have together, at the least."""

RunShort = Callable[[nn.Module], Trace]
"""Makes the run of a short model."""


class ShortRuns:
    """The repeated blocks of one model, whose meta copies `copy` makes, and its short models."""

    def __init__(self, model: nn.Module, copy: Callable[[], nn.Module]) -> None:
        self._copy = copy
        self._models: dict[int, nn.Module] = {}
        self.found: FoundBlocks | None = find_blocks(model)
        self.verified = False
        """Whether a forward of the whole model has shown that it is an extension."""
        self._lengths_of: dict[Hashable, tuple[int, ...]] = {}
        self.refusal = ""
        """Why the model is run whole."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to try; none where the whole model is run sooner, or has to be run."""
        if self.found is None or self.refusal:
            return ()
        count = self.found.blocks.count
        return tuple(length for length in _LENGTHS if 2 * length + 1 + _WORTHWHILE <= count)

    def extended(self, run: RunShort, kind: Hashable) -> Trace | None:
        """Return the run of the whole model, from those that `run` makes of short ones; None where they don't tell.

        Runs of one `kind` are taken to need equally long models.
        """
        runs: dict[int, Trace] = {}
        try:
            for length in self._lengths_of.get(kind, self.lengths):
                for count in (length, length + 1):
                    if count not in runs:
                        runs[count] = run(self._model(count))
                try:
                    trace = self._extended(runs[length], runs[length + 1], length)
                except NotRepeated:
                    continue
                self._lengths_of[kind] = tuple(longer for longer in self.lengths if longer >= length)
                return trace
        except MemsizeError:  # the whole model says why
            return None
        self._lengths_of[kind] = ()
        return None

    def folded(self, model: nn.Module, layers: Mapping[str, str]) -> dict[FoldedPath, str]:
        """Return what is said of `layers` of one of the short models, by paths that hold for any number of blocks."""
        assert self.found is not None
        blocks = next(self.found.blocks.with_count(count) for count, short in self._models.items() if short is model)
        return {blocks.fold(path)[0]: text for path, text in layers.items()}

    def unfolded(self, trace: Trace, layers: Mapping[FoldedPath, str]) -> dict[str, str]:
        """Return what is said of `layers`, by the paths of the whole model, whose run is `trace`."""
        assert self.found is not None
        paths = ((layer.path, self.found.blocks.fold(layer.path)[0]) for layer in trace.layers)
        return {path: layers[folded] for path, folded in paths if folded in layers}

    def verify(self, whole: Trace, run: RunShort) -> None:
        """Find whether `whole`, a forward, is what the forwards of short models extend to."""
        extended = self.extended(run, "forward")
        if extended is not None and (different := _different(whole, extended)):
            self.refusal = f"{different} of a forward are not what repetition makes them"
        elif extended is None:
            self.refusal = "its forward does not repeat"
        self.verified = not self.refusal

    def _extended(self, shorter: Trace, longer: Trace, length: int) -> Trace:
        assert self.found is not None
        blocks = self.found.blocks
        return extended_trace(shorter, longer, blocks.with_count(length), blocks.count)

    def _model(self, count: int) -> nn.Module:
        if count not in self._models:
            assert self.found is not None
            self._models[count] = self._copy()
            shorten(self._models[count], self.found, count)
        return self._models[count]


def _different(a: Trace, b: Trace) -> str:
    """Return the name of a part in which two runs differ."""
    return next((part.name for part in fields(a) if not _equal(getattr(a, part.name), getattr(b, part.name))), "")


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b or b == a)
