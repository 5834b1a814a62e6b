"""Targets as values: ``"nets/model.py:Test"``, ``"package.module:name"``, or a library's own name, ``"timm:resnet18"``;
a Hub id alone, ``"meta-llama/Llama-3.1-8B"``, is that of transformers, and so is a config or its folder.

Also a git revision of a target, as ``HEAD~1:model.py:Net`` names it: checked out beside, into a folder of its own. The
user's work tree, index and branches stay as they are: the files come from an index in that folder. Submodules are not
checked out, and files that Git LFS keeps stay the pointers that git has. Nothing here needs torch.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from memsize.errors import TargetError, first_line, nearest, quoted, suggestion
from memsize.loading.presets import is_hub_id, presets
from memsize.records.run_file import SUFFIX
from memsize.spec.options import parse_value

_EXAMPLES = "write it like model.py:Net or package.module:build"


LIBRARIES = ("hf", "timm", "torchvision", "diffusers")
"""Libraries whose models go by the library's own names: transformers (``hf:``), timm, torchvision, and diffusers."""


@dataclass(frozen=True, slots=True)
class Target:
    """A Python file or a module's dotted name, and the name inside it (None: its only Module class).

    With a `library` there is neither: `name` is what the library calls the model, or a config of it. `options` are
    arguments of the constructor.
    """

    file: Path | None
    module: str | None
    name: str | None
    library: str | None = None
    options: tuple[tuple[str, object], ...] = ()

    @property
    def source(self) -> str:
        """The file, module or library as messages call it: ``model.py``, ``package.module``, ``timm``."""
        return self.file.name if self.file else str(self.library or self.module)


def parse_target(text: str) -> Target:
    """The target that ``path.py:Name``, ``package.module:name?option=value`` or ``timm:name`` names.

    A file must exist; modules and a library's names are looked for when they are imported. Raises `TargetError` for
    what cannot be a target.
    """
    try:
        return _parsed(text.strip())
    except (OSError, RuntimeError) as error:  # a path that is too long, a home folder that nobody has
        raise TargetError(f"cannot read {quoted(text)} as a target: {getattr(error, 'strerror', error)}") from None


def _parsed(text: str) -> Target:
    library, colon, rest = text.partition(":")
    if colon and library in LIBRARIES:
        return _of_library(library, rest.strip())
    whole, (text, query) = text, _with_query(text)
    # A path may have a colon itself (a drive), so the last one counts.
    source, colon, name = text.rpartition(":")
    if not colon or text.endswith(".py") or os.sep in name:
        source, colon, name = text, "", ""
    elif not name:
        raise TargetError(f"{text!r} ends with a colon and no name: {_EXAMPLES}")
    if colon and not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{name!r} in {text!r} is not a name: {_EXAMPLES}")
    path = Path(source)
    is_config = (path.suffix == ".json" and path.is_file()) or (path / "config.json").is_file()
    if not colon and (is_config or is_hub_id(source)):
        return _of_library("hf", whole)
    if not colon and not path.exists() and source.rpartition("/")[0] in presets():  # a part of a pipeline
        return _of_library("diffusers", whole)
    options = _options(query, whole, text)
    named = source.endswith((".py", *CHECKPOINTS)) or os.sep in source or (os.altsep or os.sep) in source
    is_folder = bool(source) and path.is_dir() and not (path / "__init__.py").is_file()
    if named or is_folder or path.is_file():
        return Target(_existing_file(path.expanduser()), None, name or None, options=options)
    if not all(part.isidentifier() for part in source.split(".")):
        near = nearest(source, tuple(presets()))
        hint = suggestion(source, (), near) if near else _EXAMPLES
        raise TargetError(f"cannot read {text!r} as a target: {hint}")
    return Target(None, source, name or None, options=options)


def _of_library(library: str, rest: str) -> Target:
    name, query = _with_query(rest)
    if not name:
        raise TargetError(f"'{library}:' is followed by no name: write it like timm:resnet18 or hf:config.json")
    return Target(None, None, name, library, _options(query, f"{library}:{rest}", f"{library}:{name}"))


