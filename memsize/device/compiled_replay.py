"""The first part of a replay in compiled code, where this installation has it: some twenty times as fast as Python.

`libreplay.cpp` follows the same rules as `memsize.device.replay` and `memsize.device.pools`, and stops at the first
request that CUDA would refuse. Python goes on from there, and does it all where there was no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memsize.device.pools import SHIFT

if TYPE_CHECKING:
    from memsize.device.allocation_events import AllocationEvents
    from memsize.device.allocator import Allocator

LIBRARY: Final = Path(__file__).with_name("libreplay.so")
_LEAST: Final = 200
"""Events that Python replays in the time that a call of compiled code takes."""

Rows = list[list[int]]


@dataclass(frozen=True)
class CompiledReplay:
    """The state before `event`, the first that is left: the figures of a run in `memsize.device.replay`, the live
    storages (storage, bytes, start, size, pool), the free blocks (pool, start, size) in order, and the segments (event,
    pool, start, size). Sizes and addresses are in blocks of 512 B. Two pools belong to each of `streams`, the small one
    first.
    """

    event: int
    requested: int
    allocated: int
    reserved: int
    peaks: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    idle: int
    lowest_address: int
    live: Rows
    free: Rows
    segments: Rows
    streams: tuple[int, ...]

    def fill(self, allocator: Allocator) -> None:
        """Put the blocks into an `allocator`."""
        memory, numbers = allocator.memory, dict.fromkeys(pool for _, pool, *_ in self.segments)
        pools = {pool: allocator.pool(self.streams[pool // 2], pool % 2 == 0) for pool in (0, 1, *numbers)}
        for event, pool, start, size, _ in self.segments:
            pools[pool].segments[start] = size
            memory.changes.append((event, self.streams[pool // 2], start, size))
            memory.event = event
        for pool, start, size, *_ in self.free:
            block = size << SHIFT | start
            pools[pool].free.append(block)
            pools[pool].starts[start] = pools[pool].ends[start + size] = block
        allocator.live.update(
            (storage, (request, size << SHIFT | start, pools[pool]))
            for storage, request, start, size, pool in self.live
        )
        memory.reserved = self.reserved
        memory.lowest_address = self.lowest_address


def compiled_replay(
    events: AllocationEvents, streams: Mapping[int, int], limit: int | None, large_segment: int
) -> CompiledReplay | None:
    """Replay `events` from the first on, as long as no more than `limit` blocks are reserved (None: without bound);
    None where that would take longer than in Python, or there is no compiled code.
    """
    import numpy as np

    library = _library() if len(events) >= _LEAST else None
    if library is None:
        return None
    storages, deltas = (np.ascontiguousarray(column, dtype=np.int64) for column in (events.storages, events.deltas))
    count = int(storages.max()) + 1
    distinct = (0, *sorted({*streams.values()} - {0}))
    stream_of = np.zeros(count if streams else 0, dtype=np.intc)
    for storage, stream in streams.items():
        if storage < count:
            stream_of[storage] = distinct.index(stream)
    addresses = storages.ctypes.data, deltas.ctypes.data, stream_of.ctypes.data if streams else None
    bound = -1 if limit is None else limit
    handle = library.memsize_replay(*addresses, len(events), count, len(distinct), bound, large_segment)
    try:
        f = library.memsize_figures(handle)[:12]
        live, free, segments = (_rows(library, handle, table) for table in range(3))
    finally:
        library.memsize_close(handle)
    peaks = (f[3], f[4]), (f[5], f[6]), (f[7], f[8])
    return CompiledReplay(f[11], f[0], f[1], f[2], peaks, f[9], f[10], live, free, segments, distinct)


def _rows(library: Any, handle: Any, table: int) -> Rows:
    import numpy as np

    count = library.memsize_count(handle, table)
    if not count:
        return []
    listed: Rows = np.ctypeslib.as_array(library.memsize_rows(handle, table), (count, 5)).tolist()
    return listed


@cache
def _library() -> Any:
    """The compiled code; None where it was not built, for another system, or before its source was changed."""
    import ctypes

    source = LIBRARY.with_suffix(".cpp")  # not in a wheel
    try:
        if source.exists() and source.stat().st_mtime > LIBRARY.stat().st_mtime:
            return None
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    handle, number, numbers = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    library.memsize_replay.argtypes = [handle, handle, handle, number, number, ctypes.c_int, number, number]
    library.memsize_replay.restype = handle
    library.memsize_figures.argtypes, library.memsize_figures.restype = [handle], numbers
    library.memsize_count.argtypes, library.memsize_count.restype = [handle, ctypes.c_int], number
    library.memsize_rows.argtypes, library.memsize_rows.restype = [handle, ctypes.c_int], numbers
    library.memsize_close.argtypes, library.memsize_close.restype = [handle], None
    return library
