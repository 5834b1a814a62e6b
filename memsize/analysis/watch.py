"""A real job beside its prediction: a process on a GPU from one reading to the next, and the steps of a loop.

A reading is what NVML counts and ``nvidia-smi`` shows, read through NVIDIA's package nvidia-ml-py (`pynvml`): the
allocator's segments and the CUDA context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from memsize.errors import InputError, first_line
from memsize.records.gpu import Interval
from memsize.units import format_bytes, format_span, format_together


class Reading(NamedTuple):
    """The bytes that one process has `used` on `card`, and those `free` of its `total`."""

    used: int
    free: int
    total: int
    card: str


class Nvml:
    """The driver of this machine's GPUs. Raises `InputError` where there is none, or no package to ask it with."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            raise InputError("this needs NVIDIA's package for NVML: pip install nvidia-ml-py") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise InputError(f"no NVIDIA GPU can be asked for its memory: {first_line(error)}") from None

    def processes(self) -> dict[int, Reading]:
        """The memory of each process, on the GPU on which it has most."""
        readings: dict[int, Reading] = {}
        for gpu in self._gpus:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
            name = self._nvml.nvmlDeviceGetName(gpu)
            card = name.decode() if isinstance(name, bytes) else str(name)  # bytes in releases before 11.510
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                reading = Reading(process.usedGpuMemory or 0, memory.free, memory.total, card)
                readings[process.pid] = max(reading, readings.get(process.pid, reading))
        return readings


_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_COLUMNS: Final = 24
_STRETCHES: Final = 4
_LEAST_SECONDS: Final = 60
_NEAR: Final = 3600
"""Growth is told where it fills the GPU within an hour, once it was seen for a minute: programs begin with growth."""


@dataclass
class Watch:
    """The readings of one process, by the seconds since the first. `predicted` is what ``nvidia-smi`` may show."""

    predicted: Interval | None = None
    seconds: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def add(self, seconds: float, reading: Reading) -> None:
        self.seconds.append(seconds)
        self.readings.append(reading)

    @property
    def most(self) -> int:
        """The most that the process had."""
        return max((reading.used for reading in self.readings), default=0)

    def line(self) -> str:
        """The bytes of the process until now as a curve, the last figure, the prediction, and the rest of the GPU."""
        last = self.readings[-1]
        sizes = format_together([last.used, self.most, last.free])
        curve = "".join(
            _BLOCKS[min(used * len(_BLOCKS) // max(self.most, 1), len(_BLOCKS) - 1)] for used in self._curve()
        )
        expected = f", predicted {format_span(*self.predicted)}" if self.predicted else ""
        return (
            f"{curve} {sizes[last.used]}, at most {sizes[self.most]}{expected}; {sizes[last.free]} free on {last.card}"
        )

    def _curve(self) -> list[int]:
        return [used for used, _ in self._highest(_COLUMNS)]

    def _highest(self, count: int) -> list[tuple[int, float]]:
        """The highest reading of each of `count` equal stretches of time that has one, and when it was."""
        highest: dict[int, tuple[int, float]] = {}
        length = self.seconds[-1] / count or 1
        for seconds, reading in zip(self.seconds, self.readings, strict=True):
            stretch = min(int(seconds / length), count - 1)
            highest[stretch] = max((reading.used, seconds), highest.get(stretch, (0, 0)))
        return [highest[stretch] for stretch in sorted(highest)]

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Sentences on what is wrong or will be, each with a key that stays the same while its figures change."""
        last = self.readings[-1]
        if self.predicted and self.predicted.low - last.used > last.free:
            missing = format_bytes(self.predicted.low - last.used)
            yield "short", f"it will need {missing} more, and {format_bytes(last.free)} are free on {last.card}"
        if self.predicted and last.used > self.predicted.high:
            yield "above", f"it takes {format_bytes(last.used)}, more than predicted ({format_span(*self.predicted)})"
        rate = self._growth()
        if rate and last.free < rate * _NEAR:
            per_minute, minutes = format_bytes(int(rate * 60)), last.free / rate / 60
            yield "growth", f"it grows by {per_minute} a minute: {last.card} is full in about {max(minutes, 1):.0f} min"

    def _growth(self) -> float:
        """Bytes a second by which it grows, 0 where it does not all the time."""
        if not self.seconds or self.seconds[-1] < _LEAST_SECONDS:
            return 0
        highest = self._highest(_STRETCHES)
        if len(highest) < _STRETCHES or any(after[0] <= before[0] for before, after in pairwise(highest)):
            return 0
        # Without the first stretch, which has the start of the program.
        (before, start), (after, end) = highest[1], highest[-1]
        return (after - before) / (end - start)

    def summary(self) -> str:
        expected = f"; {format_span(*self.predicted)} were predicted" if self.predicted else ""
        last = self.readings[-1]
        return (
            f"It took at most {format_bytes(self.most)} of {format_bytes(last.total)} on {last.card} in "
            f"{self.seconds[-1]:.0f} s{expected}."
        )


CURRENT: Final = "allocated_bytes.all.current"
PEAK: Final = "allocated_bytes.all.peak"
"""Names in `torch.cuda.memory_stats`."""


@dataclass
class LoopWatch:
    """The memory at the start of each step of a loop, and the highest peak until then."""

    starts: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def add(self, stats: Mapping[str, int]) -> None:
        """Take the figures at the start of a step."""
        self.starts.append(stats.get(CURRENT, 0))
        self.peaks.append(stats.get(PEAK, 0))

    @property
    def expected(self) -> int:
        """The peak to expect of the step that starts.

        Where the last step raised the peak and memory grew in each of the last two, it rises as far again as it did in
        the one that grew less. The first step makes the optimizer's state, which is no growth of this kind.
        """
        growth = min((after - before for before, after in pairwise(self.starts[-3:])), default=0)
        is_growing = len(self.starts) > 2 and growth > 0 and self.peaks[-1] > self.peaks[-2]
        return self.peaks[-1] + (growth if is_growing else 0)