def _with_query(text: str) -> tuple[str, str]:
    """``resnet18?num_classes=10`` without and with its question mark, which a path may hold itself."""
    name, mark, query = (text, "", "") if Path(text).exists() else text.partition("?")
    return name, mark + query


def _options(query: str, text: str, name: str) -> tuple[tuple[str, object], ...]:
    """The arguments of ``?num_classes=10&in_chans=1``; `text` and `name` are the target with and without it."""
    options: dict[str, object] = {}
    for part in query[1:].split("&") if query else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier():
            raise TargetError(f"cannot read {part!r} in {text!r}: write it like {name}?width=64")
        if re.search(r",\s*\w+=", value):
            raise TargetError(f"cannot read {part!r} in {text!r}: & separates arguments, as in {name}?width=64&depth=2")
        options[key] = parse_value(value)
    return tuple(options.items())


CHECKPOINTS: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
"""The suffixes of files that hold tensors."""


def is_checkpoint(text: str) -> bool:
    """Whether `text` names a file or a folder that holds tensors, and no code."""
    path = Path(text)
    if path.is_dir():
        return not (path / "__init__.py").is_file()
    return path.is_file() and path.suffix != ".py"


def _existing_file(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".py":
            return path.absolute()
        hint = f": memsize checkpoint {path} shows what it holds" if path.suffix in CHECKPOINTS else ""
        raise TargetError(f"{path} is not a Python file{hint}")
    if path.is_dir():
        raise TargetError(f"{path} is a folder: name a Python file in it, such as {path / 'model.py'}:Net")
    searched = path.parent.is_dir() and path.suffix not in CHECKPOINTS
    there = sorted(other.name for other in path.parent.glob("*.py")) if searched else []
    near = ", ".join(nearest(path.name, there))
    hint = f"did you mean {near}?" if near else f"{path.parent} holds {', '.join(there[:8])}{' …' if there[8:] else ''}"
    raise TargetError(f"no such file: {path}{f' ({hint})' if there else ''}")


# -- definitions ------------------------------------------------------------------------------------------------------


def line_of(target: Target) -> int:
    """The line of the class, function or variable that `target` names in its file; 1 where that cannot be told."""
    assert target.file is not None
    try:
        nodes: list[ast.stmt] = ast.parse(target.file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return 1
    line = 1
    for name in (target.name or "").split("."):
        for node in nodes:
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            if name in (getattr(node, "name", None), *(getattr(variable, "id", None) for variable in targets)):
                line, nodes = node.lineno, getattr(node, "body", [])
                break
        else:
            return line
    return line


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
    is_drive = os.name == "nt" and text[1:2] == ":"
    in_a_path = is_drive or Path(text).exists() or Path(text.rpartition(":")[0]).is_file()
    if not name or not is_file_or_module or name in LIBRARIES or in_a_path:
        return None
    return Revision(name, target)


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
    try:
        commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except TargetError:
        raise TargetError(f"no revision {quoted(revision)} in this repository (a shallow clone may lack it)") from None
    with tempfile.TemporaryDirectory(prefix="memsize-") as folder:
        copy = Path(folder).resolve() / "tree"
        own = {"GIT_INDEX_FILE": str(Path(folder) / "index"), "GIT_LFS_SKIP_SMUDGE": "1"}
        _git("read-tree", commit, variables=own)
        _git("checkout-index", "--all", f"--prefix={copy}{os.sep}", variables=own, folder=top)
        copy.mkdir(exist_ok=True)
        yield Checkout(top, copy, prefix)


def _git(*arguments: str, variables: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
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
        if message.startswith("not a git repository"):
            raise TargetError(f"a revision needs a git repository, and there is none around {Path.cwd()}")
        raise TargetError(f"git {arguments[0]} failed: {message or f'status {process.returncode}'}")
    return process.stdout.decode(errors="surrogateescape")
