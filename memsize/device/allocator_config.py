"""The settings of PyTorch's CUDA caching allocator that change how much memory it takes.

The text is that of `PYTORCH_ALLOC_CONF` or its older name `PYTORCH_CUDA_ALLOC_CONF`: ``key:value,key:[k:v,k:v]``.
Source: PyTorch's c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h (2.11 to 2.14), and the pull
requests that added a setting. Known limit: `roundup_bypass_threshold_mb`, which 2.0 alone has, is not simulated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memsize.errors import InputError
from memsize.printable import shortened
from memsize.records.codec import coder
from memsize.spec.stack import OLDEST, Release
from memsize.units import MiB

if TYPE_CHECKING:
    from memsize.records.generation import GenerationReport
    from memsize.records.program import ProgramRun
    from memsize.records.report import Report

BLOCK: Final = 512
"""Every block is a multiple of this many bytes (kMinBlockSize)."""
SMALL: Final = 1 * MiB
"""The largest request that the pool of small blocks serves (kSmallSize)."""
SMALL_SEGMENT: Final = 2 * MiB
"""The size of the segments that small blocks are cut from (kSmallBuffer)."""
LARGE_REQUEST: Final = 10 * MiB
"""From this size on, a request gets a segment of its own (kMinLargeAlloc)."""
SEGMENT_STEP: Final = 2 * MiB
"""The size of those segments is a multiple of this (kRoundLarge)."""

_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables in the order in which PyTorch looks them up; the first one that is set wins."""

INTERVALS: Final = 16
"""`roundup_power2_divisions` has one entry per power of two, from 1 MiB up to 32 GiB and more."""

IGNORED: Final = frozenset(
    """graph_capture_record_stream_reuse pinned_free_catch_all pinned_max_cached_size_mb pinned_max_round_threshold_mb
    pinned_num_register_threads pinned_reserve_segment_size_mb pinned_use_background_threads
    pinned_use_cuda_host_register pinned_use_hip_host_register release_lock_on_cudamalloc release_lock_on_hipmalloc
    throw_on_cudamalloc_oom""".split()
)
"""Settings that PyTorch accepts and that change no size on the GPU."""

