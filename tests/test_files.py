"""Files are written whole or not at all, and read no further than their kind can be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memsize.errors import OutputError
from memsize.files import MOST_VALUES, check_writable, parse_json, read, write
from tests import records
from tests.conftest import Python


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write(file, "größe\n")
    assert file.read_bytes() == "größe\n".encode()
    with pytest.raises(OutputError, match=r"a\.txt exists already: --force overwrites it"):
        write(file, "other")
    write(file, b"\x00other", overwrite=True)
    assert file.read_bytes() == b"\x00other" and os.listdir(tmp_path) == ["a.txt"]


def test_permissions_are_those_that_open_gives_and_an_old_files_own(tmp_path: Path) -> None:
    write(tmp_path / "a", "")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    os.chmod(tmp_path / "a", 0o640)
    write(tmp_path / "a", "x", overwrite=True)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write(tmp_path / ("x" * 255), "")
    with pytest.raises(OutputError, match="File name too long"):
        write(tmp_path / ("x" * 256), "")


def test_a_name_with_a_null_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*: embedded null"):
        write(tmp_path / "a\0b", "")
    with pytest.raises(OSError, match="embedded null"):
        read(tmp_path / "a\0b", 100)


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_failure_leaves_the_old_file_and_no_litter(
    existing: bool, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a"
    if existing:
        file.write_text("old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError if isinstance(error, OSError) else KeyboardInterrupt):
        write(file, "new", overwrite=existing)
    assert os.listdir(tmp_path) == (["a"] if existing else [])
    assert not existing or file.read_text() == "old"


def test_a_text_that_fails_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[str]:
        yield "new "
        raise ValueError("nothing more")

    file = tmp_path / "a"
    write(file, iter(("old ", "größe")))
    with pytest.raises(ValueError, match="nothing more"):
        write(file, pieces(), overwrite=True)
    assert os.listdir(tmp_path) == ["a"] and file.read_text() == "old größe"


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    monkeypatch.setattr(os, "fsync", lambda _: file.write_text("mine"))
    with pytest.raises(OutputError, match="exists already"):
        write(file, "new")
    assert file.read_text() == "mine" and os.listdir(tmp_path) == ["a"]


def test_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new" and os.listdir(tmp_path) == ["a"]
    monkeypatch.setattr(os, "fsync", lambda _: (tmp_path / "b").write_text("mine"))
    with pytest.raises(OutputError, match="exists already"):
        write(tmp_path / "b", "new")
    assert (tmp_path / "b").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real").write_text("old")
    link, loose = tmp_path / "link", tmp_path / "loose"
    link.symlink_to("there/real")
    loose.symlink_to("there/new")
    write(link, "new", overwrite=True)
    write(loose, "made")
    assert link.is_symlink() and loose.is_symlink()
    assert (tmp_path / "there" / "real").read_text() == "new" and (tmp_path / "there" / "new").read_text() == "made"
    assert sorted(os.listdir(tmp_path / "there")) == ["new", "real"]


def test_a_pipe_and_a_device_are_written_in_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write(tmp_path / "pipe", "through")
    reader.join()
    assert got == [b"through"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    write(Path(os.devnull), "gone")
    assert Path(os.devnull).is_char_device()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_device_is_an_error_in_one_line() -> None:
    with pytest.raises(OutputError, match=r"^cannot write /dev/full: No space left on device$"):
        write(Path("/dev/full"), "x")


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout")
def test_stdout_by_its_name_goes_on_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    code = "from pathlib import Path; from memsize.files import write; write(Path('/dev/stdout'), 'answer\\n')"
    with (tmp_path / "log").open("ab") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "before\nanswer\n" and os.listdir(tmp_path) == ["log"]


def test_a_limit_on_the_size_of_files_leaves_the_old_page(python: Python, tmp_path: Path) -> None:
    """The limit is the process's own: the whole command runs under it."""
    records.toy_report().save(tmp_path / "run.memsize")
    (tmp_path / "page.html").write_text("old")
    before = sorted(os.listdir(tmp_path))
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
        "from memsize.cli import main; main(['report', 'run.memsize', '-o', 'page.html', '--force'])"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cannot write page.html: File too large\n"
    assert (tmp_path / "page.html").read_text() == "old" and sorted(os.listdir(tmp_path)) == before


def test_what_cannot_be_written_shows_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    for path, says in (
        (tmp_path, "is a folder: name a file in it"),
        (tmp_path / "no" / "a", "there is no folder"),
        (tmp_path / "a", "exists already"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(OutputError, match=says):
            check_writable(path)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path / "a")
    check_writable(tmp_path / "b")
    with pytest.raises(OutputError, match=r"cannot write .*a: Permission denied"):
        check_writable(tmp_path / "a", overwrite=True)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(OutputError, match=r"cannot write .*b: Permission denied"):
        check_writable(tmp_path / "b")


# -- reading -----------------------------------------------------------------------------------------------------------


def test_only_files_are_read_and_only_short_ones(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path / "a", 100) == b"x" * 100
    with pytest.raises(OSError, match=r"it has 100 bytes, more than memsize reads \(99\)"):
        read(tmp_path / "a", 99)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a file"):
            read(path, 100)
    with pytest.raises(OSError, match="it is a folder"):
        read(tmp_path, 100)


def test_json_is_parsed_up_to_a_number_of_values() -> None:
    assert parse_json('{"größe": [1, -2.5, null]}'.encode()) == {"größe": [1, -2.5, None]}
    assert parse_json(b"\xef\xbb\xbf[]") == []
    assert len(parse_json(b"[" + b"{}," * 49 + b"{}]", 100)) == 50
    for content, says in (
        (b"[" + b"{}," * 50 + b"{}]", r"about 102 values, more than memsize reads \(100\)"),
        (b"[" * 200_000, "about 200,000 values"),
        (b"[" * 90 + b"1", "delimiter"),
        (b"\xff[]", "not UTF-8"),
        (b"", "Expecting value"),
    ):
        with pytest.raises(ValueError, match=says):
            parse_json(content, 100)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(b"[" * 200_000)


def test_characters_that_widen_a_text_count_as_often() -> None:
    """Python keeps a text with one emoji in four bytes a character, all of it."""
    plain, wide = b'"' + b" " * 6400 + b'"', b'"' + b" " * 1600 + "😀".encode() + b'"'
    assert len(parse_json(plain, 101)) == 6400
    with pytest.raises(ValueError, match="too long: 1,606 bytes"):
        parse_json(wide, 100)


def test_the_values_of_the_largest_files_pass() -> None:
    """110,000 tensors of a safetensors header have twelve values each or fewer."""
    assert MOST_VALUES > 125_000 * 14
