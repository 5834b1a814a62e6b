"""What a pickle's instructions do: the stack that they work on, the memo, and the limits that they stay within.

A function or a class that the program names stays a name, and what it would be called with is kept beside it.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from memsize.checkpoint.dtypes import STORAGES
from memsize.checkpoint.policy import canonical, is_refused
from memsize.checkpoint.rebuild import meaning
from memsize.checkpoint.texts import printable
from memsize.checkpoint.values import Blob, Composite, Dict, Global, Object, StorageValue, TensorValue
from memsize.errors import CheckpointError

MOST_CONTAINERS = 4_000_000
"""Lists, tuples, dictionaries and objects of one file's pickles. A tensor takes about five."""

_FREE = 64
"""Items in the arguments of a call that do not count as made anew; a tensor has about ten."""

LONGEST_KEPT = 1024
"""Bytes of a text that is kept; a longer one becomes a `Blob`, which costs nothing."""

LONGEST_NUMBER = 128
"""Bytes, or digits, of a number."""

_LONGEST_LINE = 64 * 1024

Value = Any


class _Mark:
    """What a MARK instruction leaves on the stack."""


MARK = _Mark()


class Stack:
    """The `items` that instructions put on each other and take away. What they need is read from `file`, not beyond
    `end`; `name` is what messages call the file.
    """

    def __init__(self, file: BinaryIO, end: int, name: str) -> None:
        self._file = file
        self._end = end
        self.read = file.read
        self._name = name
        self._room = MOST_CONTAINERS
        self.items: list[Value] = []
        self.memo: dict[int, Value] = {}
        self.mentioned: dict[str, None] = {}
        """The names that were mentioned so far, in order."""
        self.storages: dict[str, StorageValue] = {}
        """The storages that were mentioned so far, each as it was first."""

    def damaged(self, why: str) -> CheckpointError:
        """The error of a pickle that no program writes."""
        return CheckpointError(f"{self._name} has a pickle that cannot be read: {why}")

    def push_new(self, value: Value) -> None:
        """Push a new container."""
        self._room -= 1
        if self._room < 0:
            raise self.damaged(f"it builds more than {MOST_CONTAINERS:,} objects")
        self.items.append(value)

    def exactly(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count < 0:
            raise self.damaged("it holds a text of negative length")
        data = self.read(count)
        if len(data) != count:
            raise self.damaged("it ends too early")
        return data

    def line(self) -> bytes:
        """The next line, without its end."""
        line = self._file.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise self.damaged("it holds a line without end")
        return line[:-1]

    def popped(self) -> list[Value]:
        """What stands above the last mark, without the mark."""
        stack = self.items
        place = len(stack) - 1
        while stack[place] is not MARK:
            place -= 1
            if place < 0:
                raise self.damaged("it has no mark where it needs one")
        items = stack[place + 1 :]
        del stack[place:]
        return items

    # Plain values

    def take_text(self, length: int) -> None:
        """Push a text of `length` bytes."""
        if length > LONGEST_KEPT:
            self._blob(length, text=True)
        else:
            self.items.append(self.exactly(length).decode("utf-8", "replace"))

    def take_bytes(self, length: int) -> None:
        """Push `length` bytes."""
        if length > LONGEST_KEPT:
            self._blob(length, text=False)
        else:
            self.items.append(self.exactly(length))

    def _blob(self, length: int, text: bool) -> None:
        start = self._file.tell()
        if start + length > self._end:
            raise self.damaged("it ends too early")
        self._file.seek(start + length)
        self.items.append(Blob(start, length, text))

    def decimal(self) -> int:
        """The number on the next line, in digits."""
        line = self.line()
        if len(line) > LONGEST_NUMBER:
            raise self.damaged("it holds a number of too many digits")
        return int(line.removesuffix(b"L"))

    def take_long(self, length: int) -> None:
        """Push a number of `length` bytes."""
        if not 0 <= length <= LONGEST_NUMBER:
            raise self.damaged("it holds a number of too many digits")
        self.items.append(int.from_bytes(self.exactly(length), "little", signed=True))

    # Names and calls

    def look_up(self, module: Value, name: Value) -> None:
        """Push a name; raises `CheckpointError` when it is one of those that are refused."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise self.damaged("it looks up a name that is not a text")
        path = canonical(module, name)
        if is_refused(module, name):
            raise CheckpointError(
                f"{self._name} is refused: its pickle names {printable(path, 80)}, which runs code or reaches beyond "
                "the file when it is loaded. Nothing was run. Do not load it with torch.load(weights_only=False)"
            )
        path = printable(path)
        self.mentioned.setdefault(path)
        self.items.append(Global(path))

    def call(self, made_by: Value, args: Value) -> None:
        """Push what a call stands for. Nothing is called."""
        if not isinstance(args, tuple):
            raise self.damaged("it calls something with what is not a tuple")
        if not isinstance(made_by, Global | Object):
            raise self.damaged("it calls what is not a function")
        if isinstance(made_by, Object):
            raise CheckpointError(
                f"{self._name} is refused: its pickle calls what another call returned, as only code that hides what "
                "it does has reason to. Nothing was run. Do not load it with torch.load(weights_only=False)"
            )
        # A call may copy what it is given: much of that counts as made, too.
        given = len(args) + sum(len(arg) for arg in args if isinstance(arg, list | tuple))
        self._room -= given if given > _FREE else 0
        self.push_new(meaning(made_by, args))

    def build(self) -> None:
        """Give an object its state. What a tensor or a dictionary gets is its attributes: not kept."""
        state, target = self.items.pop(), self.items[-1]
        if isinstance(target, Object):
            target.states.append(state)
        elif isinstance(target, Composite):
            target.inner.append(("", state))

    def persistent(self) -> None:
        """Put what a persistent id points to in its place: a storage, or a class whose source stands beside it."""
        match self.items.pop():
            case ("storage", Global() as kind, str(key), _, int(elements), *rest) if elements >= 0:
                first = StorageValue(key, storage_dtype(kind), elements)
                self.storages.setdefault(key, first)
                self.items.append(_viewed(first, rest))
            case ("module", Global() as kind, *_):
                self.items.append(kind)
            case _:
                raise self.damaged("it points to something outside it that is not a storage")

    # Filling containers

    def add(self, items: list[Value]) -> None:
        """Add `items` to the list on top."""
        target = self.items[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Object):
            target.items.extend(items)
        elif not isinstance(target, TensorValue | Composite):
            raise self.damaged("it adds items to what holds none")

    def set_keys(self, flat: list[Value]) -> None:
        """Set keys of the dictionary on top: a key, its value, the next key, and so on."""
        target = self.items[-1]
        if len(flat) % 2:
            raise self.damaged("it sets a key without a value")
        pairs = zip(flat[::2], flat[1::2], strict=True)
        if isinstance(target, Dict):
            target.pairs.extend(pairs)
        elif isinstance(target, Object):
            target.states.append(Dict(list(pairs)))
        else:
            raise self.damaged("it sets keys of what has none")

    def remember(self, key: int) -> None:
        """Keep what is on top in the memo."""
        self.memo[key] = self.items[-1]

    def recall(self, key: int) -> None:
        """Push what the memo has."""
        self.items.append(self.memo[key])


def storage_dtype(kind: Global) -> str:
    """The dtype of a storage class; raises KeyError when it is none."""
    return STORAGES[kind.path.rpartition(".")[2]]


def _viewed(storage: StorageValue, rest: list[Value]) -> StorageValue:
    """A storage, or as PyTorch before 0.4 wrote it, the view ``(key, offset, size)`` of one."""
    match rest:
        case [(_, int(offset), int(size))] if 0 <= offset <= offset + size <= storage.elements:
            return StorageValue(storage.key, storage.dtype, size, offset)
        case [tuple(), *_]:
            raise ValueError("not a view of a storage")
    return storage
