"""Python's own unpickler made harmless: names stay names, calls are recorded and never made, work is bounded.

A pickle is a program for a small stack machine. `pickle._Unpickler` is the standard library's machine in Python, with a
table of its instructions. This one replaces every instruction that would import, call or hash something, or read from
outside the file. Its results are the values of `memsize.checkpoints.pickle_values`.

Time and memory are bounded by a budget that every instruction takes from (`memsize.checkpoints.source`): it
follows from the size of the file and has room for the state dict of 100,000 tensors in any file.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, ClassVar

from memsize.checkpoints.pickle_values import (
    STORAGES,
    Blob,
    Composite,
    Dict,
    Global,
    Object,
    StorageValue,
    canonical,
    is_refused,
    meaning,
)
from memsize.checkpoints.source import LONGEST_KEPT, LONGEST_LINE, LONGEST_NUMBER, Source, printable
from memsize.errors import CheckpointError

Value = Any

_FREE = 64
"""Items in the arguments of a call that do not count as copied; a tensor has about ten."""

_CALLED, _SEQUENCES = (Global, Object), (list, tuple)  # ``list | tuple`` is made anew each time, 50 ns

_DAMAGE = (
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    struct.error,
    pickle.UnpicklingError,
)


# Three is not for memory, but for the tenth of a microsecond that even an instruction without a result takes.
_COSTS = [3] * 256
"""The cost of each instruction in the budget: about the memory of its result."""
for _cost, _codes in (
    (5, (pickle.BININT, pickle.BININT2, pickle.INT, pickle.LONG, pickle.FLOAT, pickle.BINFLOAT)),
    (10, (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.STRING, pickle.UNICODE)),
    (8, (pickle.SETITEM, pickle.SETITEMS)),
    (12, (pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_SET, pickle.FROZENSET, pickle.MARK)),
    (16, (pickle.EMPTY_DICT, pickle.DICT, pickle.BINPERSID)),
    (24, (pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.OBJ)),
    (60, (pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.INST)),
):
    for _code in _codes:
        _COSTS[_code[0]] = _cost


class Memo:
    """The values that a pickle refers back to by number. Numbers are in sequence, so a list holds the values; the first
    numbers may be left out, as Python 2 does with 0.
    """

    _HOLE = object()

    def __init__(self) -> None:
        self._values: list[Value] = []

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> Value:
        value = self._values[number] if 0 <= number < len(self._values) else self._HOLE
        if value is self._HOLE:
            raise KeyError(number)
        return value

    def __setitem__(self, number: int, value: Value) -> None:
        values = self._values
        if number == len(values):
            values.append(value)
            return
        if not 0 <= number < max(256, len(values)):
            raise ValueError("numbers out of sequence")
        values += [self._HOLE] * (number + 1 - len(values))
        values[number] = value


_THEIRS: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch
"""The instructions of Python's own machine."""