_SINCE: Final[dict[str, Release]] = {
    "expandable_segments": (2, 1),  # 99275
    "large_segment_size_mb": (2, 11),  # 172056
    "max_non_split_rounding_mb": (2, 6),  # 136174
    "per_process_memory_fraction": (2, 10),  # 161035
}
"""The release that first knew a setting that changes sizes; the others are as old as 2.0."""


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """How the caching allocator rounds, splits and keeps memory. The defaults are PyTorch's; sizes are in bytes.

    `max_split_size` None splits blocks of any size. `max_non_split_rounding` is by how much an unsplittable block may
    exceed a request; None is `large_segment_size`. `roundup_divisions` holds 16 divisions, for requests from 1 MiB in
    powers of two; 0 and 1 round to 512 B only. `garbage_collection_threshold` 0 is off; PyTorch collects only where a
    `memory_fraction` below 1 is set too.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    roundup_divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = 20 * MiB
    memory_fraction: float = 1.0

    def validate(self) -> None:
        """Raise ValueError where `parse` makes no such settings."""
        sizes = (self.large_segment_size, self.max_split_size, self.max_non_split_rounding, *self.roundup_divisions)
        if len(self.roundup_divisions) != INTERVALS or not self.large_segment_size or min(filter(None, sizes)) < 0:
            raise ValueError("sizes that no allocator has")
        if not (0 <= self.garbage_collection_threshold <= 1 and 0 <= self.memory_fraction <= 1):
            raise ValueError("parts of a GPU's memory that are not from 0 to 1")

    @classmethod
    def parse(cls, text: str, release: Release | None = None) -> AllocatorConfig:
        """The settings that `text` names; raises `InputError` where PyTorch would refuse them.

        `release` is the one that reads them (None: any that knows them).
        """
        entries = dict(_entries(text))
        for key in entries:
            if release is not None and release < _SINCE.get(key, OLDEST):
                since, requested = (".".join(map(str, version)) for version in (_SINCE[key], release))
                raise InputError(f"PyTorch {requested} has no allocator setting {key}: it came with {since}")
        values = {_READERS[key][0]: _READERS[key][1](key, text) for key, text in entries.items() if key in _READERS}
        values.pop("backend", None)
        config = cls(**values)  # type: ignore[arg-type]
        for name in ("max_split_size", "max_non_split_rounding"):
            size = getattr(config, name)
            if size is not None and size < config.large_segment_size:
                least = config.large_segment_size // MiB
                raise InputError(f"{name}_mb must be at least {least}, got {size // MiB}")
        return config

    @classmethod
    def of(cls, settings: AllocatorConfig | str | None, release: Release | None = None) -> AllocatorConfig:
        """The settings that are given as a value or as a text; None is PyTorch's defaults."""
        return settings if isinstance(settings, AllocatorConfig) else cls.parse(settings or "", release)

    @classmethod
    def parse_optional(
        cls, settings: AllocatorConfig | str | None, release: Release | None = None
    ) -> AllocatorConfig | None:
        """The settings that are given as a value or as a text; None where none are."""
        return None if settings is None else cls.of(settings, release)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], release: Release | None = None) -> AllocatorConfig:
        """The settings that a PyTorch process started in `environment` would use."""
        try:
            return cls.parse(settings_in(environment), release)
        except InputError as error:
            raise InputError(f"the environment's {' or '.join(_VARIABLES)}: {error}") from None

    @property
    def depends_on_card(self) -> bool:
        """Whether the card decides more than what CUDA refuses: by a fraction of it, an expandable segment's span."""
        return self.expandable_segments or self.memory_fraction < 1

    def block_size(self, request: int) -> int:
        """The bytes of the block that serves `request` bytes: a multiple of 512, at least 512.

        With d divisions, a request above d · 512 B that lies between two powers of two is rounded up to the next of d
        equal steps between them.
        """
        divisions = self.roundup_divisions[min(max(request.bit_length() - 21, 0), INTERVALS - 1)]
        if divisions > 1 and request > BLOCK * divisions:
            step = (1 << request.bit_length() - 1) // divisions
            return -(-request // step) * step
        return max(-(-request // BLOCK), 1) * BLOCK

    def segment_size(self, block: int) -> int:
        """The bytes of the segment that CUDA is asked for where no free block can serve a block of `block` bytes."""
        if block <= SMALL:
            return SMALL_SEGMENT
        if block < LARGE_REQUEST:
            return self.large_segment_size
        return -(-block // SEGMENT_STEP) * SEGMENT_STEP

    def allowed(self, card_bytes: int) -> int | None:
        """The bytes that the allocator may hold on a card of `card_bytes`; None where no fraction is set."""
        return int(self.memory_fraction * card_bytes) if self.memory_fraction < 1 else None

    def card_of(self, allowed: int) -> int:
        """The bytes of a card of which the allocator may hold so many, give or take one."""
        return math.ceil(allowed / self.memory_fraction) + 1 if 0 < self.memory_fraction < 1 else allowed


def settings_in(environment: Mapping[str, str]) -> str:
    """The text of the settings that a PyTorch process started in `environment` would use; empty where none are set."""
    return next((environment[name] for name in _VARIABLES if name in environment), "")


def config_of(answer: Report | ProgramRun | GenerationReport) -> AllocatorConfig:
    """The settings that `answer` was made with. Raises `InputError` where it was changed and they are none."""
    try:
        config: AllocatorConfig = coder(AllocatorConfig).read(json.loads(answer.allocator or "{}"))
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"damaged settings of the allocator: {shortened(answer.allocator, 60)}") from None
    return config


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """The ``key:value`` pairs of `text`, in order; a value may be a list in brackets."""
    compact = re.sub(r"\s", "", text)
    for entry in re.split(r",(?![^\[]*\])", compact.removesuffix(",")) if compact else ():
        key, colon, value = entry.partition(":")
        if key not in _READERS and key not in IGNORED:
            names = ", ".join(sorted([*_READERS, *IGNORED]))
            raise InputError(f"no allocator setting {key!r}: known are {names}")
        if not colon or not value:
            raise InputError(f"the allocator setting {key} needs a value: write {key}:VALUE")
        yield key, value


def _switch(key: str, text: str) -> bool:
    if text not in ("True", "False"):
        raise InputError(f"{key} must be True or False, got {text}")
    return text == "True"


def _number(key: str, text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{key} must be a whole number, got {text}")
    return int(text)


def _mebibytes(key: str, text: str) -> int:
    size = _number(key, text) * MiB
    if key == "large_segment_size_mb" and size <= LARGE_REQUEST:
        raise InputError(f"{key} must be above {LARGE_REQUEST // MiB}, got {text}")
    return size


def _fraction(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{key} must be a number, got {text}") from None
    whole = key == "per_process_memory_fraction"
    if not (0 < value < 1 or (whole and value in (0, 1))):
        raise InputError(f"{key} must lie between 0 and 1, got {text}")
    return value


def _power_of_two(key: str, text: str) -> int:
    value = _number(key, text)
    if value.bit_count() != 1:
        raise InputError(f"{key} takes powers of two, got {text}")
    return value


def _divisions(key: str, text: str) -> tuple[int, ...]:
    """The 16 divisions of ``4`` (all the same) or ``[64:8,256:4,>:1]``: the first one holds below its boundary too,
    ``>`` stands for all above the last, and sizes between two boundaries are not divided.
    """
    if not text.startswith("["):
        return (_power_of_two(key, text),) * INTERVALS
    if not text.endswith("]"):
        raise InputError(f"{key} misses its closing bracket: {text}")
    divisions, last, first = [0] * INTERVALS, 0, True
    for pair in filter(None, text[1:-1].split(",")):
        boundary, _, count_text = pair.partition(":")
        count = 0 if count_text == "0" else _power_of_two(key, count_text)
        if boundary == ">":
            divisions[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        last = min(_power_of_two(key, boundary).bit_length() - 1, INTERVALS - 1)
        divisions[: last + 1] = [count] * (last + 1) if first else [*divisions[:last], count]
        first = False
    return tuple(divisions)


def _backend(key: str, text: str) -> None:
    if text != "native":
        raise InputError(f"{key}:{text} is another allocator: only PyTorch's native one is simulated")


_READERS: Final[dict[str, tuple[str, Callable[[str, str], object]]]] = {
    "backend": ("backend", _backend),
    "expandable_segments": ("expandable_segments", _switch),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
}
"""Settings that change sizes: the field that each sets and how its value is read."""
