"""Reads a pickle's instructions and runs none: what it would build, as `memsize.checkpoint.values`.

Source of the instructions: CPython's ``Lib/pickletools.py``, protocols 0 to 5. A pickle is a program for a small stack
machine (`memsize.checkpoint.stack`), and `memsize.checkpoint.policy` says which names it may mention. Time and memory
are bounded, whatever the program does.
"""

from __future__ import annotations

import pickle as opcodes
import struct
from collections.abc import Callable

from memsize.checkpoint.stack import LONGEST_NUMBER, MARK, Stack, Value
from memsize.checkpoint.values import Dict

MOST_STEPS = 16_000_000
"""Instructions of one file's pickles. A tensor takes about 35 of them."""

_DAMAGE = (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error)

Action = Callable[[Stack], None]
_ACTIONS: dict[bytes, Action] = {}


class Machine(Stack):
    """Reads one pickle after another, from where `file` stands."""

    _steps = MOST_STEPS

    def load(self) -> Value:
        """The value of the next pickle. Raises `CheckpointError` when it is refused, damaged or too large."""
        self.items, self.memo = [], {}
        start = self._file.tell()
        try:
            value = self._run()
        except _DAMAGE as error:
            place = self._file.tell() - start
            raise self.damaged(f"near byte {place:,} of it ({type(error).__name__})") from error
        except RecursionError as error:
            raise self.damaged("it is nested without end") from error
        if self._file.tell() > self._end:
            raise self.damaged("it ends too early")
        return value

    def _run(self) -> Value:
        read, stop = self.read, b"."
        for _ in range(self._steps):
            code = read(1)
            if code == stop:
                return self.items.pop()
            if not code:
                raise self.damaged("it ends too early")
            _ACTIONS[code](self)
            self._steps -= 1
        raise self.damaged(f"it has more than {MOST_STEPS:,} instructions")


def _action(*codes: bytes) -> Callable[[Action], Action]:
    def register(action: Action) -> Action:
        for code in codes:
            _ACTIONS[code] = action
        return action

    return register


def _constant(code: bytes, value: Value) -> None:
    _ACTIONS[code] = lambda stack: stack.items.append(value)


def _packed(code: bytes, layout: str) -> None:
    unpack, size = struct.Struct(layout).unpack, struct.calcsize(layout)
    _ACTIONS[code] = lambda stack: stack.items.append(unpack(stack.read(size))[0])


def _sized(layout: str, take: Callable[[Stack, int], None], *codes: bytes) -> None:
    """Instructions that are followed by a length and then by that many bytes, or by a memo's key."""
    unpack, size = struct.Struct(layout).unpack, struct.calcsize(layout)

    def run(stack: Stack) -> None:
        take(stack, unpack(stack.read(size))[0])

    for code in codes:
        _ACTIONS[code] = run


_constant(opcodes.NONE, None)
_constant(opcodes.NEWTRUE, True)
_constant(opcodes.NEWFALSE, False)
_constant(opcodes.EMPTY_TUPLE, ())
_constant(opcodes.MARK, MARK)
_packed(opcodes.BININT, "<i")
_packed(opcodes.BININT1, "<B")
_packed(opcodes.BININT2, "<H")
_packed(opcodes.BINFLOAT, ">d")
_sized("<B", Stack.take_text, opcodes.SHORT_BINUNICODE, opcodes.SHORT_BINSTRING)
_sized("<I", Stack.take_text, opcodes.BINUNICODE)
_sized("<i", Stack.take_text, opcodes.BINSTRING)
_sized("<Q", Stack.take_text, opcodes.BINUNICODE8)
_sized("<B", Stack.take_bytes, opcodes.SHORT_BINBYTES)
_sized("<I", Stack.take_bytes, opcodes.BINBYTES)
_sized("<Q", Stack.take_bytes, opcodes.BINBYTES8, opcodes.BYTEARRAY8)
_sized("<B", Stack.take_long, opcodes.LONG1)
_sized("<i", Stack.take_long, opcodes.LONG4)
_sized("<B", Stack.remember, opcodes.BINPUT)
_sized("<I", Stack.remember, opcodes.LONG_BINPUT)
_sized("<B", Stack.recall, opcodes.BINGET)
_sized("<I", Stack.recall, opcodes.LONG_BINGET)


@_action(opcodes.PROTO)
def _proto(stack: Stack) -> None:
    version = stack.exactly(1)[0]
    if version > opcodes.HIGHEST_PROTOCOL:
        raise stack.damaged(f"it is of protocol {version}")


@_action(opcodes.FRAME)
def _frame(stack: Stack) -> None:
    stack.exactly(8)


@_action(opcodes.MEMOIZE)
def _memoize(stack: Stack) -> None:
    stack.memo[len(stack.memo)] = stack.items[-1]


@_action(opcodes.PUT)
def _put(stack: Stack) -> None:
    stack.remember(stack.decimal())


