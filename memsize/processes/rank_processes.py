"""Messages between the ranks of a job, each of which runs in a process of its own, and only if another waits for it.

The switchboard is a process that is forked before anything runs. Where a rank waits for a message of another, it forks
a process that runs as that one, as far as the message, and from there on when another is asked for. Messages are kept
in the order in which they were sent, so that whoever runs as their receiver gets them all.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final

from memsize.processes.ctrl_c import raise_waiting
from memsize.processes.workers import can_fork, end_processes, forked, silent, use_pytorch

RunAs = Callable[[int], object]
"""Runs what this process would run, as another rank."""
Receiver = int | tuple[int, ...]
"""A rank, or the ranks of a group that gets the same."""
_End = Connection
_LONGEST: Final = 80
"""Bytes of a folder's path that leave room for a name within it."""
_Place = tuple[int, Receiver]
"""Who sends messages, and to whom."""
_PATIENCE: Final = 0.1
"""Seconds after which a Ctrl-C that came meanwhile is noticed."""


class _Reached:
    """How this process reaches the switchboard: at an address, or where it runs for others, by a line it was given."""

    address: str | None = None
    line: RankConnection | None = None


_reached: Final = _Reached()


@contextlib.contextmanager
def opened(run_as: RunAs, prepare: Callable[[], object]) -> Iterator[None]:
    """While open, and where the platform forks, what runs as a rank in this process, or in one that is forked from it,
    can be sent messages of the others. `run_as` runs another, and `prepare` what all of them need, once. Has no effect
    inside itself.
    """
    if not can_fork() or _reached.line is not None or _reached.address is not None:
        yield
        return
    usual = gettempdir()
    # Paths of sockets may have 104 to 108 characters, which that of a job's own folder may exceed.
    with TemporaryDirectory(dir=usual if len(os.fsencode(usual)) <= _LONGEST else "/tmp") as folder:
        address = str(Path(folder) / "ranks")
        with socket.socket(socket.AF_UNIX) as calls:
            calls.bind(address)
            calls.listen()
            process = forked(lambda: _Switchboard(calls, run_as, prepare).serve())
        _reached.address = address
        try:
            yield
        finally:
            _reached.address = None
            end_processes(process)


@contextlib.contextmanager
def connected(rank: int) -> Iterator[RankConnection | None]:
    """While open, what `rank`, which runs in this process, sends and receives by; None where no switchboard is open."""
    if _reached.line is not None or _reached.address is None:
        yield _reached.line
        return
    with Client(_reached.address, family="AF_UNIX") as end:
        end.send(rank)
        yield RankConnection(end, pauses=False)


class RankConnection:
    """The connection of a rank to the switchboard; it `pauses` where it runs for others only."""

    def __init__(self, end: _End, pauses: bool) -> None:
        self._end = end
        self._pauses = pauses

    def send(self, receiver: Receiver, message: bytes) -> None:
        """Send, and go on at once; what runs for others only goes on when more is asked of it."""
        self._end.send(("send", receiver, message))
        if self._pauses:
            self._end.recv()

    def receive(self, sender: int, receiver: Receiver) -> bytes | None:
        """The next message of `sender` to a rank or a group; None where none will come: it ended or waits itself."""
        self._end.send(("receive", sender, receiver))
        while not self._end.poll(_PATIENCE):
            raise_waiting()
        message: bytes | None = self._end.recv()
        return message


@dataclass
class _Rank:
    """A process that runs as rank `number`; it `pauses` after each message if it only runs for other ranks."""

    number: int
    pauses: bool
    is_paused: bool = False
    sent: Counter[Receiver] = field(default_factory=Counter)
    received: Counter[_Place] = field(default_factory=Counter)
    awaited: _Place | None = None
    """Whose next message it waits for."""


class _Switchboard:
    def __init__(self, calls: socket.socket, run_as: RunAs, prepare: Callable[[], object]) -> None:
        self._calls, self._run_as, self._prepare = calls, run_as, prepare
        self._ranks: dict[_End, _Rank] = {}
        self._started: set[int] = set()
        self._messages = defaultdict[_Place, list[bytes]](list)

    def serve(self) -> None:
        """Pass on messages, until this process is ended."""
        while True:
            ready = wait([self._calls, *self._ranks])
            for end in [connection for connection in self._ranks if connection in ready]:
                self._hear(end)
            if self._calls in ready:
                called: _End = Connection(self._calls.accept()[0].detach())
                self._ranks[called] = _Rank(called.recv(), pauses=False)
            # Send what is waited for; where it isn't there, run its sender, or let it go on.
            for end, rank in tuple(self._ranks.items()):
                if rank.awaited is not None:
                    self._find(end, rank, rank.awaited)
            if not any(rank.awaited is None and not rank.is_paused for rank in self._ranks.values()):
                for end, rank in self._ranks.items():
                    if rank.awaited is not None:
                        self._answer(end, rank, None)

    def _hear(self, end: _End) -> None:
        rank = self._ranks[end]
        try:
            kind, other, *message = end.recv()
        except (EOFError, OSError):
            del self._ranks[end]
            return
        if kind == "receive":
            rank.awaited = other, message[0]
            return
        rank.is_paused = rank.pauses
        rank.sent[other] += 1
        messages = self._messages[rank.number, other]
        if rank.sent[other] > len(messages):  # else another has run as this rank before, and sent the same
            messages += message

    def _find(self, end: _End, rank: _Rank, awaited: _Place) -> None:
        messages, position, sender = self._messages[awaited], rank.received[awaited], awaited[0]
        running = {end: other for end, other in self._ranks.items() if other.number == sender}
        if position < len(messages):
            rank.received[awaited] += 1
            self._answer(end, rank, messages[position])
        elif running:
            for its_end, other in running.items():
                if other.is_paused:
                    other.is_paused = False
                    _tell(its_end, None)
        elif sender not in self._started:
            self._start(sender)
        else:
            self._answer(end, rank, None)

    def _answer(self, end: _End, rank: _Rank, message: bytes | None) -> None:
        rank.awaited = None
        _tell(end, message)

    def _start(self, number: int) -> None:
        if not self._started:
            self._prepare()
        self._started.add(number)
        here, there = Pipe()
        forked(partial(self._run, number, there, (here, *self._ranks)))
        there.close()
        self._ranks[here] = _Rank(number, pauses=True)

    def _run(self, number: int, end: _End, others: tuple[_End, ...]) -> None:
        self._calls.close()
        for other in others:
            other.close()
        use_pytorch()
        _reached.line = RankConnection(end, pauses=True)
        with silent():
            self._run_as(number)


def _tell(end: _End, message: bytes | None) -> None:
    with contextlib.suppress(OSError):  # of one that is gone, which is heard next
        end.send(message)
