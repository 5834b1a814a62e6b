"""Files that were there before `memsize run`: whatever a script does to them, they are as they were."""

from __future__ import annotations

import os
import sqlite3
import textwrap
from pathlib import Path

import pytest
import torch

import memsize

LINES = {
    "os.chmod": "os.chmod('old.bin', 0o777)",
    "os.truncate": "os.truncate('old.bin', 0)",
    "os.utime": "os.utime('old.bin', (0, 0))",
    "os.open": "os.open('old.bin', os.O_WRONLY)",
    "pathlib": "pathlib.Path('old.bin').replace('folder/moved.bin')",
    "rmtree": "shutil.rmtree('folder')",
    "torch": "torch.from_file('old.bin', shared=True, size=4, dtype=torch.uint8).fill_(9)",
    "storage": "torch.UntypedStorage.from_file('old.bin', True, 4).fill_(9)",
    "sqlite": "with closing(sqlite3.connect('old.db')) as c: c.execute('insert into t values (2)'); c.commit()",
    "sqlite-uri": "with closing(sqlite3.connect('file:old.db?mode=rw', uri=True)) as c: c.execute('drop table t')",
}
"""Statements that change a file, by what they do it with."""

HEAD = "import os, pathlib, shutil, sqlite3, torch\nfrom contextlib import closing\nx = torch.ones(4, device='cuda')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("old.bin").write_bytes(b"mine" * 4)
    Path("folder").mkdir()
    Path("folder/old.txt").write_text("mine", encoding="utf-8")
    with sqlite3.connect("old.db") as database:
        database.execute("create table t (n)")
        database.execute("insert into t values (1)")
    database.close()
    return tmp_path


def contents(folder: Path) -> dict[str, tuple[bytes, int, float]]:
    """What is below `folder`, with modes and times of change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime) for path in files}


def run(folder: Path, text: str) -> memsize.ProgramRun:
    (folder / "train.py").write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    answer = memsize.run(folder / "train.py", gpu="t4")
    assert isinstance(answer, memsize.ProgramRun)
    return answer


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_what_was_there_before_is_not_changed(folder: Path, line: str) -> None:
    (folder / "train.py").write_text("", encoding="utf-8")
    before = contents(folder)
    refused = f"""
    try:
        {line}
    except (PermissionError, sqlite3.OperationalError):
        pass
    else:
        raise SystemExit("it was let through")
    """
    run(folder, refused)
    after = contents(folder)
    changed = {path for path in before if after[path] != before[path] and not path.endswith("train.py")}
    assert not changed


def test_what_the_script_writes_to_files_that_were_there_goes_to_copies(folder: Path) -> None:
    """As a log of the last training: nobody would want it changed, nor the script to fail on it."""
    (folder / "train.py").write_text("", encoding="utf-8")
    before = contents(folder)
    answer = run(
        folder,
        """
        os.link('old.bin', 'link.bin')
        os.symlink('old.bin', 'symlink.bin')
        pathlib.Path('link.bin').write_bytes(b'linked')
        with open('symlink.bin', 'ab') as file:
            file.write(b' and more')
        assert pathlib.Path('old.bin').read_bytes() == b'minemineminemine and more'
        assert pathlib.Path('link.bin').read_bytes() == b'linked'
        os.makedirs('folder', exist_ok=True)
        shutil.copyfile(__file__, 'folder/old.txt')
        assert pathlib.Path('folder/old.txt').read_text().startswith('import os')
        with open('folder/old.txt', 'r+') as file:
            file.truncate(3)
        assert pathlib.Path('folder/old.txt').read_text() == 'imp'
        try:
            open('old.bin', 'x')
        except FileExistsError:
            torch.save([1, 2], 'old.bin')
        assert torch.load('old.bin') == [1, 2]
        """,
    )
    assert answer.failure is None
    after = contents(folder)
    assert not {path for path in before if after[path] != before[path] and not path.endswith("train.py")}
    first = "write old.bin: it was there before (--allow-writes lets the program)"
    assert first in answer.unwritten and len(answer.unwritten) == 3


def test_what_the_script_makes_is_its_own(folder: Path) -> None:
    """Also a folder that is removed by its descriptor, while a file with the name of one of its files is there."""
    run(
        folder,
        """
        os.makedirs("out/deep")
        pathlib.Path("out/deep/old.bin").write_bytes(b"1")
        os.chmod("out/deep/old.bin", 0o600)
        os.utime("out/deep/old.bin")
        shutil.rmtree("out")
        os.close(os.open("lock", os.O_CREAT | os.O_EXCL))  # as torch.utils.cpp_extension, which builds extensions
        os.remove("lock")
        with closing(sqlite3.connect("new.db")) as database:
            database.execute("create table t (n)")
        with closing(sqlite3.connect("old.db")) as database:
            assert database.execute("select n from t").fetchall() == [(1,)]
        torch.UntypedStorage.from_file("new.bin", True, 4).fill_(9)
        pathlib.Path("new.txt").write_text("1")
        os.symlink("new.txt", "link.txt")
        pathlib.Path("link.txt").write_text("2")
        """,
    )
    assert Path("new.txt").read_text(encoding="utf-8") == "2"
    assert Path("new.bin").read_bytes() == b"\t\t\t\t"
    assert not os.path.exists("out") and not os.path.exists("lock")
    assert torch.from_file("old.bin", size=4, dtype=torch.uint8).tolist() == [*b"mine"]
