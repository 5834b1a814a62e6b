"""Reads a pickle's instructions and runs none: what it would build, as `memsize.checkpoint.values`.

Source of the instructions: CPython's ``Lib/pickletools.py``, protocols 0 to 5. A pickle is a program for a small stack
machine. This machine knows the containers and the plain values; each function and class that the program names stays a
name, and what it would be called with is kept beside it (`memsize.checkpoint.policy` says which names are refused).

Time and memory are bounded by the limits below, whatever the program does.
"""

from __future__ import annotations

import pickle as opcodes
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

from memsize.checkpoint.policy import canonical, is_refused
from memsize.checkpoint.rebuild import meaning
from memsize.checkpoint.texts import printable
from memsize.checkpoint.values import Blob, Composite, Dict, Global, Object, StorageValue, TensorValue
from memsize.errors import CheckpointError

MOST_STEPS = 16_000_000
"""Instructions of one pickle. A tensor takes about 35 of them."""

MOST_CONTAINERS = 4_000_000
"""Lists, tuples, dictionaries and objects of one pickle. A tensor takes about five."""

LONGEST_KEPT = 1024
"""Bytes of a text that is kept; a longer one becomes a `Blob`, which costs nothing."""

_LONGEST_NUMBER = 128
_LONGEST_LINE = 64 * 1024

Value = Any
Made = Callable[[Any, tuple[Value, ...]], Value]


class _Mark:
    """What a MARK instruction leaves on the stack."""


_MARK = _Mark()
_DAMAGE = (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error)


