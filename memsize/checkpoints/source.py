"""An open file that is read by position and within its bounds, never as a whole, the uses of its bytes, its
limits, and its record.

A few bytes of a file can ask for any amount of work and memory. `WorkBudget` holds the work that is left for one file;
readers take from it as they go. The other limits bound one thing each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple

from memsize import files
from memsize.checkpoints.contents import USES, Contents, FileRecord, Storage, Tensor, Use
from memsize.errors import CheckpointError
from memsize.printable import printable as text_printable, shortened
from memsize.records.byte_ownership import Extent, Ownership, own_bytes
from memsize.records.trace import TensorSpec

SMALL_FILE: Final = 64 * 2**20
"""Bytes of a file below which the limits on time and memory stay the same; above, they grow with the file."""

Work = Literal["tensors", "pickle", "visits", "items", "letters", "overlaps", "entries"]


class Limit(NamedTuple):
    """A limit on work: at most `most` units in a small file; in a larger one in proportion, if it `grows`.

    `refusal` is the error's text: it may name the file, and the tensors that are read in a file of this size.
    """

    most: int
    reason: str
    refusal: str
    grows: bool = True


_TOO_MUCH = (
    "{name} holds more than memsize reads in a file of this size: {tensors:,} tensors, or as many values as these "
    "might have, each counted once for each place that points to it"
)
_MOST_TENSORS = 125_000

LIMITS: Final[dict[Work, Limit]] = {
    "tensors": Limit(_MOST_TENSORS, "room for the state dict of 100,000 tensors in any file", _TOO_MUCH),
    "pickle": Limit(
        32_000_000,
        "units of eight bytes of memory that pickles build: 256 MB. A tensor takes 210 to 240, a parameter 290",
        "{name} has a pickle that cannot be read: it builds more objects than memsize reads in a file of this size",
    ),
    "visits": Limit(5 * _MOST_TENSORS, "values that are walked: a pickle may point to one list many times", _TOO_MUCH),
    "items": Limit(16_000_000, "items of lists that are looked at, an entry of a dictionary as 40", _TOO_MUCH),
    "letters": Limit(25_000_000, "letters in names: each level of nesting repeats those above it", _TOO_MUCH),
    "overlaps": Limit(
        5_000_000,
        "ranges compared with each other: views of one storage that all overlap take quadratic time",
        "{name} is damaged: its tensors overlap each other in more ways than memsize follows",
        grows=False,
    ),
    "entries": Limit(
        2_000_000,
        "strings in arrays, metadata keys and tensors of GGUF: the largest vocabularies have 800,000 tokens and merges",
        "{name} is damaged: its metadata holds too many entries",
        grows=False,
    ),
}


class WorkBudget:
    """The work that reading the file called `name`, of `size` bytes, may still take, by the kinds of `LIMITS`.

    Inner loops subtract from an attribute themselves, and raise `refusal` or call `check` when it is negative.
    """

    __slots__ = ("_name", "entries", "items", "letters", "overlaps", "pickle", "scale", "tensors", "visits")

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self.scale = max(1.0, size / SMALL_FILE)
        self.tensors, self.pickle, self.visits = self.most("tensors"), self.most("pickle"), self.most("visits")
        self.items, self.letters = self.most("items"), self.most("letters")
        self.overlaps, self.entries = self.most("overlaps"), self.most("entries")

    def most(self, work: Work) -> int:
        """The limit on one kind of work in this file."""
        limit = LIMITS[work]
        return self.grown(limit.most) if limit.grows else limit.most

    def grown(self, most: int) -> int:
        """`most` of a small file, in proportion to the size of this one."""
        return int(most * self.scale)

    def refusal(self, work: Work) -> CheckpointError:
        """The error of a file that needs more of one kind of work."""
        return CheckpointError(LIMITS[work].refusal.format(name=self._name, tensors=self.most("tensors")))

    def spend_overlaps(self, count: int) -> None:
        """Take `count` comparisons of ranges; raises `CheckpointError` when too few are left."""
        self.overlaps -= count
        if self.overlaps < 0:
            raise self.refusal("overlaps")

    def check_walk(self) -> None:
        """Raise `CheckpointError` when the walk through a pickle's values has used up one of its limits."""
        if min(self.visits, self.items, self.letters, self.tensors) < 0:
            raise self.refusal("tensors")


