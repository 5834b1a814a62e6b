"""A git revision of a target, as ``HEAD~1:model.py:Net`` names it: checked out beside, into a folder of its own.

The user's work tree, index and branches stay as they are: the files come from an index in that folder. Submodules are
not checked out, and files that Git LFS keeps stay the pointers that git has.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from memsize.errors import TargetError, first_line, quoted
from memsize.loading.target import CHECKPOINTS, LIBRARIES
from memsize.records.run_file import SUFFIX

_FILES: Final = (".py", ".json", SUFFIX, *CHECKPOINTS)


class Revision(NamedTuple):
    """A target at a git revision: a commit, a branch, a tag, or anything else that ``git rev-parse`` accepts."""

    name: str
    target: str


def parse_revision(text: str) -> Revision | None:
    """The revision that ``HEAD~1:model.py:Net`` names; None for any other target, ``package.module:Net``."""
    name, _, target = text.partition(":")
    path = target.partition(":")[0]
    is_file_or_module = path.endswith(_FILES) or (bool(path) and ":" in target)
    if not name or not is_file_or_module or name in LIBRARIES or _is_path(text):
        return None
    return Revision(name, target)


def _is_path(text: str) -> bool:
    """Whether the colon is part of a path: of a file's own name, or behind the letter of a drive."""
    drive = os.name == "nt" and text[1:2] == ":"
    return drive or Path(text).exists() or Path(text.rpartition(":")[0]).is_file()


class Checkout(NamedTuple):
    """`top` is the user's repository, `copy` the same at a revision; `prefix` is the working folder in both."""

    top: Path
    copy: Path
    prefix: Path

    @property
    def folder(self) -> Path:
        """The working folder at the revision; the whole of it where that folder was not there yet."""
        folder = self.copy / self.prefix
        return folder if folder.is_dir() else self.copy

    def moved(self, path: str) -> str:
        """`path` in the copy, if the repository had it at the revision; otherwise unchanged."""
        inside = Path(path).absolute()
        if not inside.is_relative_to(self.top):
            return path
        there = self.copy / inside.relative_to(self.top)
        return str(there) if there.exists() else path


@contextmanager
def checked_out(revision: str) -> Iterator[Checkout]:
    """The repository of the working folder at `revision`, in a temporary folder while open.

    Raises `TargetError` where there is no git, no repository, or no such revision.
    """
    top = Path(_git("rev-parse", "--show-toplevel").rstrip("\n"))
    prefix = Path(_git("rev-parse", "--show-prefix").rstrip("\n"))
    commit = _commit(revision)
    with tempfile.TemporaryDirectory(prefix="memsize-") as folder:
        copy = Path(folder).resolve() / "tree"
        own = {"GIT_INDEX_FILE": str(Path(folder) / "index"), "GIT_LFS_SKIP_SMUDGE": "1"}
        _git("read-tree", commit, variables=own)
        _git("checkout-index", "--all", f"--prefix={copy}{os.sep}", variables=own, folder=top)
        copy.mkdir(exist_ok=True)
        yield Checkout(top, copy, prefix)


def _commit(revision: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except TargetError:
        raise TargetError(f"no revision {quoted(revision)} in this repository (a shallow clone may lack it)") from None


def _git(*arguments: str, variables: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """Run git and return its output. Raises `TargetError` with git's message where it fails."""
    try:
        process = subprocess.run(
            ("git", *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **(variables or {})},
            cwd=folder,
            check=False,
        )
    except FileNotFoundError:
        raise TargetError("git is not installed: a revision of a target needs it") from None
    if process.returncode:
        message = first_line(process.stderr.decode(errors="replace")).removeprefix("fatal: ")
        raise TargetError(f"git {arguments[0]} failed: {message or f'status {process.returncode}'}")
    return process.stdout.decode(errors="surrogateescape")
