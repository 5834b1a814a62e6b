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
    "os.link": "os.link('old.bin', 'link.bin'); open('link.bin', 'wb').write(b'lost')",
    "os.symlink": "os.mkdir('new'); os.symlink('../old.bin', 'new/link'); open('new/link', 'wb').write(b'lost')",
    "os.truncate": "os.truncate('old.bin', 0)",
    "os.utime": "os.utime('old.bin', (0, 0))",
    "makedirs": "os.makedirs('folder', exist_ok=True); open('folder/old.txt', 'w').write('lost')",
    "pathlib": "pathlib.Path('old.bin').replace('folder/moved.bin')",
    "rmtree": "shutil.rmtree('folder')",
    "shutil": "shutil.copyfile(__file__, 'old.bin')",
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
    assert not os.path.exists("out")
    assert torch.from_file("old.bin", size=4, dtype=torch.uint8).tolist() == [*b"mine"]
