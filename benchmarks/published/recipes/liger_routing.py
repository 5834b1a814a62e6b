"""A mixture of experts, token by token: which expert gets how many, as the benchmark's random numbers have it.

The benchmark seeds PyTorch's generator of the GPU and draws the logits of the router, so that its routing can be
computed: Philox4x32-10 by thread, turned normal by Box and Muller in fours, as `normal_` of ATen/native/cuda does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy
import torch
from torch import Tensor
from torch.nn import functional

SEED: Final = 42
HIDDEN: Final = 2048
INNER: Final = 768
CHOSEN: Final = 8
"""Experts of a token."""
_THREADS: Final = 132 * 2048
"""Threads of the H100 at once: 2,048 on each of its 132 multiprocessors."""
_IN_BLOCK: Final = 256
_FOUR: Final = 4


def experts(tokens: int, count: int) -> Callable[[], Tensor]:
    """The forward of `count` experts, called one after the other, as the eager Mixtral of transformers has it."""
    kind = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    x = torch.randn(tokens, HIDDEN, **kind)  # type: ignore[call-overload]
    gates_and_ups = torch.randn(count, 2 * INNER, HIDDEN, **kind) * 0.02  # type: ignore[call-overload]
    downs = torch.randn(count, HIDDEN, INNER, **kind) * 0.02  # type: ignore[call-overload]
    index = torch.empty(tokens, CHOSEN, dtype=torch.int32, device="cuda")
    weights = torch.empty(tokens, CHOSEN, dtype=torch.bfloat16, device="cuda").requires_grad_(True)
    loads = routed(tokens, count)
    return lambda: _forward(x, gates_and_ups, downs, index, weights, loads)


def _forward(
    x: Tensor, gates_and_ups: Tensor, downs: Tensor, index: Tensor, weights: Tensor, loads: Sequence[int]
) -> Tensor:
    result = torch.zeros_like(x)
    with torch.no_grad():
        mask = functional.one_hot(index.long(), num_classes=len(loads)).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0)
    for expert, load in enumerate(loads):
        if load:
            position, token = torch.zeros(load, 2, dtype=torch.int64, device="cuda").unbind(1)
            gate, up = functional.linear(x[token], gates_and_ups[expert]).chunk(2, dim=-1)
            current = functional.linear(functional.silu(gate) * up, downs[expert])
            current = current * weights[token, position, None]
            result.index_add_(0, token, current.to(result.dtype))
    del hit
    return result


# -- the benchmark's random numbers ------------------------------------------------------------------------------------


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
