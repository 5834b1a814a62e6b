"""The category of each block of a snapshot, from its stack, its lifetime and its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from memsize.analysis.explain.history import EARLIER, History, Life
from memsize.analysis.explain.snapshot_file import Stack
from memsize.analysis.explain.stacks import Stage
from memsize.records.explanation import How
from memsize.records.roles import ROLES, Role

_RECORDED: Final[Mapping[str, Role]] = {role: role for role in ROLES} | {
    "optimizer_state": "optimizer state",
    "autograd_detail": "temporary",
}
"""Categories that a snapshot names: memsize's own, and those of `torch.profiler._memory_profiler.Category`."""

_BY_STACK: Final[Mapping[Stage, Role]] = {
    "workspace": "workspace",
    "buckets": "gradient",
    "model": "parameter",
    "data": "input",
    "recomputation": "activation",
}

_OUTLIVES: Final[Mapping[Stage, tuple[Role, tuple[Stage, ...]]]] = {
    "forward": ("activation", ("backward", "optimizer", "data")),
    "backward": ("gradient", ("forward", "optimizer", "data")),
    "optimizer": ("optimizer state", ("forward", "backward", "data")),
}
"""What a block is that outlives the stage it was made at, and the stages that end it. One that doesn't is temporary."""


class Category(NamedTuple):
    """A role, or a key of `memsize.records.explanation.UNKNOWN`; and how it is known."""

    name: str
    how: How


def categories(history: History) -> tuple[Category, ...]:
    """The category of each of the history's lives, in their order."""
    names = [_category(history, life) for life in history.lives]
    weights = _weights(history.lives, names)
    for index, (life, category) in enumerate(zip(history.lives, names, strict=True)):
        if category.name == "earlier" and weights[life.bytes] > 0:
            weights[life.bytes] -= 1
            names[index] = Category("parameter", "size")
    return tuple(names)


def _category(history: History, life: Life) -> Category:
    if life.category in _RECORDED:
        return Category(_RECORDED[life.category], "recorded")
    stage = history.summary(life.stack).stage if life.born == EARLIER else history.stage(life.stack)
    if stage == "unrecorded":
        return Category("earlier" if life.born == EARLIER and history.recorded else "elsewhere", "unknown")
    if stage in _BY_STACK:
        return Category(_BY_STACK[stage], "stack")
    if stage not in _OUTLIVES:
        return Category("elsewhere", "unknown")
    return _by_lifetime(history, life, stage)


def _by_lifetime(history: History, life: Life, stage: Stage) -> Category:
    role, ends = _OUTLIVES[stage]
    if life.born == EARLIER or any(frame.name == "_init_group" for frame in life.stack):
        return Category(role, "stack")
    end, failed = history.next_of(ends, life.born), history.next_failure(life.born)
    if failed is not None and (end is None or failed < end) and not (life.died is not None and life.died < failed):
        end = None  # what an error gives up might have lived on
    elif life.died is not None and (end is None or life.died < end):
        return Category("temporary", "lifetime")
    if end is not None or stage == "forward":
        return Category(role, "lifetime")
    # The stage had not ended: what it had made may be what it leaves, or only on the way.
    if stage == "backward":
        return Category("backward", "unknown")
    return Category("temporary" if _computes(life) else role, "stack")


def _computes(life: Life) -> bool:
    """Whether the optimizer was computing an update, after it had made its state."""
    return any(frame.name.startswith(("_multi_tensor_", "_single_tensor_", "_fused_")) for frame in life.stack)


def _weights(lives: Sequence[Life], categories: Sequence[Category]) -> Counter[int]:
    """The sizes that trained parameters have: those of their gradients, or of one line's optimizer state."""
    gradients = Counter(
        life.bytes for life, category in zip(lives, categories, strict=True) if category.name == "gradient"
    )
    if gradients:
        return gradients
    lines: dict[Stack, Counter[int]] = {}
    for life, category in zip(lives, categories, strict=True):
        if category.name == "optimizer state":
            lines.setdefault(life.stack, Counter())[life.bytes] += 1
    return max(lines.values(), key=Counter.total, default=Counter())