# Limits on one thing each. In bytes, where nothing else is said.

LONGEST_NAME: Final = 300
"""Characters of a name or a value; the rest is cut."""
LONGEST_INDEX: Final = 64 * 2**20
"""An index of several files: that of 100,000 tensors has ten million bytes."""
LONGEST_HEADER: Final = 100_000_000
"""A header of safetensors: its library's own limit (`MAX_HEADER_SIZE`)."""
LONGEST_DIRECTORY: Final = 12 * 2**20
"""A small file's zip directory: about 130,000 records."""
MOST_UNPACKED: Final = 2**20
BEST_PACKING: Final = 64
"""A compressed pickle may unpack to `MOST_UNPACKED` and to `BEST_PACKING` times its size: the names of a large state
dict pack by five. What packs better was made to."""
LONGEST_KEPT: Final = 1024
"""A text of a pickle that is kept; a longer one becomes a `Blob`, which costs nothing."""
LONGEST_NUMBER: Final = 128
"""A number of a pickle, in bytes or digits: Python takes quadratic time to read one."""
LONGEST_LINE: Final = 64 * 1024
"""A line of a pickle of protocol 0."""
MOST_DIMENSIONS: Final = 64
"""Dimensions of a tensor: PyTorch's own limit."""
DEEPEST: Final = 100
"""Levels of nesting in a pickle's values."""
LONGEST_KEY: Final = 200
"""Characters of a dictionary's key."""
MOST_VALUES_SHOWN: Final = 200
"""Plain values beside the tensors that are kept."""
MOST_KEYS: Final = 65_536
"""Metadata keys of GGUF."""
MOST_GGML_DIMENSIONS: Final = 8
"""Dimensions of a tensor in GGUF: ggml has four."""


def printable(text: str, longest: int = LONGEST_NAME) -> str:
    """Return a text of the file as records keep it: in one line, escaped and cut."""
    return text_printable(text, longest)


@dataclass(slots=True)
class Source:
    """An open file of `size` bytes, called `name` in messages, and the `budget` of work for reading it."""

    file: BinaryIO
    name: str
    size: int
    budget: WorkBudget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = WorkBudget(self.name, self.size)

    def read(self, offset: int, count: int, what: str) -> bytes:
        """Read `count` bytes from `offset`, called `what`. Raises `CheckpointError` if the file ends within them."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise self.cut_off(what, offset + count)
        self.file.seek(offset)
        data = self.file.read(count)
        if len(data) != count:
            raise self.cut_off(what, offset + count)
        return data

    def cut_off(self, what: str, end: int | None = None) -> CheckpointError:
        """The error of a file that ends before it should."""
        should = "" if end is None or end < self.size else f", which should end at byte {end:,}"
        return CheckpointError(
            f"{self.name} is cut off or damaged: it has {self.size:,} bytes and ends within {what}{should}"
        )

    def check_count(self, tensors: int) -> None:
        """Raise `CheckpointError` if the file claims more `tensors` than are read in a file of its size."""
        if tensors > (most := self.budget.most("tensors")):
            why = f"it describes {tensors:,} tensors, more than memsize reads in a file of this size ({most:,})"
            raise self.damaged(why)

    def damaged(self, why: str) -> CheckpointError:
        """The error of a file that contradicts its own format."""
        return CheckpointError(f"{self.name} is damaged: {why}")


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open the file at `path`. Raises `CheckpointError` when it is not a file that can be read."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(files.opened(path))
        except OSError as error:
            raise CheckpointError(f"cannot read {shortened(str(path), 200)}: {error.strerror}") from error
        yield Source(file, printable(path.name), os.fstat(file.fileno()).st_size)


@dataclass(slots=True)
class Claims:
    """The uses of byte ranges of a file of `size` bytes, as its reader finds them. Their sums add up to `size`.

    A byte counts for the claim that starts first; a byte without a claim is `unclaimed`.
    """

    size: int
    _claims: list[tuple[int, int, Use]] = field(default_factory=list)

    def claim(self, start: int, length: int, use: Use) -> None:
        if length > 0:
            self._claims.append((start, start + length, use))

    def pad_gaps(self, start: int, end: int) -> None:
        """Claim the bytes between `start` and `end` that no claim covers as padding."""
        position = start
        for first, last, _ in sorted(self._claims, key=itemgetter(0, 1)):
            if last <= position:
                continue
            if first >= end:
                break
            self.claim(position, first - position, "padding")
            position = last
        self.claim(position, end - position, "padding")

    def sums(self) -> tuple[int, ...]:
        """The bytes of each of `USES`: together they are the file's size."""
        sums = dict.fromkeys(USES, 0)
        position = 0
        for start, end, use in sorted(self._claims, key=itemgetter(0, 1)):
            start, end = max(start, position), min(end, self.size)
            if end <= start:
                continue
            sums["unclaimed"] += start - position
            sums[use] += end - start
            position = end
        sums["unclaimed"] += self.size - position
        return tuple(sums.values())


