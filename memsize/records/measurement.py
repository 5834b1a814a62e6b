"""Measurements of one real run on a GPU, with its log of allocations and frees.

Sizes are bytes. A figure that could not be read is None, and a run that ran out of memory says so in `error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Literal, NamedTuple


class OpLocation(NamedTuple):
    """Where something happens: the phase of the step, the layer (None: outside the model), the operation."""

    phase: str
    layer: str | None
    op: str


NO_LOCATION = OpLocation("", None, "")
"""The place of what nobody noted."""


class LogEntry(NamedTuple):
    """`delta` bytes of `storage` appear (> 0) or disappear (< 0). `place` indexes the places of its log.

    A storage below 0 was there before the log begins.
    """

    storage: int
    delta: int
    place: int


@dataclass(frozen=True, slots=True)
class AllocationLog:
    """Allocations and frees in order. Locations have a table of their own, because they repeat often."""

    places: tuple[OpLocation, ...]
    entries: tuple[LogEntry, ...]


class Allocation(NamedTuple):
    """One allocation: its bytes, its place, how many allocations the log had when it was freed (None: it was not), and
    whether it is alive when most bytes are."""

    bytes: int
    place: OpLocation
    freed: int | None
    at_peak: bool


def log_of(events: Iterable[tuple[int, int, OpLocation]]) -> AllocationLog:
    """The log of ``(storage, delta, place)``."""
    places: dict[OpLocation, int] = {}
    entries = tuple(LogEntry(storage, delta, places.setdefault(place, len(places))) for storage, delta, place in events)
    return AllocationLog(tuple(places), entries)


def allocations(log: AllocationLog) -> tuple[Allocation, ...]:
    """The allocations of a log in order, each with its end.

    Growing in place is one more allocation; shrinking ends all that a storage has.
    """
    live = [*accumulate(entry.delta for entry in log.entries)]
    summit = live.index(max(live)) if max(live, default=0) > 0 else -1
    begun: list[LogEntry] = []
    open_allocations: dict[int, list[int]] = {}
    freed: dict[int, int] = {}
    alive: set[int] = set()
    for position, entry in enumerate(log.entries):
        if entry.delta > 0:
            open_allocations.setdefault(entry.storage, []).append(len(begun))
            begun.append(entry)
        else:
            freed |= dict.fromkeys(open_allocations.pop(entry.storage, ()), len(begun))
        if position == summit:
            alive = {index for indices in open_allocations.values() for index in indices}
    return tuple(
        Allocation(entry.delta, log.places[entry.place], freed.get(index), index in alive)
        for index, entry in enumerate(begun)
    )


@dataclass(frozen=True, slots=True)
class MeasuredWorkload:
    """The measured workload: model, inputs, scenario, and the training (`optimizer` None: no training).

    `steps` counts the steps up to and including the measured one; `seed` seeds every generator before the first step.
    """

    model: str
    inputs: tuple[str, ...]
    batch_size: int
    scenario: str
    optimizer: str | None = None
    loss: str | None = None
    training: bool = True
    steps: int = 3
    accumulate: int = 1
    ema: bool = False
    seed: int = 0
    benchmark: bool = False
    """`torch.backends.cudnn.benchmark`."""


@dataclass(frozen=True, slots=True)
class SoftwareStack:
    """The GPU and the software that a run was measured on. `total` is what `mem_get_info` calls so.

    `cudnn` is as cuDNN counts (91501 is 9.15.1); `allocator`, `cublas_config` and `module_loading` are the settings of
    the process's environment that change memory.
    """

    gpu: str
    capability: tuple[int, int]
    total: int
    torch: str
    python: str
    driver: str | None = None
    cuda: str | None = None
    cudnn: int | None = None
    cublas: str | None = None
    allocator: str = ""
    cublas_config: str | None = None
    module_loading: str | None = None


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest requested, allocated and reserved bytes of the caching allocator, each at its own moment."""

    requested: int
    allocated: int
    reserved: int

    @classmethod
    def least(cls, several: Sequence[Peaks]) -> Peaks:
        """The smallest of each."""
        return cls(*map(min, zip(*map(astuple, several), strict=True)))

    @classmethod
    def most(cls, several: Sequence[Peaks]) -> Peaks:
        """The largest of each."""
        return cls(*map(max, zip(*map(astuple, several), strict=True)))


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes that the process takes on the device, and the tool that reports them.

    NVML knows each process; where it cannot tell them apart (some containers), it knows by how much the whole device
    grew since before the process touched it. `mem_get_info` counts everybody.
    """

    bytes: int
    source: Literal["NVML, this process", "NVML, growth of the device", "mem_get_info"]


class ConvolutionWorkspace(NamedTuple):
    """A convolution (`memsize.kernels.cudnn.plans.Convolution` as text), and the bytes that cuDNN takes for it."""

    convolution: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one real run.

    `peaks` are those of the whole run after the model was built, `steady` those of its last step. `skipped` counts
    the steps before it that a GradScaler skipped; they were run again. `tracked` is the figure of PyTorch's MemTracker
    for one more such step, `untracked` the reason where there is none. `log` holds the allocations of the last step.
    `workspaces` are the sizes that cuDNN of this stack reported before the run (with its benchmark, the largest of any
    plan), so that a comparison need not ask the library again.
    """

    workload: MeasuredWorkload
    stack: SoftwareStack
    peaks: Peaks | None = None
    steady: Peaks | None = None
    device: DeviceUse | None = None
    skipped: int = 0
    tracked: int | None = None
    untracked: str | None = None
    error: str | None = None
    seconds: float = 0.0
    log: AllocationLog | None = None
    workspaces: tuple[ConvolutionWorkspace, ...] = ()
