"""The runs behind a fit: one twin per case and size, each made once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memsize.analysis.fit.case import Case
from memsize.analysis.fit.footprint import Footprint, Replays, pairs_of
from memsize.analysis.runner import Runner
from memsize.constants.known import known, remember
from memsize.device.config import AllocatorConfig
from memsize.errors import ForwardError
from memsize.internals.pytree import map_tensors
from memsize.model.inputs import ModelInputs, input_tensors
from memsize.records.trace import InputTensor, Trace
from memsize.spec.subject import Call
from memsize.spec.vary import Place, Vary
from memsize.tracing.run import Setup
from memsize.workloads.training import step_workload


class Trials:
    """The runs of one model by case and size. `count` is how many were made, refused ones too."""

    def __init__(
        self, name: str, model: nn.Module, feed: ModelInputs, training: bool, vary: Vary, say: Callable[[str], None]
    ) -> None:
        self.name = name
        self.model = model
        self.feed = feed
        self.training = training
        self.vary = vary
        self.say = say
        self.count = 0
        self.inputs: tuple[InputTensor, ...] = input_tensors(feed.call())
        self._places = vary.places(self.inputs)
        self._traces: dict[tuple[object, ...], Trace] = {}
        self._runs: dict[tuple[object, ...], Footprint] = {}
        self._refusals: dict[tuple[object, ...], ForwardError] = {}
        self._replays: dict[tuple[object, ...], Replays] = {}
        self._runners: dict[tuple[object, ...], Runner] = {}

    @property
    def resizable(self) -> bool:
        """Whether the size can be chosen: the batch of given inputs can't where they disagree on it."""
        return self.feed.resizable or not self.vary.batch

    @property
    def asked(self) -> int:
        """The size that the input was given with."""
        return self.feed.batch_size if self.vary.batch else self.vary.size(self.inputs)

    def run(self, case: Case, size: int) -> Footprint:
        """The run of a size; raises `ForwardError` where the model refuses it, `ScenarioError` where the case can't be.

        With a batch that is split, the size is that of the whole batch, and a run is that of its largest part.
        """
        key = (*case.key, size)
        if key in self._refusals:
            raise self._refusals[key]
        if key not in self._traces:
            self.count += 1
            self.say(f"{', '.join((case.scenario.name, *case.applied))}, {self.vary.text} {size:,}")
            try:
                self._traces[key] = self._trace(case, size)
            except ForwardError as error:
                self._refusals[key] = error
                raise
        if (*key, case.config) not in self._runs:
            self._runs[*key, case.config] = self._footprint(size, self._traces[key], case.config)
        return self._runs[*key, case.config]

    def _footprint(self, size: int, trace: Trace, config: AllocatorConfig) -> Footprint:
        """The run, with the replays of one that made the same events: float16 and bfloat16 often do."""
        pairs = pairs_of(trace)
        replays = self._replays.setdefault((pairs, config), Replays(pairs, config))
        return Footprint(size, trace, config, replays)

    def known(self, case: Case) -> dict[int, Footprint]:
        """The runs of a case that were made before, on this card or one like it."""
        sizes = [key[-1] for key in self._traces if key[:-1] == case.key]
        return {size: self.run(case, size) for size in sizes if isinstance(size, int)}

    def refused(self, case: Case) -> dict[int, str]:
        """The sizes that the model refused in such a case, and why. That is for their shapes: on every card alike."""
        found = (
            (key, str(error)) for key, error in self._refusals.items() if _cardless(key[:-1]) == _cardless(case.key)
        )
        return {key[-1]: reason for key, reason in found if isinstance(key[-1], int)}

    def traces(self) -> dict[tuple[str, int], Trace]:
        """Every run without remedies, by its scenario and its size."""
        plain = [(key, trace) for key, trace in self._traces.items() if key[3:5] == ((), 1)]
        return {(trace.scenario, key[-1]): trace for key, trace in plain if isinstance(key[-1], int)}

    def prepared(self, case: Case, size: int) -> Setup:
        """A fresh twin under a case, its edits made, with inputs of the size."""
        batch = size if self.vary.batch else self.feed.batch_size
        setup = self._runner(case).setup(case.scenario, -(-batch // case.split))
        if not self.vary.batch:
            setup = replace(setup, call=_resized(setup.call, self._places, size))
        for edit in case.edits:
            setup = edit(setup)
        return setup

    def _trace(self, case: Case, size: int) -> Trace:
        setup = self.prepared(case, size)
        # State is made in the first step: the second is like all that follow.
        training = case.training and replace(case.training, steps=2, accumulate=case.training.accumulate * case.split)
        return step_workload(training).run(setup)

    def _runner(self, case: Case) -> Runner:
        if case.card.kernels not in self._runners:
            runner = Runner(self.name, self.model, self.feed, self.training, gpu=case.card)
            self._runners[case.card.kernels] = runner
        return self._runners[case.card.kernels]


def _cardless(key: tuple[object, ...]) -> tuple[object, ...]:
    """The key of a case without its card."""
    return (key[0], *key[2:])


def _resized(call: Call, places: Iterable[Place], size: int) -> Call:
    """The call with another size in some of its inputs' dimensions."""
    dims: dict[str, list[int]] = {}
    for place in places:
        dims.setdefault(place.name, []).append(place.dim)
    args, kwargs = call

    def resized(name: str, value: Any) -> Any:
        return map_tensors(lambda tensor: _grown(tensor, dims[name], size), value) if name in dims else value

    return (
        tuple(resized(str(position), value) for position, value in enumerate(args)),
        {name: resized(name, value) for name, value in kwargs.items()},
    )


def _grown(tensor: torch.Tensor, dims: Iterable[int], size: int) -> torch.Tensor:
    """`tensor` with `dims` of another size; values that are known come again in turn."""
    shape, value = list(tensor.shape), known(tensor)
    for dim in dims:
        if value is not None:
            value = value.index_select(dim, torch.arange(size) % shape[dim])
        shape[dim] = size
    grown = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return grown if value is None else remember(grown, value)
