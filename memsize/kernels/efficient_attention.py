"""The kernels of memory-efficient attention's backward: which of them runs, and the accumulators that it takes.

Each kernel works on blocks of queries and of keys. It adds up the query's gradient in float32 in global memory, block
by block, and in half precision the gradients of key and value too where a head doesn't fit into registers.

Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernels/cutlassB.h (the order in which kernels are
tried), generate_kernels.py (which of them need more shared memory than some GPUs have), kernel_backward.h
(`workspace_size`) and attention_backward.cu (`num_splits_key`). Known limit: whether a kernel's shared memory suffices
follows from the generator's comments, not from its size.
"""

from __future__ import annotations

from typing import NamedTuple

ANY_HEAD = 65_536
"""The head size of kernels that take any."""
_LOCK = 4
"""Numbers in front of each block of the query's gradient: a lock, a counter and padding."""
_AT_ONCE = 200
"""Blocks of keys that are split off, in all heads of a batch, where their gradients need accumulators as well."""
_ENOUGH_HEADS = 256


class Kernel(NamedTuple):
    """Queries and keys of a block, the largest head size, and whether the gradients of a block's keys and values stay
    in registers."""

    queries: int
    keys: int
    head: int
    in_registers: bool


def kernel(head: int, *, half: bool, capability: tuple[int, int], dropout: bool) -> Kernel:
    """Return the kernel for heads of this size (the larger of key's and value's)."""
    for width in (32, 64):
        if head <= width:
            return Kernel(64, 64, width, half)
    width = 128 if head <= 128 else ANY_HEAD
    if half and head <= 96 and not dropout and capability in ((8, 6), (8, 9)):
        return Kernel(128, 64, 96, True)
    if not _has_wide_blocks(half, capability):
        return Kernel(64, 64, width, False)
    in_registers = half and width == 128
    return Kernel(128, 128 if in_registers and capability >= (8, 0) else 64, width, in_registers)


def _has_wide_blocks(half: bool, capability: tuple[int, int]) -> bool:
    """Whether there are kernels for blocks of 128 queries, and shared memory for them: not on Turing, and not on the
    GPUs of a generation that have 100 KB in each multiprocessor."""
    return capability in ((8, 0), (8, 7)) or capability[0] in (9, 10) or (half and capability == (7, 0))


def accumulators(
    batch: int, heads: int, queries: int, keys: int, head: int, value_head: int, *, half: bool,
    capability: tuple[int, int], dropout: bool,
) -> int:  # fmt: skip
    """Return the bytes of the kernel's workspace."""
    block = kernel(max(head, value_head), half=half, capability=capability, dropout=dropout)
    numbers = 0
    if half or capability >= (7, 0):
        tiles = -(-queries // block.queries) * -(-head // block.keys)
        numbers = tiles * (block.queries * block.keys + _LOCK)
    if half and not block.in_registers:
        widths = sum(-(-width // block.queries) * block.queries for width in (head, value_head))
        numbers += _splits(batch * heads, keys, block) * block.keys * widths
    return 4 * batch * heads * numbers


def _splits(heads: int, keys: int, block: Kernel) -> int:
    """The parts of the keys that run side by side, each with its accumulators; `heads` are those of all samples."""
    if heads >= _ENOUGH_HEADS and keys <= 2 * block.keys:
        return 1
    return max(1, min(-(-keys // block.keys), _AT_ONCE // heads))
