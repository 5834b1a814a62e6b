"""The blocks of a snapshot over its history: when each was made and freed, where, what for, and how much was alive at
every moment.

The history may begin in the middle of a run, so that a block may be older than it; and the allocator keeps only the
last entries where a number of them was asked for.

A stack shows where a block was allocated, not its purpose: categories follow from the stack together with the lifetime
of the block. Every rule about stacks is a name in PyTorch or in a library that trains with it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from memsize.analysis.explain.snapshot_file import Block, Entry, Frame, Segment, Stack
from memsize.records.explanation import How
from memsize.records.roles import ROLES, Role

Stage = Literal[
    "model", "data", "forward", "recomputation", "backward", "optimizer", "buckets", "workspace", "other", "unrecorded"
]
"""Where a run stands: ``other`` is a place that no rule knows, ``unrecorded`` a stack that was not recorded."""

_RULES: Final[tuple[tuple[Stage, str], ...]] = (
    ("workspace", r"at::cuda::(getNewWorkspace|getCUDABlasLtWorkspace)|\brun_conv_plan\b"),
    ("buckets", r"c10d::Reducer::|torch/nn/parallel/distributed\.py:(_ddp_init_helper|__init__)"),
    ("backward", r"torch::autograd::(Engine|generated|AccumulateGrad|AccumulateGradFunctor|PyNode)::"),
    ("backward", r"torch::autograd::accumulateGrad|torch/autograd/graph\.py:_engine_run_backward"),
    ("optimizer", r"torch/optim/\w+\.py:|(apex/optimizers|apex/contrib/optimizers|bitsandbytes/optim)/"),
    ("optimizer", r"deepspeed/(ops/\w+|runtime/zero|runtime/fp16)/\w*(optim|adam|stage|zero)\w*\.py:"),
    ("model", r"torch/nn/modules/module\.py:(_apply|load_state_dict|_load_from_state_dict)$"),
    ("model", r"torch/nn/modules/\w+\.py:(__init__|reset_parameters)$|torch/nn/(init|parameter)\.py:"),
    ("model", r"transformers/(modeling_utils|core_model_loading)\.py:|accelerate/utils/modeling\.py:"),
    ("model", r"torch/serialization\.py:|safetensors/\w+\.py:"),
    ("data", r"torch/utils/data/|accelerate/utils/operations\.py:|transformers/trainer\.py:_prepare_inputs?$"),
    ("data", r"lightning/\w+/utilities/apply_func\.py:|:(move_data_to_device|transfer_batch_to_device)$"),
    ("forward", r"torch/nn/modules/module\.py:(_call_impl|_wrapped_call_impl|_slow_forward|__call__)$"),
    ("forward", r"torch/nn/functional\.py:"),
)
"""A stage, and what a frame of it looks like as ``file:name``. The innermost frame that any rule knows decides."""

_STAGES: Final = re.compile("|".join(f"(?P<{stage}_{n}>{text})" for n, (stage, text) in enumerate(_RULES)))
_RECOMPUTED: Final = re.compile(r"torch/utils/checkpoint\.py:(backward|unpack_hook|recompute_fn|recompute)$")
_NODE: Final = re.compile(r"torch::autograd::generated::(\w+)::apply")
_PYTORCH: Final = re.compile(r"(^|/)(site-packages|dist-packages)/torch/|torchinductor_\w+/|^<")
_CELLS: Final = ("<ipython", "In [")
"""How a cell of a notebook begins that is named as a file: by IPython, by memsize."""
_LIBRARY: Final = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3\.\d+|torchinductor_\w+)/|^<|^/usr/lib/")


class StackSummary(NamedTuple):
    """The stage of a stack, the line above PyTorch that allocates (``"modeling_llama.py:216"``), the function of that
    line, and the program's own line that led to it, if that is another one.
    """

    stage: Stage
    line: str | None
    function: str
    called_from: str | None = None


def summarize(stack: Stack) -> StackSummary:
    """Summarize `stack`. In backward there may be no Python call: the function is then autograd's node."""
    if not stack:
        return StackSummary("unrecorded", None, "")
    calls = python_calls(stack)
    if not calls:
        nodes = (_NODE.search(frame.name) for frame in stack)
        return StackSummary(_stage(stack), None, next((node[1] for node in nodes if node), ""))
    above = next((call for call in calls if not _call(call).pytorch), calls[0])
    own = next((call for call in calls if not _call(call).library), above)
    return StackSummary(
        _stage(stack), line=line_of(above), function=above.name, called_from=line_of(own) if own != above else None
    )


