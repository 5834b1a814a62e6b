"""Blocks of the user's own code that wait for a later step: an evaluation or a checkpoint under ``step % 500 == 0``.

Once the steps are made, the program need not come that far: where it arrives at the condition of such a block, a trace
function moves it to the first line of the block, as debuggers do. So the block runs in its own frame, with its own
variables, where the script would run it. A condition counts only if a later value of a counter makes it true, within
the range of its loop: not ``args.evaluate and step % 500 == 0`` where nothing is to be evaluated.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations
from math import lcm
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from memsize.processes.user_code import is_users, line_of, parsed, users_frames, variables

_EVALUATES_OR_SAVES: Final = re.compile(
    r"eval|valid|test|sampl|generat|infer|predict|save|checkpoint|ckpt|no_grad", re.IGNORECASE
)
"""Names of functions that evaluate a model or write a checkpoint."""
_HARMLESS: Final = re.compile(r"^(len|int|min|max|bool|hasattr|getattr|isinstance)$|main|master|rank", re.IGNORECASE)
"""Names of functions that a condition may call while it is tried with other values."""
_LATER: Final = "_later_value"
_FARTHEST: Final = 1_000_000
"""Code that waits for more steps than this was switched off by that number."""

Trace: TypeAlias = Callable[[FrameType, str, Any], Any]


class Block(NamedTuple):
    """The body of an ``if`` in the source `file`, from line `start` on; `loops` are those around it, innermost first.

    Its condition compares `counters`. `evaluates`: it evaluates the model or writes a checkpoint; `breaks`: it ends the
    innermost loop.
    """

    file: str
    start: int
    test: ast.expr
    loops: tuple[ast.For | ast.While, ...]
    counters: tuple[str, ...]
    evaluates: bool
    breaks: bool


class WaitingBlocks:
    """Runs the blocks that wait for a later step, once `watch` was called; `arrived` is called before each.

    `note` takes a sentence on each, of which `steps` are the training steps made so far.
    """

    def __init__(self, arrived: Callable[[], None], note: Callable[[str], object], steps: Callable[[], int]) -> None:
        self._arrived = arrived
        self._note = note
        self._steps = steps
        self._tracing: Trace | None = None
        self._ran = set[tuple[str, int]]()
        self._ahead = False
        self._traced = cache(_may_wait)

    def watch(self, until: CodeType) -> None:
        """Begin with the calls that are running, up to that of `until`, unless a debugger traces this thread."""
        if self._tracing is not None or sys.gettrace() is not None:
            return
        self._tracing = self._call
        for frame in users_frames(until):
            if self._traced(frame.f_code):
                frame.f_trace = self._line
                names = {**frame.f_globals, **dict(variables(frame))}
                self._ahead = self._ahead or any(self._waits(block, names) for block in _passed(frame))
        sys.settrace(self._tracing)

    def needs_batch(self) -> bool:
        """Whether a block waits at the top of the training loop, which another batch begins; true at most once."""
        ahead, self._ahead = self._ahead, False
        return ahead

    def close(self) -> None:
        if self._tracing is not None and sys.gettrace() == self._tracing:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        return self._line if self._traced(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Trace:
        block = _blocks(frame.f_code.co_filename).get(frame.f_lineno) if event == "line" else None
        # Python takes a frame's variables from this dict when a trace function returns: `variables` must not clear it.
        local = frame.f_locals
        if block is not None and (value := self._waits(block, {**frame.f_globals, **local})):
            self._ran.add((block.file, frame.f_lineno))
            self._arrived()
            line, (counter, at, _) = line_of(block.file, frame.f_lineno), value
            self._note(f"the code under {line} waits for {counter} = {at}: here it runs after step {self._steps()}")
            frame.f_lineno = block.start  # type: ignore[misc]  # a trace function may
        return self._line

    def _waits(self, block: Block, names: dict[str, Any]) -> tuple[str, int, int] | None:
        ran = (block.file, block.test.lineno) in self._ran
        return _comes_true(block, names) if block.evaluates and not ran else None


def batches_to_break(frame: FrameType) -> int | None:
    """How many more batches the loop has that a call is at the head of, before a count of them ends it; None: nobody
    knows.
    """
    names, line = {**frame.f_globals, **dict(variables(frame))}, frame.f_lineno
    ends = (block for block in _blocks(frame.f_code.co_filename).values() if block.breaks)
    inside = (block for block in ends if block.loops and block.loops[0].lineno == line)
    left = [value[2] for block in inside if (value := _comes_true(block, names))]
    return min(left, default=None)


def _may_wait(code: CodeType) -> bool:
    """Whether a block may wait in the code of a function of the user's."""
    file = code.co_filename
    lines = [line for *_, line in code.co_lines() if line is not None]
    waiting = [line for line, block in _blocks(file).items() if block.evaluates] if is_users(file) else []
    return bool(lines) and any(min(lines) <= line <= max(lines) for line in waiting)


def _blocks(file: str) -> dict[int, Block]:
    """The blocks of a source that may wait for a later step, by the lines of their conditions."""
    tree = parsed(file)
    return {} if tree is None else _blocks_of(tree, file)


@cache
def _blocks_of(tree: ast.Module, file: str) -> dict[int, Block]:
    return {block.test.lineno: block for block in _within(tree, file, (), _counters(tree))}


