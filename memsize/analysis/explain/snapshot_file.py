"""A memory snapshot from its file: what `torch.cuda.memory._dump_snapshot` writes, as plain records.

The file is a pickle of dictionaries, lists, texts and numbers. It is read by the bounded reader of checkpoints, which
runs nothing, and one that names a class or a function is no snapshot. Sources: PyTorch's
torch/csrc/cuda/memory_snapshot.cpp for the fields, torch/cuda/memory.py for what they mean.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from memsize.checkpoints.pickle_values import Blob, Dict
from memsize.checkpoints.source import Source, opened
from memsize.checkpoints.unpickler import Unpickler
from memsize.errors import CheckpointError, InputError
from memsize.printable import printable

MOST_RECORDS: Final = 500_000
"""Blocks and entries of a small file that are read; a larger file may have more in proportion."""
MOST_WORK: Final = 64_000_000
"""What the unpickler may take for a small file, in the units of `memsize.checkpoints.source`. Half of what it
makes are stacks, which are kept once.
"""
_DEEPEST: Final = 512
"""Frames of a stack that are read, from the innermost on."""
_LONGEST: Final = 300
_LARGEST: Final = 1 << 62


class Frame(NamedTuple):
    """One call of a stack. A call of C++ has a `filename` that is empty, ``??``, or no Python file."""

    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} {self.name}"


Stack = tuple[Frame, ...]
"""The calls that led to an allocation, innermost first; empty where none were recorded."""


class Block(NamedTuple):
    """A piece of a segment. `requested` is what a tensor asked for, of `size` bytes."""

    address: int
    size: int
    requested: int
    state: str
    stack: Stack


_REGION = "Torch-Compiled Region: "


class Segment(NamedTuple):
    """Memory that the allocator has taken from CUDA."""

    device: int
    address: int
    size: int
    blocks: tuple[Block, ...]


class Entry(NamedTuple):
    """One thing that the allocator did. An ``oom`` has the bytes that CUDA had `free`, and no address.

    `region` is the code of torch.compile that ran (``"0/0"``), which ``compile_context=True`` records; or empty.
    """

    action: str
    address: int
    size: int
    stack: Stack
    category: str
    free: int
    region: str = ""


class Snapshot(NamedTuple):
    """A file's content: the segments when it was written, and what led to them, device by device.

    `whole` is false where the history is longer than memsize reads; it is left out then.
    """

    name: str
    segments: tuple[Segment, ...]
    histories: tuple[tuple[Entry, ...], ...]
    whole: bool


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """The snapshot at `path`; raises `InputError` for a file that is none, is damaged, or names code."""
    try:
        with opened(Path(os.path.expanduser(path))) as source:
            start = source.read(0, min(source.size, 2), "its first bytes")
            if start[:1] != b"\x80":
                raise _no_snapshot(source.name, "it is not a pickle")
            unpickler = _Unpickler(source)
            root = unpickler.load()
            if isinstance(root, list):  # torch.cuda.memory_snapshot()
                root = Dict(["segments", root])
            if not isinstance(root, Dict):
                raise _no_snapshot(source.name, f"it holds a {type(root).__name__.lower()}")
            return _Reader(source).snapshot(_fields(root), whole=not unpickler.cut)
    except CheckpointError as error:
        raise InputError(str(error)) from None


def _no_snapshot(name: str, why: str) -> InputError:
    return InputError(f"{name} is not a memory snapshot of torch.cuda.memory._dump_snapshot: {why}")


class _Unpickler(Unpickler):
    """Reads plain values alone. Of a history that is too long it keeps the segments, which stand before it."""

    cut = False
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(Unpickler.dispatch)

    def __init__(self, source: Source) -> None:
        # What is looked at ahead is copied each time: a small buffer.
        self._ahead = io.BufferedReader(io.FileIO(source.file.fileno(), closefd=False), 4096)
        self._ahead.seek(0)
        super().__init__(source, source.size, self._ahead)
        self._runs: dict[bytes, tuple[Any, ...]] = {}
        self._stacks: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self.budget.pickle = self.budget.grown(MOST_WORK)

    def load_reference(self) -> None:
        """BINGET: what the memo has under a number of one byte, and what follows it."""
        self._follow(pickle.BINGET + self.read(1))

    def load_long_reference(self) -> None:
        """LONG_BINGET: what the memo has under a number of four bytes, and what follows it."""
        self._follow(pickle.LONG_BINGET + self.read(4))

    def _follow(self, first: bytes) -> None:
        """Push what a run of references stands for. A stack is a list of frames that were there before, and the same
        stacks come again and again: such runs are most of a snapshot.
        """
        match = _REFERENCES.match(self._ahead.peek())
        rest = match[0] if match else b""
        if rest:
            self._ahead.seek(len(rest), os.SEEK_CUR)
        run = first + rest
        values = self._runs.get(run)
        if values is None:
            numbers = [int.from_bytes(reference[1:], "little") for reference in _REFERENCE.findall(run)]
            values = self._runs[run] = tuple(map(self.memo.__getitem__, numbers))
            self.budget.pickle -= 3 * len(values)
        self.budget.pickle -= len(values)
        self.stack += values

    def load_stack(self) -> None:
        """APPENDS: more of a list. The frames of a stack are kept once: a tuple that is the only item of its lists."""
        items = self.stack
        if items and type(items[0]) is Dict and "filename" in items[0].flat and self.metastack[-1][-1:] == [[]]:
            self.stack = [self._stacks.setdefault(tuple(map(id, items)), tuple(items))]
        _extend(self)

    def find_class(self, module: str, name: str) -> Any:
        """Refuse the file: a snapshot has plain values alone."""
        raise _no_snapshot(self._name, f"its pickle names {printable(f'{module}.{name}', 80)}. Nothing was run")

    def exhausted(self) -> CheckpointError:
        """Return the error to raise; where all segments were read, stop with these instead."""
        match self.metastack[1:2]:
            case [["segments", list(segments), "device_traces", *_]]:
                self.cut = True
                raise pickle._Stop(Dict(["segments", segments]))  # type: ignore[attr-defined]
        return super().exhausted()


_extend: Final = Unpickler.dispatch[pickle.APPENDS[0]]
_Unpickler.dispatch[pickle.APPENDS[0]] = _Unpickler.load_stack
_Unpickler.dispatch[pickle.BINGET[0]] = _Unpickler.load_reference
_Unpickler.dispatch[pickle.LONG_BINGET[0]] = _Unpickler.load_long_reference
_REFERENCE: Final = re.compile(rb"h.|j.{4}", re.DOTALL)
_REFERENCES: Final = re.compile(rb"(?:h.|j.{4})+", re.DOTALL)


def _fields(value: Any) -> dict[str, Any]:
    """A dictionary's values by their names. Only texts are hashed, whose hashes no file can foresee."""
    if not isinstance(value, Dict):
        raise ValueError(f"a {type(value).__name__.lower()} where a dictionary should be")
    return {key: item for key, item in value.pairs if type(key) is str}


