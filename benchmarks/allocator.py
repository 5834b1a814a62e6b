"""How many events a second the allocator simulation replays: a training step that repeats, and random lifetimes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from memsize.device.allocator_config import AllocatorConfig
from memsize.device.replay import replay

Events = list[tuple[int, int]]


def training(steps: int = 40, layers: int = 100) -> Events:
    """Steps of a transformer-like model: activations kept, gradients, and a foreach optimizer's temporaries."""
    names, events = itertools.count(), []
    width, tokens = 1024, 2048
    parameters = [4 * width * width, 4 * width, 16 * width * width, 4 * width] * layers
    events += [(next(names), size) for size in parameters for _ in range(3)]
    for _ in range(steps):
        saved: Events = []
        for layer in range(layers):
            scratch = (next(names), 8 * tokens * width)
            fresh = [(next(names), 4 * tokens), (next(names), 4 * tokens * width + 512 * (layer % 7))]
            events += [fresh[0], scratch, fresh[1], freed(scratch)]
            saved += fresh
        gradients: Events = []
        for storage in reversed(saved):
            flow = (next(names), 4 * tokens * width)
            gradient = [(next(names), parameters[len(gradients) + at]) for at in range(2)]
            events += [flow, *gradient, freed(storage), freed(flow)]
            gradients += gradient
        temporaries = [(next(names), size) for size in parameters]
        events += [*temporaries, *map(freed, temporaries), *map(freed, gradients)]
    return events


def freed(storage: tuple[int, int]) -> tuple[int, int]:
    """The event that frees what the event `storage` allocated."""
    return storage[0], -storage[1]


def scattered(count: int = 400_000, alive: int = 2_000) -> Events:
    """Random sizes from 1 B to 64 MiB with random lifetimes, about `alive` storages at a time."""
    choose, events, live = random.Random(0), [], []
    for storage in range(count // 2):
        size = int(2 ** choose.uniform(0, 26))
        events.append((storage, size))
        live.append((storage, -size))
        if len(live) > alive:
            at = choose.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            events.append(live.pop())
    return events + live


def rate(make: Callable[[], Events], config: AllocatorConfig) -> tuple[int, float]:
    """How many events `make` has, and how many of them are replayed in a second (best of three)."""
    events, best = make(), float("inf")
    for _ in range(3):
        start = time.perf_counter()
        replay(events, config)
        best = min(best, time.perf_counter() - start)
    return len(events), len(events) / best


def main() -> None:
    for config in (AllocatorConfig(), AllocatorConfig(expandable_segments=True)):
        for make in (training, scattered):
            count, speed = rate(make, config)
            kind = "expandable" if config.expandable_segments else "default"
            print(f"{make.__name__:10} {kind:10} {count:>9,} events  {speed:>11,.0f} events/s")


if __name__ == "__main__":
    main()
