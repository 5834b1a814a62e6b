"""The limits on a file: how much work and memory reading it may take, in one table, with the reason for each.

A few bytes of a file can ask for any amount of either. `WorkBudget` holds the work that is left for one file; readers
take from it as they go. The other limits bound one thing each.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from memsize.errors import CheckpointError

SMALL_FILE: Final = 64 * 2**20
"""Bytes of a file below which the limits on time and memory stay the same; above, they grow with the file."""

Work = Literal["tensors", "pickle", "visits", "items", "letters", "overlaps", "entries"]


class Limit(NamedTuple):
    """At most `most` units of work in a small file; in a larger one in proportion, if it `grows`.

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
