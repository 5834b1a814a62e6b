"""Liger-Kernel's benchmark of experts, in the order of its script, ``benchmark_fused_moe.py``.

The eager experts of transformers and Liger's own, fused ones run in one process: a probe, whose memory is given back;
Liger's once for each number of experts, when triton tries its configurations; then each mode, each of the two and each
size, first for speed and then for memory. Blocks of more than 1 MiB are filled the better or worse for what all these
left in the caching allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.published.recipes.liger_routing import CHOSEN, HIDDEN, INNER, routed
from benchmarks.published.rows import Row
from memsize.virtual.packages.liger_experts import FusedExperts

Forward = Callable[[], Tensor]
MODES: Final = ("full", "forward", "backward")
TOKENS, EXPERTS = 8192, 128
"""Where the other is swept."""
_TILE: Final = 64
"""Tokens of a tile of products."""
_loads = cache(routed)


def peaks(measured: Sequence[Row]) -> Mapping[str, int]:
    """The peak of each row of one run of the script, in bytes, by the row's setting."""
    swept = "T" if "T" in measured[0].values else "E"
    values = list(dict.fromkeys(int(row.values[swept]) for row in measured))
    sizes = {value: (value, EXPERTS) if swept == "T" else (TOKENS, value) for value in values}
    triton = _Triton()
    _probe()
    for count in [EXPERTS] if swept == "T" else values:
        forward = _fused(TOKENS, count, triton)
        forward().sum().backward()
        del forward
    for mode, setup, value in _order(values):
        _time(mode, setup(*sizes[value], triton))
    taken = {
        (mode, value): _peak(mode, setup(*sizes[value], triton))
        for mode, setup, value in _order(values)
        if setup is _eager
    }
    return {row.setting: taken[row.values["mode"], int(row.values[swept])] for row in measured}


def _order(values: Sequence[int]) -> Iterator[tuple[str, Any, int]]:
    return ((mode, setup, value) for mode in MODES for setup in (_fused, _eager) for value in values)


class _Triton:
    """What triton allocates: a buffer that it clears between two calls that it times."""

    def __init__(self) -> None:
        self._tuned: set[str] = set()

    @staticmethod
    def buffer() -> Tensor:
        """256 MiB."""
        return torch.empty(2**26, dtype=torch.int32, device="cuda")

    def tune(self, kernel: str) -> None:
        """The first launch of a kernel times its configurations."""
        if kernel not in self._tuned:
            self._tuned.add(kernel)
            self.buffer()


def _probe() -> None:
    output = _eager(TOKENS, EXPERTS)()
    output.backward(torch.randn_like(output))
    del output
    torch.cuda.empty_cache()


def passes(forward: Forward, mode: str) -> Callable[[], object]:
    """One call that is timed or measured in a mode; the graph stays, as the benchmark has it."""
    if mode == "forward":
        return forward
    if mode == "backward":
        output = forward()
        gradient = torch.randn_like(output)
        return lambda: output.backward(gradient, retain_graph=True)

    def full() -> None:
        result = forward()
        result.backward(torch.randn_like(result), retain_graph=True)

    return full


def _time(mode: str, forward: Forward) -> None:
    """What ``triton.testing.do_bench`` leaves: calls before and beside its buffer. More calls use the same blocks."""
    call = passes(forward, mode)
    call()
    buffer = _Triton.buffer()
    call()
    del buffer


def _peak(mode: str, forward: Forward) -> int:
    """That of the second of ten calls, and of all that follow."""
    call = passes(forward, mode)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        call()
    return torch.cuda.max_memory_allocated()


# -- the two ways to compute experts -----------------------------------------------------------------------------------


def _inputs(tokens: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kind: Any = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    x = torch.randn(tokens, HIDDEN, **kind)
    gates_and_ups = torch.randn(count, 2 * INNER, HIDDEN, **kind) * 0.02
    downs = torch.randn(count, HIDDEN, INNER, **kind) * 0.02
    logits = torch.randn(tokens, count, device="cuda")
    index = torch.topk(logits, CHOSEN, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, index.long()), dim=-1).to(torch.bfloat16).requires_grad_(True)
    return x, gates_and_ups, downs, index, weights


def _eager(tokens: int, count: int, _: object = None) -> Forward:
    x, gates_and_ups, downs, index, weights = _inputs(tokens, count)
    loads = _loads(tokens, count)
    return lambda: _one_by_one(x, gates_and_ups, downs, index, weights, loads)


def _one_by_one(
    x: Tensor, gates_and_ups: Tensor, downs: Tensor, index: Tensor, weights: Tensor, loads: Sequence[int]
) -> Tensor:
    """As in transformers' Mixtral; how many tokens an expert gets, which the mask tells it, is known. `nonzero` of it
    copies what is not contiguous first (ATen/native/cuda/Nonzero.cu).
    """
    result = torch.zeros_like(x)
    with torch.no_grad():
        mask = functional.one_hot(index.long(), num_classes=len(loads)).permute(2, 1, 0)
        torch.greater(mask.sum(dim=(-1, -2)), 0)
        hit = torch.empty(sum(load > 0 for load in loads), 1, dtype=torch.int64, device="cuda")
    for expert, load in enumerate(loads):
        if load:
            copied = mask[expert].contiguous()
            places = torch.empty(2, load, dtype=torch.int64, device="cuda")
            del copied
            position, token = places.unbind(0)
            current = x[token]
            gate, up = functional.linear(current, gates_and_ups[expert]).chunk(2, dim=-1)
            current = functional.silu(gate) * up
            current = functional.linear(current, downs[expert])
            current = current * weights[token, position, None]
            result.index_add_(0, token, current.to(result.dtype))
    del hit
    return result


def _fused(tokens: int, count: int, triton: _Triton) -> Forward:
    x, gates_and_ups, downs, index, weights = _inputs(tokens, count)
    tiles = sum(-(-load // _TILE) for load in _loads(tokens, count))

    def forward() -> Tensor:
        result: Tensor = FusedExperts.apply(x, gates_and_ups, downs, index, weights, triton.tune, tiles)  # type: ignore[no-untyped-call]
        return result

    return forward