def python_calls(stack: Stack) -> tuple[Frame, ...]:
    """The calls of Python in a stack, innermost first."""
    return tuple(frame for frame in stack if _call(frame).python)


def line_of(frame: Frame) -> str:
    """A call as ``"train.py:41"``."""
    return f"{_path(frame).rpartition('/')[2]}:{frame.line}"


def own_calls(stack: Stack) -> tuple[str, ...]:
    """The calls of a stack above PyTorch, outermost first, as ``"train.py:41 main"``."""
    return tuple(f"{line_of(call)} {call.name}" for call in reversed(python_calls(stack)) if not _call(call).pytorch)


class _Call(NamedTuple):
    """The stage of the rule that matches a frame (None: no rule does), whether the frame recomputes a forward, and
    whether it is a call of Python, inside PyTorch, inside any library.
    """

    stage: Stage | None
    recomputes: bool
    python: bool
    pytorch: bool
    library: bool


@lru_cache(maxsize=1 << 14)
def _call(frame: Frame) -> _Call:
    """Classify `frame`. Cached: a snapshot has some hundred different frames, in ten thousands of stacks."""
    path = _path(frame)
    call = f"{path}:{frame.name}"
    match = _STAGES.search(call)
    stage = None if match is None or match.lastgroup is None else _RULES[int(match.lastgroup.rpartition("_")[2])][0]
    python = frame.filename.endswith(".py") or frame.filename.startswith(_CELLS)
    # A forward inside of a backward is that of activation checkpointing.
    recomputes = stage == "backward" or bool(_RECOMPUTED.search(call))
    return _Call(stage, recomputes, python, bool(_PYTORCH.search(path)), bool(_LIBRARY.search(path)))


def _path(frame: Frame) -> str:
    return frame.filename.replace("\\", "/")


def _stage(stack: Stack) -> Stage:
    stage: Stage = "other"
    for call in map(_call, stack):
        if stage == "forward":
            if call.recomputes:
                return "recomputation"
        elif call.stage is not None:
            stage = call.stage
            if stage != "forward":
                return stage
    return stage


EARLIER: Final = -1
"""When a block was made that is older than the history."""
_ALIVE: Final = "active_allocated"


class Life(NamedTuple):
    """A block that a tensor has or had: its bytes, and the entries in which it was made and given up (None: never)."""

    bytes: int
    address: int
    born: int
    died: int | None
    stack: Stack
    category: str
    region: str = ""

    def alive_at(self, entry: int) -> bool:
        return self.born <= entry and (self.died is None or self.died > entry)