# The record of one file: its tensors, with the bytes that each owns of a storage


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor as a file describes it: `span` bytes from `start` of a storage, of which its elements need `needed`.

    They differ for a tensor with gaps: a column of a matrix spans nearly all of it.
    """

    keys: tuple[str, ...]
    spec: TensorSpec
    elements: int
    storage: int | None
    start: int
    span: int
    needed: int
    wrapper: str | None = None
    trainable: bool | None = None


def check_apart(source: Source, storages: Sequence[Storage]) -> None:
    """Raise `CheckpointError` when a storage reaches beyond the file, or shares bytes of it with another."""
    position, before = 0, ""
    spans = sorted((s.offset or 0, (s.offset or 0) + s.bytes, s.name) for s in storages if s.bytes)
    for start, end, name in spans:
        if end > source.size:
            raise source.cut_off(f"the tensor {name!r}", max(end for _, end, _ in spans))
        if start < position:
            raise source.damaged(f"the data of {name!r} overlaps that of {before!r}")
        position, before = end, name


def file_contents(
    source: Source, format: str, claims: Claims, pieces: Sequence[Piece], storages: Sequence[Storage], **facts: Any
) -> Contents:
    """The record of one file. Raises `CheckpointError` when a tensor reaches beyond its storage."""
    for piece in pieces:
        if piece.storage is not None and piece.start + piece.span > storages[piece.storage].bytes:
            name = ".".join(piece.keys)
            raise source.damaged(f"the tensor {name!r}, {str(piece.spec)[:60]}, reaches beyond its storage")
    tensors, covered = share_out(pieces, storages, source.budget.spend_overlaps)
    record = FileRecord(source.name, format, source.size, claims.sums(), len(tensors))
    return Contents(source.name, format, (record,), covered, tensors, **facts)


def share_out(
    pieces: Sequence[Piece], storages: Sequence[Storage], spend: Callable[[int], object] | None = None
) -> tuple[tuple[Tensor, ...], tuple[Storage, ...]]:
    """The tensors with the bytes that each owns, and the storages with the bytes that no tensor covers.

    `spend` bounds the work, as in `own_bytes`.
    """
    stored = [index for index, piece in enumerate(pieces) if piece.storage is not None]
    extents = [
        Extent(index, piece.start, piece.start + piece.span, storages[index].bytes, piece.needed, piece.spec.shape)
        for piece in pieces
        if (index := piece.storage) is not None
    ]
    ownership = dict(zip(stored, own_bytes(extents, spend), strict=True))
    names = [".".join(piece.keys) for piece in pieces]
    uncovered = [storage.bytes for storage in storages]
    tensors = []
    for index, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        share = ownership.get(index, _NO_BYTES)
        owner = None if share.shared_with is None else names[stored[share.shared_with]]
        sizes = (piece.storage, share.owned, share.uncovered)
        tensors.append(
            Tensor(name, piece.keys, piece.spec, piece.elements, *sizes, owner, piece.wrapper, piece.trainable)
        )
        if piece.storage is not None:
            uncovered[piece.storage] -= share.owned
    covered = (replace(s, unneeded=rest) if rest > 0 else s for s, rest in zip(storages, uncovered, strict=True))
    return tuple(tensors), tuple(covered)


_NO_BYTES = Ownership(0)