def _number(value: Any) -> int:
    if type(value) is not int or not -_LARGEST < value < _LARGEST:
        raise ValueError("an invalid size or address")
    return value


def _text(value: Any) -> str:
    return printable(value, _LONGEST) if type(value) is str else "…" if isinstance(value, Blob) else ""


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a {type(value).__name__.lower()} where a list should be")
    return value


class _Reader:
    """Makes the records of one file. What the pickle shares, the records share too."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._left = source.budget.grown(MOST_RECORDS)
        self._frames: dict[int, Frame] = {}
        self._stacks: dict[int, Stack] = {}
        self._texts: dict[int, str] = {}

    def snapshot(self, fields: dict[str, Any], whole: bool) -> Snapshot:
        """The records of the root's `fields`."""
        if "segments" not in fields:
            raise _no_snapshot(self._source.name, "it has no segments")
        try:
            segments = tuple(self._segment(_fields(item)) for item in _items(fields["segments"]))
            traces = _items(fields.get("device_traces", []))
            histories = tuple(tuple(self._entry(_fields(item)) for item in self._counted(trace)) for trace in traces)
        except ValueError as error:
            raise _no_snapshot(self._source.name, f"it has {error}") from None
        return Snapshot(self._source.name, segments=segments, histories=histories, whole=whole)

    def _counted(self, value: Any) -> list[Any]:
        items = _items(value)
        self._left -= len(items)
        if self._left < 0:
            raise ValueError("more entries than memsize reads in a file of this size")
        return items

    def _segment(self, segment: dict[str, Any]) -> Segment:
        """A segment and its blocks; PyTorch before 2.1 leaves out where each block is."""
        start, whole = _number(segment.get("address", 0)), _number(segment.get("total_size"))
        blocks: list[Block] = []
        address = start
        for value in self._counted(segment.get("blocks", [])):
            fields = _fields(value)
            size = _number(fields.get("size"))
            address = _number(fields.get("address", address))
            stack, requested = fields.get("frames"), fields.get("requested_size", size)
            if stack is None and (history := fields.get("history")):
                # PyTorch 2.0: the allocations that the block has served, the newest first.
                newest = _fields(_items(history)[0])
                stack, requested = newest.get("frames"), newest.get("real_size", requested)
            state = self._shared(fields.get("state"))
            blocks.append(Block(address, size, _number(requested), state, self._stack(stack)))
            address += size
        return Segment(_number(segment.get("device", 0)), start, whole, tuple(blocks))

    def _entry(self, fields: dict[str, Any]) -> Entry:
        action = self._shared(fields.get("action"))
        address = _number(fields.get("addr", 0))
        size, free = _number(fields.get("size", 0)), _number(fields.get("device_free", 0))
        stack, category = self._stack(fields.get("frames")), _text(fields.get("category"))
        # "Torch-Compiled Region: 0/0", the name of torch._dynamo.convert_frame for the code of one compilation; or N/A.
        _, _, region = self._shared(fields.get("compile_context")).partition(_REGION)
        return Entry(action, address, size, stack, category, free, region)

    def _shared(self, value: Any) -> str:
        text = self._texts.get(id(value))
        if text is None:
            text = self._texts[id(value)] = _text(value)
        return text

    def _stack(self, value: Any) -> Stack:
        if value is None or value == []:
            return ()
        frames = value[0] if isinstance(_items(value)[0], tuple) else value
        stack = self._stacks.get(id(frames))
        if stack is None:
            stack = self._stacks[id(frames)] = tuple(map(self._frame, frames[:_DEEPEST]))
        return stack

    def _frame(self, value: Any) -> Frame:
        frame = self._frames.get(id(value))
        if frame is None:
            fields = _fields(value)
            name, line = self._shared(fields.get("name")), _number(fields.get("line", 0))
            frame = self._frames[id(value)] = Frame(self._shared(fields.get("filename")), line, name)
        return frame
