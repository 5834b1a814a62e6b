"""The evidence of a report's rules: the runs of one model, and the results of other tools. Numbers only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from memsize.records.aggregates import Totals, totals
from memsize.records.gpu import GpuEstimate
from memsize.records.trace import StoredTensor, ToolReport, Trace
from memsize.spec.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Crossover:
    """The batch size from which on one way of running keeps fewer bytes than another.

    `batch` is the smallest such batch: measured to keep less, with `batch - 1` measured to keep as much or more (unless
    `batch` is 1). None when there is none. `start` is the batch asked about, with what each keeps there; `per_sample`
    is what one more sample adds to each.
    """

    batch: int | None
    start: int
    first: int
    second: int
    first_per_sample: int
    second_per_sample: int


@dataclass(frozen=True)
class Evidence:
    """`as_given` is the run of the model as it is; `runs` the scenarios that apply, by name.

    `skipped_layers` maps each quantized scenario to the modules that it leaves alone, with the reasons; `base` is the
    format in which each of them stores the linear layers, if that was asked. `hidden` are those of `runs` that are
    compared with but not shown, and `adapters` the paths of adapters. `crossover` compares what fp32 (first) and
    `amp` (second) keep from one batch size to the next. `buckets` are the bytes of the gradient buckets of distributed
    training (None without it), and whether the gradients lie in them. `peaks` are those of training, `inference` those
    of one forward, by scenario, both on `gpu`; `untrained` says why a scenario has no training. Where the training is
    `spread` over several GPUs, its steps are not in `runs`.
    """

    as_given: Trace
    runs: Mapping[str, Trace] = field(default_factory=dict)
    skipped_layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    base: str = ""
    hidden: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    readings: tuple[ToolReport, ...] = ()
    crossover: Crossover | None = None
    peaks: Mapping[str, GpuEstimate] = field(default_factory=dict)
    inference: Mapping[str, GpuEstimate] = field(default_factory=dict)
    untrained: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    gpu_bytes: int = 0
    optimizer: str = ""
    amp: str | None = None
    buckets: tuple[int, bool] | None = None
    spread: Parallel | None = None

    def quantizing(self, scenario: str) -> str:
        """The base and `scenario`, or a quantized scenario by itself, in words."""
        return f"{self.base} under {scenario}" if self.base else scenario

    def totals(self, scenario: str) -> Totals | None:
        """The totals of a scenario, where it was run."""
        return totals(self.runs[scenario]) if scenario in self.runs else None

    @property
    def stored(self) -> Totals:
        """The totals of the model as it is."""
        return totals(self.as_given)

    @property
    def parameters(self) -> tuple[StoredTensor, ...]:
        """The registered parameters and packed weights of the model as it is."""
        return tuple(tensor for tensor in self.as_given.tensors if tensor.kind in ("parameter", "packed"))


def layers_of(tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    """The layers that tensors belong to, each once."""
    return tuple(dict.fromkeys(tensor.layer for tensor in tensors))


def bytes_of(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


# -- where autocast begins to pay ------------------------------------------------------------------------------------

_FARTHEST: Final = 2**24
"""The largest batch at which a crossover is looked for."""
_LOOKS: Final = 6
"""How many sizes are measured around a predicted one: each takes a run or two of the model."""


def find_crossover(measure: Callable[[int], tuple[int, int]], start: int) -> Crossover:
    """Find the smallest batch from which the second of `measure(batch)`'s figures is below the first.

    `measure` gives the bytes that both keep at a batch size; it is called a handful of times, once per batch size. A
    line says where to look; the batch there and the one before decide.
    """
    measure = cache(measure)
    (first, second), following = measure(start), measure(start + 1)
    first_per_sample, second_per_sample = following[0] - first, following[1] - second
    more, gain = second - first, first_per_sample - second_per_sample
    on_line = None
    if gain > 0:
        on_line = max(start + more // gain + 1, 1)
    elif gain == 0 and more < 0:
        on_line = 1

    @cache
    def holds(batch: int) -> bool:
        first, second = measure(batch) if batch else (0, 0)
        return second < first

    def near(batch: int) -> int | None:
        while holds.cache_info().misses < _LOOKS:
            if not holds(batch):
                batch += 1
            elif holds(batch - 1):
                batch -= 1
            else:
                return batch
        return None

    return Crossover(
        near(on_line) if on_line and on_line <= _FARTHEST else None,
        start=start,
        first=first,
        second=second,
        first_per_sample=first_per_sample,
        second_per_sample=second_per_sample,
    )