@_action(opcodes.GET)
def _get(stack: Stack) -> None:
    stack.recall(stack.decimal())


@_action(opcodes.POP)
def _pop(stack: Stack) -> None:
    stack.items.pop()


@_action(opcodes.DUP)
def _dup(stack: Stack) -> None:
    stack.items.append(stack.items[-1])


@_action(opcodes.POP_MARK)
def _pop_mark(stack: Stack) -> None:
    stack.popped()


@_action(opcodes.INT, opcodes.LONG)
def _decimal(stack: Stack) -> None:
    stack.items.append(stack.decimal())


@_action(opcodes.FLOAT)
def _float(stack: Stack) -> None:
    stack.items.append(float(stack.line()[:LONGEST_NUMBER]))


@_action(opcodes.STRING)
def _string(stack: Stack) -> None:
    stack.items.append(stack.line()[1:-1].decode("utf-8", "replace"))


@_action(opcodes.UNICODE)
def _unicode(stack: Stack) -> None:
    stack.items.append(stack.line().decode("raw-unicode-escape", "replace"))


@_action(opcodes.EMPTY_LIST)
def _empty_list(stack: Stack) -> None:
    stack.push_new([])


@_action(opcodes.EMPTY_DICT)
def _empty_dict(stack: Stack) -> None:
    stack.push_new(Dict())


@_action(opcodes.EMPTY_SET)
def _empty_set(stack: Stack) -> None:
    stack.push_new([])


@_action(opcodes.LIST, opcodes.FROZENSET)
def _list(stack: Stack) -> None:
    stack.push_new(stack.popped())


@_action(opcodes.TUPLE)
def _tuple(stack: Stack) -> None:
    stack.push_new(tuple(stack.popped()))


def _tuple_of(count: int) -> Action:
    def run(stack: Stack) -> None:
        items = tuple(stack.items[-count:])
        if len(items) != count:
            raise IndexError(count)
        del stack.items[-count:]
        stack.push_new(items)

    return run


_ACTIONS[opcodes.TUPLE1], _ACTIONS[opcodes.TUPLE2], _ACTIONS[opcodes.TUPLE3] = map(_tuple_of, (1, 2, 3))


@_action(opcodes.DICT)
def _dict(stack: Stack) -> None:
    flat = stack.popped()
    stack.push_new(Dict())
    stack.set_keys(flat)


@_action(opcodes.APPEND)
def _append_one(stack: Stack) -> None:
    item = stack.items.pop()
    stack.add([item])


@_action(opcodes.APPENDS, opcodes.ADDITEMS)
def _append_many(stack: Stack) -> None:
    stack.add(stack.popped())


@_action(opcodes.SETITEM)
def _set_one(stack: Stack) -> None:
    value, key = stack.items.pop(), stack.items.pop()
    stack.set_keys([key, value])


@_action(opcodes.SETITEMS)
def _set_many(stack: Stack) -> None:
    stack.set_keys(stack.popped())


@_action(opcodes.GLOBAL)
def _global(stack: Stack) -> None:
    module, name = stack.line().decode("utf-8", "replace"), stack.line().decode("utf-8", "replace")
    stack.look_up(module, name)


@_action(opcodes.STACK_GLOBAL)
def _stack_global(stack: Stack) -> None:
    name, module = stack.items.pop(), stack.items.pop()
    stack.look_up(module, name)


@_action(opcodes.REDUCE, opcodes.NEWOBJ)
def _reduce(stack: Stack) -> None:
    args, made_by = stack.items.pop(), stack.items.pop()
    stack.call(made_by, args)


@_action(opcodes.NEWOBJ_EX)
def _new_object(stack: Stack) -> None:
    keywords, args, made_by = stack.items.pop(), stack.items.pop(), stack.items.pop()
    stack.call(made_by, (*args, keywords))


@_action(opcodes.OBJ)
def _object(stack: Stack) -> None:
    made_by, *args = stack.popped()
    stack.call(made_by, tuple(args))


@_action(opcodes.INST)
def _instance(stack: Stack) -> None:
    _global(stack)
    made_by = stack.items.pop()
    stack.call(made_by, tuple(stack.popped()))


@_action(opcodes.BUILD)
def _build(stack: Stack) -> None:
    stack.build()


@_action(opcodes.BINPERSID)
def _persistent(stack: Stack) -> None:
    stack.persistent()


@_action(opcodes.PERSID)
def _persistent_line(stack: Stack) -> None:
    raise stack.damaged("it points to something outside it that is not a storage")


@_action(opcodes.EXT1, opcodes.EXT2, opcodes.EXT4)
def _extension(stack: Stack) -> None:
    raise stack.damaged("it names functions by numbers that only the program which wrote it knows")


@_action(opcodes.NEXT_BUFFER, opcodes.READONLY_BUFFER)
def _buffer(stack: Stack) -> None:
    raise stack.damaged("it needs data that is kept outside it")