@dataclass(frozen=True)
class History:
    """The history of one device: the allocator's entries, and its segments at the end."""

    entries: tuple[Entry, ...]
    segments: tuple[Segment, ...]
    _summaries: dict[int, StackSummary] = field(default_factory=dict)

    def summary(self, stack: Stack) -> StackSummary:
        """Summarize a stack. Many blocks share one, so the results are cached."""
        summary = self._summaries.get(id(stack))
        if summary is None:
            summary = self._summaries[id(stack)] = summarize(stack)
        return summary

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """All blocks that the snapshot knows of."""
        opened: dict[int, int] = {}
        deaths: dict[int, int] = {}
        older: list[Life] = []
        for index, entry in enumerate(self.entries):
            if entry.action == "alloc":
                opened[entry.address] = index
            elif entry.action == "free_requested" and entry.address in opened:
                deaths[opened.pop(entry.address)] = index
            elif entry.action == "free_requested":
                older.append(Life(entry.size, entry.address, EARLIER, index, (), ""))
        left = {block.address: block for block in self._blocks() if block.state == _ALIVE}
        lasting = {index for address, index in opened.items() if address in left}
        allocated = [
            Life(entry.size, entry.address, index, deaths.get(index), entry.stack, entry.category, entry.region)
            for index, entry in enumerate(self.entries)
            if entry.action == "alloc" and (index in deaths or index in lasting)
        ]
        older_and_alive = [Life(b.requested, a, EARLIER, None, b.stack, "") for a, b in left.items() if a not in opened]
        return (*older, *older_and_alive, *allocated)

    @cached_property
    def recorded(self) -> bool:
        """Whether anything was recorded: what was done, or at least the stacks of the blocks that are left."""
        return bool(self.entries) or any(block.stack for block in self._blocks())

    def _blocks(self) -> Iterable[Block]:
        return (block for segment in self.segments for block in segment.blocks)

    @cached_property
    def requested(self) -> tuple[int, ...]:
        """Live bytes after each entry."""
        change = [0] * (len(self.entries) + 1)
        for life in self.lives:
            change[max(life.born, 0)] += life.bytes
            if life.died is not None:
                change[life.died] -= life.bytes
        return tuple(accumulate(change[: max(len(self.entries), 1)]))

    def reserved_at(self, entry: int) -> int:
        """The bytes of all segments after an entry: those at the end, and what happened to them since."""
        later = self.entries[entry + 1 :]
        taken = sum(change.size for change in later if change.action in ("segment_alloc", "segment_map"))
        returned = sum(change.size for change in later if change.action in ("segment_free", "segment_unmap"))
        return sum(segment.size for segment in self.segments) - taken + returned

    @cached_property
    def _starts(self) -> dict[Stage, list[int]]:
        starts: dict[Stage, list[int]] = {}
        for index, entry in enumerate(self.entries):
            if entry.action == "alloc":
                starts.setdefault(self.stage(entry.stack), []).append(index)
        return starts

    def stage(self, stack: Stack) -> Stage:
        """The stage of the run in which a stack of the history was recorded."""
        stage = self.summary(stack).stage
        return "backward" if stage == "unrecorded" and self._python_only else stage

    @cached_property
    def _python_only(self) -> bool:
        """Whether stacks were recorded, and those of Python alone: then the thread of backward has none."""
        innermost = [entry.stack[0].filename for entry in self.entries if entry.action == "alloc" and entry.stack]
        return bool(innermost) and all(filename.endswith(".py") for filename in innermost)

    @cached_property
    def failures(self) -> list[int]:
        """The entries of requests that failed."""
        return [index for index, entry in enumerate(self.entries) if entry.action == "oom"]

    def next_of(self, stages: Sequence[Stage], entry: int) -> int | None:
        """The first entry after `entry` in which a block is made at one of `stages`."""
        entries = []
        for stage in stages:
            starts = self._starts.get(stage, [])
            position = bisect_right(starts, entry)
            entries += starts[position : position + 1]
        return min(entries, default=None)


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
    """A role, or a key of `memsize.records.roles.UNKNOWN`; and how it is known."""

    name: str
    how: How


def categories(history: History) -> tuple[Category, ...]:
    """The category of each of the history's lives, in their order."""
    names = [_category(history, life) for life in history.lives]
    # The sizes that trained parameters have: those of their gradients, or of one line's optimizer state.
    gradients = Counter[int]()
    states: dict[Stack, Counter[int]] = {}
    for life, category in zip(history.lives, names, strict=True):
        if category.name == "gradient":
            gradients[life.bytes] += 1
        elif category.name == "optimizer state":
            states.setdefault(life.stack, Counter())[life.bytes] += 1
    weights = gradients or max(states.values(), key=Counter.total, default=Counter())
    for index, (life, category) in enumerate(zip(history.lives, names, strict=True)):
        if category.name == "earlier" and weights[life.bytes] > 0:
            weights[life.bytes] -= 1
            names[index] = Category("parameter", "size")
    return tuple(names)


def _category(history: History, life: Life) -> Category:
    if life.category in _RECORDED:
        return Category(_RECORDED[life.category], "recorded")
    older = life.born == EARLIER
    stage = history.summary(life.stack).stage if older else history.stage(life.stack)
    if stage == "unrecorded":
        return Category("earlier" if older and history.recorded else "elsewhere", "unknown")
    if stage in _BY_STACK:
        return Category(_BY_STACK[stage], "stack")
    if stage not in _OUTLIVES:
        return Category("elsewhere", "unknown")
    role, ends = _OUTLIVES[stage]
    if older or any(frame.name == "_init_group" for frame in life.stack):
        return Category(role, "stack")
    end, failed = history.next_of(ends, life.born), next((one for one in history.failures if one > life.born), None)
    if failed is not None and (end is None or failed < end) and not (life.died is not None and life.died < failed):
        end = None  # what an error gives up might have lived on
    elif life.died is not None and (end is None or life.died < end):
        return Category("temporary", "lifetime")
    if end is not None or stage == "forward":
        return Category(role, "lifetime")
    # The stage had not ended: what it had made may be what it leaves, or only on the way.
    if stage == "backward":
        return Category("backward", "unknown")
    updates = any(frame.name.startswith(("_multi_tensor_", "_single_tensor_", "_fused_")) for frame in life.stack)
    return Category("temporary" if updates else role, "stack")
