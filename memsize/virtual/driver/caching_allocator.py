"""The caching allocator of a virtual GPU while a program runs: what `torch.cuda.memory_stats` and its like answer.

The blocks and segments are those of `memsize.device.allocator`; here they are followed event by event, and counted as
PyTorch counts them (c10/core/CachingDeviceAllocator.h, DeviceStats).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch

from memsize.device.allocator import Allocator
from memsize.device.allocator_config import BLOCK, SMALL, AllocatorConfig
from memsize.device.pools import ADDRESS, SHIFT, Pool
from memsize.records.trace import Event
from memsize.units import GiB, KiB, MiB

_BLOCKS: Final = ("allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes")
_SEGMENTS: Final = ("segment", "reserved_bytes")
_SPLIT: Final = ("inactive_split", "inactive_split_bytes")
_SINGLE: Final = ("oversize_allocations", "oversize_segments")
_POOLS: Final = ("all", "small_pool", "large_pool")
_ZEROS: Final = ("num_sync_all_streams", "num_device_alloc", "num_device_free")


@dataclass(slots=True)
class _Stat:
    """One figure as PyTorch keeps it: now, at most, and all that was ever added and taken away."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount


class DeviceMemory:
    """The allocator of one process on a GPU of `total` bytes, of which `outside` bytes are used outside PyTorch.

    `settings` is called when the allocator is first used, as PyTorch reads its settings. `events` is the list of all
    events, which grows while the program runs; `streams` has the stream of each storage that is not on the default one.
    Unless it is `bounded`, nothing is too large for the GPU.
    """

    def __init__(
        self,
        total: int,
        outside: int,
        settings: Callable[[], AllocatorConfig],
        events: Sequence[Event],
        streams: Mapping[int, int],
        bounded: bool = True,
    ) -> None:
        self.total = total
        self.outside = outside
        self._events = events
        self._streams = streams
        self._failures = self._retries = 0
        self._settings = settings
        self._bounded = bounded
        self._live: dict[int, tuple[int, int, Pool]] = {}
        self._stats = {(name, pool): _Stat() for name in (*_BLOCKS, *_SEGMENTS, *_SPLIT) for pool in _POOLS}
        self._done = 0
        self.emptied: list[int] = []
        """The events before which all that was cached was given back."""

    @cached_property
    def config(self) -> AllocatorConfig:
        """The allocator's settings, with the share of the card that the program lets it have."""
        return self._settings()

    @cached_property
    def _allocator(self) -> Allocator:
        return Allocator(self.config, self.total - self.outside if self._bounded else None, self._enforced)

    @property
    def allowed(self) -> int | None:
        """The bytes that the allocator may hold at most; None where its share is the whole card."""
        return self.config.allowed(self.total)

    @property
    def _enforced(self) -> int | None:
        return self.allowed if self._bounded else None

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        self.follow()
        return self._allocator.memory.reserved * BLOCK

    @property
    def free(self) -> int:
        """Bytes of the card that are not taken."""
        return self._free_beside(self.reserved)

    def _free_beside(self, reserved: int) -> int:
        return max(self.total - self.outside - reserved, 0)

    @property
    def left(self) -> int:
        """Bytes that the allocator may still take of the card."""
        return self.free if self.allowed is None else max(min(self.free, self.allowed - self.reserved), 0)

    def follow(self) -> None:
        """Follow the events since the last call. Raises `OutOfMemoryError` at one that the caller has to remove."""
        while self._done < len(self._events):
            event = self._events[self._done]
            block = self._live.get(event.storage)
            size = event.delta if block is None else block[0] + event.delta
            if size > 0:
                self._allocate(event.storage, size)
            elif block is not None:
                del self._live[event.storage]
            if block is not None:
                request, address, pool = block
                self._count_rests(pool, _rests_after_giving(pool, address))
                size = (address >> SHIFT) * BLOCK
                self._count(pool, _BLOCKS, (-1, -1, -size, -size, -request))
            self._done += 1

    def _allocate(self, storage: int, request: int) -> None:
        size = self.config.block_size(request) // BLOCK
        pool = self._allocator.pool(self._streams.get(storage, 0), size * BLOCK <= SMALL)
        block = pool.take(size)
        if not block:
            block = self._allocator.grow(pool, size)
            # Before it refuses a request PyTorch tries again, whether there was anything to give back or not.
            self._retries += self._count_segments() or not block
            if not block:
                self._failures += 1
                self.emptied.append(self._done)
                raise torch.OutOfMemoryError(self._out_of_memory(request))
        self._live[storage] = (request, block, pool)
        size = (block >> SHIFT) * BLOCK
        self._count(pool, _BLOCKS, (1, 1, size, size, request))
        self._count_rests(pool, _rests_after_taking(pool, block))

    def _out_of_memory(self, request: int) -> str:
        """Return PyTorch's message for a `request` that fails (c10/cuda/CUDACachingAllocator.cpp).

        It names the segment that PyTorch asks the driver for.
        """
        reserved = self._allocator.memory.reserved * BLOCK
        free, segment = self._free_beside(reserved), self.config.segment_size(self.config.block_size(request))
        allocated = self._stats["allocated_bytes", "all"].current
        share = "" if self.allowed is None else f"{_in_its_words(self.allowed)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {_in_its_words(segment)}. GPU 0 has a total capacity of "
            f"{_in_its_words(self.total)} of which {_in_its_words(free)} is free. Including non-PyTorch memory, this "
            f"process has {_in_its_words(self.total - free)} memory in use. {share}Of the allocated memory "
            f"{_in_its_words(allocated)} is allocated by PyTorch, and {_in_its_words(reserved - allocated)} is "
            "reserved by PyTorch but unallocated."
        )

    def _count_rests(self, pool: Pool, change: tuple[int, int]) -> None:
        if any(change) and not self.config.expandable_segments:  # PyTorch counts none there
            self._count(pool, _SPLIT, change)

    def _count(self, pool: Pool, names: Sequence[str], amounts: Sequence[int]) -> None:
        for pool_name in ("all", self._name(pool)):
            for name, amount in zip(names, amounts, strict=True):
                self._stats[name, pool_name].add(amount)

    def _count_segments(self) -> bool:
        """Bring the figures of segments up to date; whether some were given back."""
        now = {(kind, name): 0 for kind in _SEGMENTS for name in _POOLS}
        for pool in self._allocator.pools.values():
            segments = pool.ranges()
            for name in ("all", self._name(pool)):
                now["segment", name] += len(segments)
                now["reserved_bytes", name] += sum(end - start for start, end in segments) * BLOCK
        changes = {key: figure - self._stats[key].current for key, figure in now.items()}
        for key, change in changes.items():
            self._stats[key].add(change)
        return any(change < 0 for change in changes.values())

    def _name(self, pool: Pool) -> str:
        return next(
            "small_pool" if small else "large_pool"
            for (_, small), candidate in self._allocator.pools.items()
            if candidate is pool
        )

    def set_fraction(self, fraction: float) -> None:
        """Let the allocator hold that share of the card from now on."""
        self.config = replace(self.config, memory_fraction=fraction)
        self._allocator.allowed = self._enforced

    def empty_cache(self) -> None:
        """Give back every segment that no block uses."""
        self.follow()
        self._allocator.release()
        self.emptied.append(self._done)
        self._count_segments()

    def reset_peaks(self) -> None:
        """Let every peak be the present figure."""
        self.follow()
        for stat in self._stats.values():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """Forget what was ever allocated, freed, tried again and refused."""
        self.follow()
        self._failures = self._retries = 0
        for stat in self._stats.values():
            stat.allocated = stat.freed = 0

    def stats(self) -> dict[str, Any]:
        """The nested dictionary that `torch.cuda.memory_stats_as_nested_dict` returns."""
        self.follow()
        stats: dict[str, Any] = {
            name: {pool: asdict(self._stats[name, pool]) for pool in _POOLS} for name in (*_BLOCKS, *_SEGMENTS, *_SPLIT)
        }
        stats |= {name: asdict(_Stat()) for name in _SINGLE}
        split = -1 if self.config.max_split_size is None else self.config.max_split_size
        counts = {"num_ooms": self._failures, "num_alloc_retries": self._retries, "max_split_size": split}
        return stats | dict.fromkeys(_ZEROS, 0) | counts


def _in_its_words(size: int) -> str:
    """`size` bytes as the allocator's errors tell them (`format_size`)."""
    if size <= KiB:
        return f"{size} bytes"
    name, unit = ("KiB", KiB) if size <= MiB else ("MiB", MiB) if size <= GiB else ("GiB", GiB)
    return f"{size / unit:.2f} {name}"


def _rests_after_taking(pool: Pool, block: int) -> tuple[int, int]:
    """How the free rests of split segments, and their bytes, changed when `block` was cut off."""
    size, start = block >> SHIFT, block & ADDRESS
    rest = pool.starts.get(start + size, 0) >> SHIFT
    whole = pool.segments.get(start) == size + rest
    return bool(rest) - (not whole), (rest if whole else -size) * BLOCK


def _rests_after_giving(pool: Pool, block: int) -> tuple[int, int]:
    """Give `block` back, and how that changes the free rests of split segments, and their bytes."""
    size, start = block >> SHIFT, block & ADDRESS
    neighbours = (start in pool.ends) + (start + size in pool.starts)
    merged = pool.give(block)
    whole = pool.segments.get(merged & ADDRESS) == merged >> SHIFT
    return (not whole) - neighbours, (size - (merged >> SHIFT) if whole else size) * BLOCK