def _within(
    node: ast.AST, file: str, loops: tuple[ast.For | ast.While, ...], counters: frozenset[str]
) -> Iterator[Block]:
    if isinstance(node, ast.For | ast.While):
        loops = (node, *loops)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        loops = ()
    elif isinstance(node, ast.If):
        start = node.body[0].lineno
        called = (_name(call.func) for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call))
        evaluates = start > (node.test.end_lineno or start) and any(map(_EVALUATES_OR_SAVES.search, called))
        breaks = any(isinstance(part, ast.Break) for part in node.body)
        counted = tuple(name for name in _names(node.test) if name in counters)
        if counted and (evaluates or breaks):
            yield Block(file, start, node.test, loops, counted, evaluates, breaks)
    for child in ast.iter_child_nodes(node):
        yield from _within(child, file, loops, counters)


def _counters(tree: ast.Module) -> frozenset[str]:
    """The variables and attributes of a source that a loop or an addition counts up."""
    counted = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            counted.add(ast.unparse(node.target))
        elif isinstance(node, ast.For):
            counted.update(part.id for part in ast.walk(node.target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add):
            target = ast.unparse(node.targets[0])
            counted |= {target} & {ast.unparse(side) for side in (node.value.left, node.value.right)}
    return frozenset(counted)


def _names(test: ast.expr) -> list[str]:
    """The variables and attributes that an expression reads, each once."""
    values = (part for part in ast.walk(test) if isinstance(part, ast.Name | ast.Attribute))
    return list(dict.fromkeys(map(ast.unparse, values)))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _passed(frame: FrameType) -> Iterator[Block]:
    """The blocks in the loop that the call is in which it has passed already."""
    for line, block in _blocks(frame.f_code.co_filename).items():
        if block.loops and block.loops[0].lineno <= line < frame.f_lineno <= (block.loops[0].end_lineno or 0):
            yield block


def _comes_true(block: Block, names: dict[str, Any]) -> tuple[str, int, int] | None:
    """A counter, the value of it that makes the condition true, and how far that is; None where it is true or stays
    false.
    """
    test = block.test
    if any(isinstance(part, ast.Call) and not _HARMLESS.search(_name(part.func)) for part in ast.walk(test)):
        return None
    # To compare tensors would allocate on the GPU what the script does not.
    if any(isinstance(names.get(name), torch.Tensor) for name in _names(test)) or _evaluated(test, names):
        return None
    for counter in block.counters:
        now = _evaluated(ast.parse(counter, mode="eval").body, names)
        if type(now) is not int:
            continue
        later = _Later(counter).visit(ast.parse(ast.unparse(test), mode="eval").body)
        for value in _candidates(test, counter, now, names):
            if _evaluated(later, {**names, _LATER: value}) and _reached(block, counter, value, names):
                return counter, value, value - now
    return None


def _candidates(test: ast.expr, counter: str, now: int, names: dict[str, Any]) -> list[int]:
    """Values above `now`, at which a comparison with the other numbers of `test` may change."""
    parts = [part for part in ast.walk(test) if isinstance(part, ast.expr) and counter not in _names(part)]
    values = {value for part in parts if type(value := _evaluated(part, names)) is int and 0 < value <= _FARTHEST}
    values |= {lcm(*pair) for pair in combinations(sorted(values)[-4:], 2)}
    exact = {multiple * value for value in values for multiple in (1, now // value + 1, now // value + 2)}
    exact |= {-(-floor // value) * value for floor in values for value in values}
    return sorted(n for at in exact for n in (at - 1, at, at + 1) if now < n <= now + _FARTHEST)


def _reached(block: Block, counter: str, value: int, names: dict[str, Any]) -> bool:
    """Whether the loops around a block let its counter come to this value, as far as they say."""
    for loop in block.loops:
        if isinstance(loop, ast.While):
            if counter in _names(loop.test):
                more = _Later(counter).visit(ast.parse(ast.unparse(loop.test), mode="eval").body)
                return _evaluated(more, {**names, _LATER: value - 1}) is not False
        elif counter in {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}:
            return _last(loop.iter, value, names)
    return True


def _last(over: ast.expr, value: int, names: dict[str, Any]) -> bool:
    """Whether a loop over ``range(…)`` or ``enumerate(…)`` comes to the value; true where nobody knows."""
    if not (isinstance(over, ast.Call) and over.args):
        return True
    if _name(over.func) == "range":
        arguments = [_evaluated(argument, names) for argument in over.args]
        return value in range(*arguments) if all(type(argument) is int for argument in arguments) else True
    if _name(over.func) != "enumerate":  # a progress bar around one
        return _last(over.args[0], value, names)
    source = over.args[0]
    while isinstance(source, ast.Call) and source.args:
        source = source.args[0]
    with suppress(TypeError):
        return value < len(_evaluated(source, names))
    return True


def _evaluated(part: ast.expr, names: dict[str, Any]) -> Any:
    """The value of an expression of the user's; None where it has none here."""
    if isinstance(part, ast.Call) and not _HARMLESS.search(_name(part.func)):
        return None
    with suppress(Exception):
        return eval(compile(ast.Expression(ast.fix_missing_locations(part)), "<condition>", "eval"), names)
    return None


class _Later(ast.NodeTransformer):
    """Replaces a counter in an expression by the name of its later value."""

    def __init__(self, counter: str) -> None:
        self._counter = counter

    def _replaced(self, node: ast.expr) -> ast.AST:
        return ast.Name(_LATER, ast.Load()) if ast.unparse(node) == self._counter else self.generic_visit(node)

    visit_Name = visit_Attribute = _replaced  # noqa: N815
