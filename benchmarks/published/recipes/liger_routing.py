"""How many tokens each expert of Liger-Kernel's benchmark gets, as its random numbers have it.

It seeds PyTorch's generator of the GPU and draws the logits of the router, so that its routing can be
computed: Philox4x32-10 by thread, turned normal by Box and Muller in fours, as `normal_` of ATen/native/cuda does it.
"""

from __future__ import annotations

from typing import Final

import numpy

SEED: Final = 42
HIDDEN: Final = 2048
INNER: Final = 768
CHOSEN: Final = 8
"""Experts of a token."""
_THREADS: Final = 132 * 2048
"""Threads of the H100 at once: 2,048 on each of its 132 multiprocessors."""
_IN_BLOCK: Final = 256
_FOUR: Final = 4


def routed(tokens: int, count: int) -> list[int]:
    """How many tokens each expert gets."""
    before = [tokens * HIDDEN, count * 2 * INNER * HIDDEN, count * HIDDEN * INNER]
    logits = _normal(tokens * count, sum(map(_advance, before))).reshape(tokens, count)
    chosen = (
        numpy.argpartition(-logits, CHOSEN - 1, axis=1)[:, :CHOSEN]
        if count > CHOSEN
        else numpy.indices((tokens, count))[1]
    )
    return [int(load) for load in numpy.bincount(chosen.ravel(), minlength=count)]


def _grid(size: int) -> int:
    """The threads that draw `size` numbers."""
    return min(_THREADS, -(-size // _IN_BLOCK) * _IN_BLOCK)


def _advance(size: int) -> int:
    """How far a call that draws `size` numbers moves the generator's offset."""
    return ((size - 1) // (_grid(size) * _FOUR) + 1) * _FOUR


def _normal(size: int, offset: int) -> numpy.ndarray:
    threads = _grid(size)
    rounds = -(-size // (threads * _FOUR))
    drawn = numpy.empty((rounds, _FOUR, threads))
    for turn in range(rounds):
        drawn[turn] = _box_muller(_philox(offset // _FOUR + turn, threads))
    return drawn.reshape(-1)[:size]


def _philox(counter: int, threads: int) -> numpy.ndarray:
    """Four words of each thread at a counter: ten rounds of Philox4x32, keyed by the seed."""
    words = numpy.zeros((_FOUR, threads), dtype=numpy.uint64)
    words[0], words[1] = counter & 0xFFFFFFFF, counter >> 32
    words[2] = numpy.arange(threads, dtype=numpy.uint64)
    key = [SEED, 0]
    low = numpy.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = words[0] * numpy.uint64(0xD2511F53), words[2] * numpy.uint64(0xCD9E8D57)
        words = numpy.stack(
            (
                (second >> numpy.uint64(32)) ^ words[1] ^ numpy.uint64(key[0]),
                second & low,
                (first >> numpy.uint64(32)) ^ words[3] ^ numpy.uint64(key[1]),
                first & low,
            )
        )
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def _box_muller(words: numpy.ndarray) -> numpy.ndarray:
    uniform = words * 2.0**-32 + 2.0**-33
    radius = numpy.sqrt(-2 * numpy.log(uniform[[0, 0, 2, 2]]))
    angle = 2 * numpy.pi * uniform[[1, 1, 3, 3]]
    return radius * numpy.stack((numpy.sin(angle[0]), numpy.cos(angle[1]), numpy.sin(angle[2]), numpy.cos(angle[3])))
