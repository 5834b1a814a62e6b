"""The frozen record of a checkpoint: its bytes, storages and tensors, their sums, and its match with a model.

Only readers make `Contents`. Sizes are exact integers in bytes. Nothing here needs torch or knows how it was read or
will be shown. Every text that comes out of a file is made printable before it gets in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

from memsize.records.codec import Index, Size
from memsize.records.trace import TensorSpec

Use = Literal["tensors", "padding", "metadata", "pickle", "headers", "other", "unclaimed"]
"""The uses of a file's bytes: tensor data; alignment; metadata such as a tokenizer; pickled objects; headers and zip
records; other records (the code of a scripted model); bytes unknown to the format."""

USES: tuple[Use, ...] = get_args(Use)

PartKind = Literal["model", "EMA", "optimizer", "scheduler", "other"]
"""The kinds of parts of a training checkpoint."""

KINDS: tuple[PartKind, ...] = get_args(PartKind)

Problem = Literal["missing", "unexpected", "wrong shape", "wrong dtype"]

PROBLEMS: tuple[Problem, ...] = ("missing", "wrong shape", "wrong dtype", "unexpected")
"""The most serious first."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint. `uses` has the bytes of each of `USES`, in that order: they add up to `size`."""

    name: str
    format: str
    size: Size
    uses: tuple[int, ...]
    tensors: Size

    def validate(self) -> None:
        """Raise ValueError unless it has bytes for each use."""
        if len(self.uses) != len(USES):
            raise ValueError(f"{len(self.uses)} uses of a file's bytes, not {len(USES)}")

    def bytes_for(self, use: Use) -> int:
        """The bytes of the file that are for `use`."""
        return self.uses[USES.index(use)]


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of tensor data: `bytes` in memory, `file_bytes` in the file (fewer when compressed).

    `file` indexes `Contents.files`. `offset` is where its data starts in it, None where that is not one place.
    `unneeded` are bytes of it that no tensor covers: they are saved because a tensor is a view of a larger one.
    """

    name: str
    file: Annotated[int, Index("files")]
    offset: int | None
    bytes: Size
    file_bytes: Size
    unneeded: Size = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, or one piece of a tensor that is kept in several; `wrapper` is the class of that tensor.

    `bytes` are those that no earlier tensor owns: 0 when `shared_with` names the tensor that owns them all. `unneeded`
    are the bytes of its storage that no tensor covers, counted with the first tensor of the storage. `storage` indexes
    `Contents.storages`, None for a tensor without data (a meta tensor). `keys` are those of the dictionaries and lists
    down to it; joined by dots they are its `name`.
    """

    name: str
    keys: tuple[str, ...]
    spec: TensorSpec
    elements: Size
    storage: Annotated[int, Index("storages")] | None
    bytes: Size
    unneeded: Size = 0
    shared_with: str | None = None
    wrapper: str | None = None
    trainable: bool | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A container that is recognised by its entries, such as an optimizer's ``state`` and ``param_groups``."""

    keys: tuple[str, ...]
    kind: PartKind


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that one checkpoint holds, whether it is one file or several.

    `values` are the plain values beside the tensors (an epoch, a file's own metadata) as texts. `classes` are the
    names of the classes and functions that a pickle mentions beyond what ``weights_only`` allows. `module` is the class
    of a model that was pickled whole. `missing` names the
    tensors that an index promises and no file has.
    """

    path: str
    format: str
    files: tuple[FileRecord, ...]
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    values: tuple[tuple[str, str], ...] = ()
    marks: tuple[Mark, ...] = ()
    classes: tuple[str, ...] = ()
    module: str | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def compressed(self) -> int:
        """The bytes that compression saves: those of the data in memory minus those in the files."""
        return sum(storage.bytes - storage.file_bytes for storage in self.storages)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a checkpoint that a tensor belongs to: its kind, and how many of the tensor's keys name the part."""

    kind: PartKind
    root: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors taken together: a part, a dtype, a module. `bytes` is the size of their data, shared bytes once, and
    `unneeded` the bytes saved along with them that no tensor covers. A module's name begins with `root`, the keys of
    its part.
    """

    kind: PartKind
    name: str
    tensors: Size
    elements: Size
    bytes: Size
    unneeded: Size
    dtypes: tuple[str, ...]
    root: str = ""


class View(NamedTuple):
    """Modules to list: down to `depth` below their part (None: tensors), `folded` if only numbers in names differ."""

    depth: int | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs from the model's; `file` and `model` are the two specs."""

    name: str
    problem: Problem
    file: TensorSpec | None
    model: TensorSpec | None
    bytes: Size


@dataclass(frozen=True, slots=True)
class Match:
    """A comparison of a file with a model. `key` is the file's key of the compared weights.

    `dropped`, `added` and `wrappers` are the change of names under which they match: a prefix dropped, one added, and
    steps left out. `left_out` are tied tensors that the file leaves out, as safetensors does.
    """

    model: str
    matching: int
    differences: tuple[Difference, ...]
    key: str = ""
    dropped: str = ""
    added: str = ""
    wrappers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def count(self, problem: Problem) -> int:
        """How many tensors have that problem."""
        return sum(difference.problem == problem for difference in self.differences)