class Machine:
    """Reads one pickle after another from `file`, at whose position they start; none of them goes beyond `end`.

    `name` is what messages call the file.
    """

    def __init__(self, file: BinaryIO, end: int, name: str) -> None:
        self._file = file
        self._end = end
        self._read = file.read
        self._name = name
        self._steps = MOST_STEPS
        self._room = MOST_CONTAINERS
        self._stack: list[Value] = []
        self._memo: dict[int, Value] = {}
        self.mentioned: dict[str, None] = {}
        """The names that were mentioned so far, in order."""
        self.storages: dict[str, StorageValue] = {}
        """The storages that were mentioned so far, each as it was first."""

    def load(self) -> Value:
        """The value of the next pickle. Raises `CheckpointError` when it is refused, damaged or too large."""
        self._stack, self._memo = [], {}
        start = self._file.tell()
        try:
            value = self._run()
        except _DAMAGE as error:
            place = self._file.tell() - start
            raise self._damaged(f"near byte {place:,} of it ({type(error).__name__})") from error
        except RecursionError as error:
            raise self._damaged("it is nested without end") from error
        if self._file.tell() > self._end:
            raise self._damaged("it ends too early")
        return value

    def _run(self) -> Value:
        read, stop = self._read, b"."
        for _ in range(self._steps):
            code = read(1)
            if code == stop:
                return self._stack.pop()
            if not code:
                raise self._damaged("it ends too early")
            _ACTIONS[code](self)
            self._steps -= 1
        raise self._damaged(f"it has more than {MOST_STEPS:,} instructions")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._name} has a pickle that cannot be read: {why}")

    def _made(self, value: Value) -> None:
        """Push a new container."""
        self._room -= 1
        if self._room < 0:
            raise self._damaged(f"it builds more than {MOST_CONTAINERS:,} objects")
        self._stack.append(value)

    def _exactly(self, count: int) -> bytes:
        if count < 0:
            raise self._damaged("it holds a text of negative length")
        data = self._read(count)
        if len(data) != count:
            raise self._damaged("it ends too early")
        return data

    def _line(self) -> bytes:
        line = self._file.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise self._damaged("it holds a line without end")
        return line[:-1]

    def _popped(self) -> list[Value]:
        """What stands above the last mark, without the mark."""
        stack = self._stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise self._damaged("it has no mark where it needs one")
        items = stack[place + 1 :]
        del stack[place:]
        return items

    # Plain values

    def _text(self, length: int) -> None:
        if length > LONGEST_KEPT:
            self._blob(length, text=True)
        else:
            self._stack.append(self._exactly(length).decode("utf-8", "replace"))

    def _bytes(self, length: int) -> None:
        if length > LONGEST_KEPT:
            self._blob(length, text=False)
        else:
            self._stack.append(self._exactly(length))

    def _blob(self, length: int, text: bool) -> None:
        start = self._file.tell()
        if start + length > self._end:
            raise self._damaged("it ends too early")
        self._file.seek(start + length)
        self._stack.append(Blob(start, length, text))

    def _decimal(self) -> int:
        """The number on the next line, in digits."""
        line = self._line()
        if len(line) > _LONGEST_NUMBER:
            raise self._damaged("it holds a number of too many digits")
        return int(line.removesuffix(b"L"))

    def _long(self, length: int) -> None:
        if not 0 <= length <= _LONGEST_NUMBER:
            raise self._damaged("it holds a number of too many digits")
        self._stack.append(int.from_bytes(self._exactly(length), "little", signed=True))

    # Names and calls

    def _global(self, module: Value, name: Value) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise self._damaged("it looks up a name that is not a text")
        path = canonical(module, name)
        if is_refused(module, name):
            raise CheckpointError(
                f"{self._name} is refused: its pickle names {printable(path, 80)}, which runs code or reaches beyond "
                "the file when it is loaded. Nothing was run. Do not load it with torch.load(weights_only=False)"
            )
        path = printable(path)
        self.mentioned.setdefault(path)
        self._stack.append(Global(path))

    def _call(self, made_by: Value, args: Value) -> None:
        if not isinstance(args, tuple):
            raise self._damaged("it calls something with what is not a tuple")
        if not isinstance(made_by, Global | Object):
            raise self._damaged("it calls what is not a function")
        if isinstance(made_by, Object):
            raise CheckpointError(
                f"{self._name} is refused: its pickle calls what another call returned, as only code that hides what "
                "it does has reason to. Nothing was run. Do not load it with torch.load(weights_only=False)"
            )
        # A call may copy what it is given: that counts as made, too.
        self._room -= sum(len(arg) for arg in args if isinstance(arg, list | tuple)) if len(args) < 16 else len(args)
        self._made(meaning(made_by, args))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Object):
            target.states.append(state)
        elif isinstance(target, Composite):
            target.inner.append(("", state))

    def _persistent(self) -> None:
        match self._stack.pop():
            case ("storage", Global() as kind, str(key), _, int(elements), *rest) if elements >= 0:
                first = StorageValue(key, storage_dtype(kind), elements)
                self.storages.setdefault(key, first)
                self._stack.append(_viewed(first, rest))
            case ("module", Global() as kind, *_):
                self._stack.append(kind)
            case _:
                raise self._damaged("it points to something outside it that is not a storage")

    # Filling containers

    def _append(self, items: list[Value]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Object):
            target.items.extend(items)
        elif not isinstance(target, TensorValue | Composite):
            raise self._damaged("it adds items to what holds none")

    def _set(self, flat: list[Value]) -> None:
        target = self._stack[-1]
        if len(flat) % 2:
            raise self._damaged("it sets a key without a value")
        pairs = zip(flat[::2], flat[1::2], strict=True)
        if isinstance(target, Dict):
            target.pairs.extend(pairs)
        elif isinstance(target, Object):
            target.states.append(Dict(list(pairs)))
        else:
            raise self._damaged("it sets keys of what has none")

    def _remember(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _recall(self, key: int) -> None:
        self._stack.append(self._memo[key])


def storage_dtype(kind: Global) -> str:
    """The dtype of a storage class; raises KeyError when it is none."""
    from memsize.checkpoint.dtypes import STORAGES

    return STORAGES[kind.path.rpartition(".")[2]]


def _viewed(storage: StorageValue, rest: list[Value]) -> StorageValue:
    """A storage, or as PyTorch before 0.4 wrote it, the view ``(key, offset, size)`` of one."""
    match rest:
        case [(_, int(offset), int(size))] if 0 <= offset <= offset + size <= storage.elements:
            return StorageValue(storage.key, storage.dtype, size, offset)
        case [tuple(), *_]:
            raise ValueError("not a view of a storage")
    return storage


# The instructions

_ACTIONS: dict[bytes, Callable[[Machine], None]] = {}
Action = Callable[[Machine], None]


def _action(*codes: bytes) -> Callable[[Action], Action]:
    def register(action: Action) -> Action:
        for code in codes:
            _ACTIONS[code] = action
        return action

    return register


def _constant(code: bytes, value: Value) -> None:
    _ACTIONS[code] = lambda machine: machine._stack.append(value)


def _packed(code: bytes, layout: str) -> None:
    unpack, size = struct.Struct(layout).unpack, struct.calcsize(layout)
    _ACTIONS[code] = lambda machine: machine._stack.append(unpack(machine._read(size))[0])


def _sized(layout: str, take: Callable[[Machine, int], None], *codes: bytes) -> None:
    """Instructions that are followed by a length and then by that many bytes, or by a memo's key."""
    unpack, size = struct.Struct(layout).unpack, struct.calcsize(layout)

    def run(machine: Machine) -> None:
        take(machine, unpack(machine._read(size))[0])

    for code in codes:
        _ACTIONS[code] = run


_constant(opcodes.NONE, None)
_constant(opcodes.NEWTRUE, True)
_constant(opcodes.NEWFALSE, False)
_constant(opcodes.EMPTY_TUPLE, ())
_constant(opcodes.MARK, _MARK)
_packed(opcodes.BININT, "<i")
_packed(opcodes.BININT1, "<B")
_packed(opcodes.BININT2, "<H")
_packed(opcodes.BINFLOAT, ">d")
_sized("<B", Machine._text, opcodes.SHORT_BINUNICODE, opcodes.SHORT_BINSTRING)
_sized("<I", Machine._text, opcodes.BINUNICODE)
_sized("<i", Machine._text, opcodes.BINSTRING)
_sized("<Q", Machine._text, opcodes.BINUNICODE8)
_sized("<B", Machine._bytes, opcodes.SHORT_BINBYTES)
_sized("<I", Machine._bytes, opcodes.BINBYTES)
_sized("<Q", Machine._bytes, opcodes.BINBYTES8, opcodes.BYTEARRAY8)
_sized("<B", Machine._long, opcodes.LONG1)
_sized("<i", Machine._long, opcodes.LONG4)
_sized("<B", Machine._remember, opcodes.BINPUT)
_sized("<I", Machine._remember, opcodes.LONG_BINPUT)
_sized("<B", Machine._recall, opcodes.BINGET)
_sized("<I", Machine._recall, opcodes.LONG_BINGET)


@_action(opcodes.PROTO)
def _proto(machine: Machine) -> None:
    version = machine._exactly(1)[0]
    if version > opcodes.HIGHEST_PROTOCOL:
        raise machine._damaged(f"it is of protocol {version}")


@_action(opcodes.FRAME)
def _frame(machine: Machine) -> None:
    machine._exactly(8)


@_action(opcodes.MEMOIZE)
def _memoize(machine: Machine) -> None:
    machine._memo[len(machine._memo)] = machine._stack[-1]


@_action(opcodes.PUT)
def _put(machine: Machine) -> None:
    machine._remember(machine._decimal())


@_action(opcodes.GET)
def _get(machine: Machine) -> None:
    machine._recall(machine._decimal())


@_action(opcodes.POP)
def _pop(machine: Machine) -> None:
    machine._stack.pop()


@_action(opcodes.DUP)
def _dup(machine: Machine) -> None:
    machine._stack.append(machine._stack[-1])


@_action(opcodes.POP_MARK)
def _pop_mark(machine: Machine) -> None:
    machine._popped()


@_action(opcodes.INT, opcodes.LONG)
def _decimal(machine: Machine) -> None:
    machine._stack.append(machine._decimal())


@_action(opcodes.FLOAT)
def _float(machine: Machine) -> None:
    machine._stack.append(float(machine._line()[:_LONGEST_NUMBER]))


@_action(opcodes.STRING)
def _string(machine: Machine) -> None:
    machine._stack.append(machine._line()[1:-1].decode("utf-8", "replace"))


@_action(opcodes.UNICODE)
def _unicode(machine: Machine) -> None:
    machine._stack.append(machine._line().decode("raw-unicode-escape", "replace"))


@_action(opcodes.EMPTY_LIST)
def _empty_list(machine: Machine) -> None:
    machine._made([])


@_action(opcodes.EMPTY_DICT)
def _empty_dict(machine: Machine) -> None:
    machine._made(Dict())


@_action(opcodes.EMPTY_SET)
def _empty_set(machine: Machine) -> None:
    machine._made([])


@_action(opcodes.LIST, opcodes.FROZENSET)
def _list(machine: Machine) -> None:
    machine._made(machine._popped())


@_action(opcodes.TUPLE)
def _tuple(machine: Machine) -> None:
    machine._made(tuple(machine._popped()))


def _tuple_of(count: int) -> Action:
    def run(machine: Machine) -> None:
        items = tuple(machine._stack[-count:])
        if len(items) != count:
            raise IndexError(count)
        del machine._stack[-count:]
        machine._made(items)

    return run


_ACTIONS[opcodes.TUPLE1], _ACTIONS[opcodes.TUPLE2], _ACTIONS[opcodes.TUPLE3] = map(_tuple_of, (1, 2, 3))


@_action(opcodes.DICT)
def _dict(machine: Machine) -> None:
    flat = machine._popped()
    machine._made(Dict())
    machine._set(flat)


@_action(opcodes.APPEND)
def _append_one(machine: Machine) -> None:
    item = machine._stack.pop()
    machine._append([item])


@_action(opcodes.APPENDS, opcodes.ADDITEMS)
def _append_many(machine: Machine) -> None:
    machine._append(machine._popped())


@_action(opcodes.SETITEM)
def _set_one(machine: Machine) -> None:
    value, key = machine._stack.pop(), machine._stack.pop()
    machine._set([key, value])


@_action(opcodes.SETITEMS)
def _set_many(machine: Machine) -> None:
    machine._set(machine._popped())


@_action(opcodes.GLOBAL)
def _global(machine: Machine) -> None:
    module, name = machine._line().decode("utf-8", "replace"), machine._line().decode("utf-8", "replace")
    machine._global(module, name)


@_action(opcodes.STACK_GLOBAL)
def _stack_global(machine: Machine) -> None:
    name, module = machine._stack.pop(), machine._stack.pop()
    machine._global(module, name)


@_action(opcodes.REDUCE, opcodes.NEWOBJ)
def _reduce(machine: Machine) -> None:
    args, made_by = machine._stack.pop(), machine._stack.pop()
    machine._call(made_by, args)


@_action(opcodes.NEWOBJ_EX)
def _new_object(machine: Machine) -> None:
    keywords, args, made_by = machine._stack.pop(), machine._stack.pop(), machine._stack.pop()
    machine._call(made_by, (*args, keywords))


@_action(opcodes.OBJ)
def _object(machine: Machine) -> None:
    made_by, *args = machine._popped()
    machine._call(made_by, tuple(args))


@_action(opcodes.INST)
def _instance(machine: Machine) -> None:
    _global(machine)
    made_by = machine._stack.pop()
    machine._call(made_by, tuple(machine._popped()))


@_action(opcodes.BUILD)
def _build(machine: Machine) -> None:
    machine._build()


@_action(opcodes.BINPERSID)
def _persistent(machine: Machine) -> None:
    machine._persistent()


@_action(opcodes.PERSID)
def _persistent_line(machine: Machine) -> None:
    raise machine._damaged("it points to something outside it that is not a storage")


@_action(opcodes.EXT1, opcodes.EXT2, opcodes.EXT4)
def _extension(machine: Machine) -> None:
    raise machine._damaged("it names functions by numbers that only the program which wrote it knows")


@_action(opcodes.NEXT_BUFFER, opcodes.READONLY_BUFFER)
def _buffer(machine: Machine) -> None:
    raise machine._damaged("it needs data that is kept outside it")
