"""The allocator simulation, in events a second."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.allocator import rate, scattered, training
from benchmarks.measure import Line
from memsize.device.allocator_config import AllocatorConfig


def lines(quick: bool) -> Iterator[Line]:
    """A step that repeats and random lifetimes, under both kinds of segments."""
    steps = partial(training, 2, 10) if quick else training
    random = partial(scattered, 2_000, 100) if quick else scattered
    for kind, config in (("default", AllocatorConfig()), ("expandable", AllocatorConfig(expandable_segments=True))):
        for name, make in (("training steps", steps), ("random lifetimes", random)):
            count, speed = rate(make, config)
            yield Line(f"allocator, {name}, {kind} segments", f"{speed:,.0f} events/s", f"{count:,} events", "", None)