class Unpickler(pickle._Unpickler):
    """Reads one pickle after another from where `source` stands, not beyond `end`."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_THEIRS)

    def __init__(self, source: Source, end: int, file: BinaryIO | None = None) -> None:
        """`file` holds the pickles when these are compressed in the source."""
        self._file = file or source.file
        super().__init__(self._file, encoding="utf-8", errors="replace")
        self._name, self._end = source.name, end
        self.budget = source.budget
        self.read = self._file.read
        self.mentioned: dict[str, None] = {}
        """The names that were mentioned so far, in order."""
        self.storages: dict[str, StorageValue] = {}
        """The storages mentioned so far, as they were mentioned first."""

    def load(self) -> Value:
        """The value of the next pickle. Raises `CheckpointError` when it is refused, damaged or too large."""
        self.memo: Any = Memo()
        self.metastack: list[list[Value]] = []
        self.stack: list[Value] = []
        self.append = self.stack.append
        start = self._file.tell()
        read, dispatch, costs, budget = self.read, self.dispatch, _COSTS, self.budget
        try:
            while budget.pickle >= 0:
                code = read(1)
                if not code:
                    raise self.damaged("it ends too early")
                budget.pickle -= costs[code[0]]
                dispatch[code[0]](self)
            raise self.exhausted()
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            value = stop.value
        except _DAMAGE as error:
            offset = self._file.tell() - start
            raise self.damaged(f"near byte {offset:,} of it ({type(error).__name__})") from error
        except RecursionError as error:
            raise self.damaged("it is nested without end") from error
        if self._file.tell() > self._end:
            raise self.damaged("it ends too early")
        self.memo = Memo()
        return value

    def exhausted(self) -> CheckpointError:
        """The error of a pickle that goes on when the budget is used up."""
        return self.budget.refusal("pickle")

    def damaged(self, why: str) -> CheckpointError:
        """The error of a pickle that no program writes."""
        return CheckpointError(f"{self._name} has a pickle that cannot be read: {why}")

    def readline(self) -> bytes:
        """The next line, with its end."""
        line = self._file.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise self.damaged("it holds a line without end")
        self.budget.pickle -= len(line) >> 1
        return line

    # What the machine asks for from outside

    def find_class(self, module: str, name: str) -> Global:
        """Return a name without importing it. Raises `CheckpointError` for a refused name."""
        path = canonical(module, name)
        if is_refused(module, name):
            raise CheckpointError(
                f"{self._name} is refused: its pickle names {printable(path, 80)}, which runs code or reaches beyond "
                "the file when it is loaded. Nothing was run. Do not load it with torch.load(weights_only=False)"
            )
        path = printable(path)
        self.mentioned.setdefault(path)
        return Global(path)

    def persistent_load(self, pid: Value) -> Value:
        """The value of a persistent id: a storage, or a class whose source stands beside it."""
        match pid:
            case ("storage", Global() as kind, str(key), _, int(elements), *rest) if elements >= 0:
                first = StorageValue(key, STORAGES[kind.path.rpartition(".")[2]], elements)
                self.storages.setdefault(key, first)
                match rest:  # PyTorch before 0.4 wrote the view ``(key, offset, size)`` of a storage
                    case [(_, int(offset), int(size))] if 0 <= offset <= offset + size <= elements:
                        return first._replace(elements=size, base=offset)
                    case [tuple(), *_]:
                        raise ValueError("not a view of a storage")
                return first
            case ("module", Global() as kind, *_):
                return kind
        raise self.damaged("it points to something outside it that is not a storage")

    def get_extension(self, code: int) -> None:
        """Refuse a function by its number in a registry that other programs may have filled."""
        raise self.damaged("it names functions by numbers that only the program which wrote it knows")

    def call(self, callee: Value, args: Value) -> None:
        """Push the value that a call would have. Nothing is called."""
        if not isinstance(args, tuple):
            raise self.damaged("it calls something with what is not a tuple")
        if not isinstance(callee, _CALLED):
            raise self.damaged("it calls what is not a function")
        if isinstance(callee, Object):
            raise CheckpointError(
                f"{self._name} is refused: its pickle calls what another call returned, as only code that hides what "
                "it does has reason to. Nothing was run. Do not load it with torch.load(weights_only=False)"
            )
        # A call may copy what it is items.
        items = len(args) + sum([len(arg) for arg in args if isinstance(arg, _SEQUENCES)])
        self.budget.pickle -= 3 * items if items > _FREE else 0
        self.append(meaning(callee, args))

    def _instantiate(self, klass: Value, args: list[Value]) -> None:
        self.call(klass, tuple(args))

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.call(self.stack.pop(), args)

    def load_newobj_ex(self) -> None:
        keywords, args, callee = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.call(callee, (*args, keywords))

    def load_build(self) -> None:
        """BUILD: give an object its state. What a tensor or a dictionary gets is its attributes: not kept.

        A dictionary whose attribute is the versions of modules is the state dict of one.
        """
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Object):
            target.states.append(state)
        elif isinstance(target, Composite):
            target.inner.append(("", state))
        elif isinstance(target, Dict) and isinstance(state, Dict):
            target.of_module = state.flat[:1] == ["_metadata"]

    # Plain values

    def load_decimal(self) -> None:
        """INT and LONG: digits, or a truth value."""
        line = self.readline()
        if line in (pickle.TRUE[1:], pickle.FALSE[1:]):
            self.append(line == pickle.TRUE[1:])
        else:
            self.append(self._number(line))

    def load_get(self) -> None:
        self.append(self.memo[self._number(self.readline())])

    def load_put(self) -> None:
        self.memo[self._number(self.readline())] = self.stack[-1]

    def _number(self, line: bytes) -> int:
        if len(line) > LONGEST_NUMBER:
            raise self.damaged("it holds a number of too many digits")
        return int(line.rstrip(b"L\n"))

    def load_dict(self) -> None:
        """DICT: a dictionary of all above the mark."""
        _THEIRS[pickle.LIST[0]](self)
        items = self.stack.pop()
        if len(items) % 2:
            raise self.damaged("it sets a key without a value")
        self.append(Dict(items))

    def load_buffer(self) -> None:
        raise self.damaged("it needs data that is kept outside it")

    def push_data(self, length: int, text: bool) -> None:
        """Push a text or bytes of `length` bytes: a `Blob` if it is long."""
        if length < 0:
            raise self.damaged("it holds a text of negative length")
        start = self._file.tell() if length > LONGEST_KEPT else 0
        if length > LONGEST_KEPT and start + length <= self._end:
            self._file.seek(length, 1)
            self.budget.pickle -= 16
            self.append(Blob(start, length, text))
            return
        data = self.read(length) if length <= LONGEST_KEPT else b""
        if len(data) != length:
            raise self.damaged("it ends too early")
        # Half a unit a byte: one character beyond the usual ones makes Python keep all in four bytes each.
        self.budget.pickle -= 7 + (length >> 1)
        self.append(data.decode("utf-8", "replace") if text else data)

    def push_long(self, length: int) -> None:
        if not 0 <= length <= LONGEST_NUMBER:
            raise self.damaged("it holds a number of too many digits")
        self.budget.pickle -= 5 + (length >> 3)
        self.append(pickle.decode_long(self.read(length)))


def _sized(layout: str, push: Callable[[Unpickler, int], None]) -> Callable[[Unpickler], None]:
    """An instruction that is followed by a length, and then by that many bytes."""
    length = struct.Struct(layout)
    return lambda unpickler: push(unpickler, length.unpack(unpickler.read(length.size))[0])


_text, _bytes = partial(Unpickler.push_data, text=True), partial(Unpickler.push_data, text=False)


_HARMLESS: dict[bytes, Callable[[Any], None]] = {
    pickle.FRAME: lambda machine: machine.read(8),  # a length that only helps reading ahead
    pickle.INT: Unpickler.load_decimal,
    pickle.LONG: Unpickler.load_decimal,
    pickle.LONG1: _sized("<B", Unpickler.push_long),
    pickle.LONG4: _sized("<i", Unpickler.push_long),
    pickle.GET: Unpickler.load_get,
    pickle.PUT: Unpickler.load_put,
    **dict.fromkeys((pickle.SHORT_BINUNICODE, pickle.SHORT_BINSTRING), _sized("<B", _text)),
    pickle.BINUNICODE: _sized("<I", _text),
    pickle.BINSTRING: _sized("<i", _text),
    pickle.BINUNICODE8: _sized("<Q", _text),
    pickle.SHORT_BINBYTES: _sized("<B", _bytes),
    pickle.BINBYTES: _sized("<I", _bytes),
    **dict.fromkeys((pickle.BINBYTES8, pickle.BYTEARRAY8), _sized("<Q", _bytes)),
    # A set is kept as a list, since what would be in it may have no hash, or all the same one.
    pickle.EMPTY_SET: _THEIRS[pickle.EMPTY_LIST[0]],
    pickle.FROZENSET: _THEIRS[pickle.LIST[0]],
    pickle.ADDITEMS: _THEIRS[pickle.APPENDS[0]],
    pickle.EMPTY_DICT: lambda machine: machine.append(Dict()),
    pickle.DICT: Unpickler.load_dict,
    **dict.fromkeys((pickle.REDUCE, pickle.NEWOBJ), Unpickler.load_reduce),
    pickle.NEWOBJ_EX: Unpickler.load_newobj_ex,
    pickle.BUILD: Unpickler.load_build,
    **dict.fromkeys((pickle.NEXT_BUFFER, pickle.READONLY_BUFFER), Unpickler.load_buffer),
}
"""The instructions that this machine runs in another way than Python's own."""


Unpickler.dispatch.update({code[0]: step for code, step in _HARMLESS.items()})
