"""Messages between ranks in processes of their own: who runs, as far as what, and what comes of those that end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process import RankConnection, can_fork, connected, opened

pytestmark = pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
Rank = Callable[[RankConnection], None]


@contextmanager
def job(ranks: dict[int, Rank], prepare: Callable[[], object] = lambda: None) -> Iterator[None]:
    def run_as(number: int) -> None:
        with connected(number) as line:
            assert line is not None
            ranks[number](line)

    with opened(run_as, prepare):
        yield


def received(receiver: int, *senders: int) -> list[bytes | None]:
    with connected(receiver) as line:
        assert line is not None
        return [line.receive(sender, receiver) for sender in senders]


def first(line: RankConnection) -> None:
    line.send(1, b"0")
    line.send(3, b"from 0")


def second(line: RankConnection) -> None:
    message = line.receive(0, 1)
    assert message is not None
    line.send(2, message + b"1")


def test_a_rank_runs_when_it_is_asked_and_asks_others_itself() -> None:
    with job({0: first, 1: second}):
        assert received(2, 1) == [b"01"]


def test_a_job_may_keep_its_files_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path may have about a hundred characters."""
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with job({0: first, 1: second}):
        assert received(2, 1) == [b"01"]


def test_a_message_may_come_from_one_that_waits_for_this_rank() -> None:
    def echo(line: RankConnection) -> None:
        line.send(0, (line.receive(0, 1) or b"") * 2)

    with job({1: echo}), connected(0) as line:
        assert line is not None
        line.send(1, b"a")
        assert line.receive(1, 0) == b"aa"


def test_each_runs_only_as_far_as_it_is_asked(tmp_path: Path) -> None:
    def steps(line: RankConnection) -> None:
        for number in range(3):
            (tmp_path / f"step {number}").touch()
            line.send(0, b"%d" % number)

    def done() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    with job({1: steps}, prepare=(tmp_path / "prepared").touch), connected(0) as line:
        assert line is not None and done() == []
        assert line.receive(1, 0) == b"0" and done() == ["prepared", "step 0"]
        assert line.receive(1, 0) == b"1" and done() == ["prepared", "step 0", "step 1"]


def test_messages_are_kept_for_all_that_run_as_their_receiver() -> None:
    with job({0: first, 1: second}):
        assert received(2, 1) == received(2, 1) == [b"01"]
        assert received(3, 0) == [b"from 0"]


def test_what_a_rank_sends_twice_is_one_message() -> None:
    with job({0: first, 1: second}):
        assert received(2, 1) == [b"01"]
        with connected(0) as line:
            assert line is not None
            first(line)
        assert received(1, 0, 0) == [b"0", None]


def test_a_rank_that_ends_or_fails_sends_nothing_more() -> None:
    def fails(line: RankConnection) -> None:
        raise ValueError

    with job({1: lambda line: line.send(0, b"all"), 2: fails}):
        assert received(0, 1, 1, 2, 2) == [b"all", None, None, None]


def test_ranks_that_wait_for_one_another_are_told() -> None:
    def waits(line: RankConnection) -> None:
        line.send(0, b"got none" if line.receive(0, 1) is None else b"")

    with job({1: waits}):
        assert received(0, 1) == [None]


def test_outside_of_a_job_there_is_no_line() -> None:
    with connected(0) as line:
        assert line is None


def test_what_is_sent_to_a_group_reaches_each_of_it() -> None:
    def tells(line: RankConnection) -> None:
        line.send((0, 1, 2), b"all")

    with job({0: tells}):
        for number in (1, 2):
            with connected(number) as line:
                assert line is not None
                assert line.receive(0, (0, 1, 2)) == b"all"
