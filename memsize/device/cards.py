"""The one table of GPUs: how much memory a process really gets, which is less than what is printed on the box.

`cards.csv` has a row for each card. Its memory is what `torch.cuda.mem_get_info` calls total, on Linux. It varies by a
hundred MiB or two with the driver and the display; where several figures were reported, the table has the smallest, of
GPUs in servers the largest too (``79.15..79.25 GiB``). On
cards that do error correction in software it takes a sixteenth of the memory: the figure is for the more common
setting, and the source names the other one. Where a source says that a card was not seen, the figure is that of another
card, by the rule that it names. Where the platform is not CUDA, the compute capability is that of the kernels that are
assumed. Multiprocessors are from NVIDIA's data sheets; an H100 for PCI Express has 114.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memsize.errors import InputError, UnknownInputError, nearest, quoted
from memsize.records.gpu import DEFAULT_GPU, Card, Multiprocessors
from memsize.units import GiB, parse_bytes

with Path(__file__).with_name("cards.csv").open(newline="", encoding="utf-8") as _file:
    _ROWS: Final = tuple(csv.DictReader(_file))


def _card(row: dict[str, Any]) -> Card:
    major, _, minor = row["capability"].partition(".")
    aliases = tuple(filter(None, row["aliases"].split("|")))
    least, _, most = row["memory"].rpartition("..")
    size = parse_bytes(f"{least or most.split()[0]} {most.split()[1]}")
    spread = parse_bytes(most) - size if least else 0
    return Card(row["name"], (int(major), int(minor)), size, row["source"], aliases, row["platform"], spread)


_APPLE_SEEN: Final = {
    **dict.fromkeys((16, 24, 32, 36, 48, 128), "the device line of llama.cpp, in public repositories"),
    8: "pytorch/pytorch#105839, where 1.7 times it is allowed",
    64: "BoBo0037/bobo-fun#8, where 1.7 times it is allowed",
}
"""Sizes of unified memory whose `recommendedMaxWorkingSetSize` was reported, and where."""


def _apple(gib: int) -> Card:
    """A Mac: Metal's `recommendedMaxWorkingSetSize`, two thirds of up to 32 GB of memory, three quarters of more.

    PyTorch lets a process have 1.7 times that before it raises, but beyond it macOS begins to swap.
    """
    size, rule = (gib * GiB * 2 // 3, "two thirds") if gib <= 32 else (gib * GiB * 3 // 4, "three quarters")
    seen = _APPLE_SEEN.get(gib, "not seen for this size")
    source = f"Metal's recommendedMaxWorkingSetSize is {rule} of the memory; {seen}"
    return Card(f"Apple {gib}GB", (8, 0), size, source, platform="MPS")


_MACS = tuple(map(_apple, (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)))

LOCAL_SUFFIX: Final = " (local)"
"""Follows the name of a GPU of this machine."""
_LEFT_OUT: Final = re.compile(r"nvidia|geforce|tesla|amd|generation|(?<=laptop)gpu|sxm\d?|pcie|hbm\d?e?|[^a-z0-9]")
"""What drivers write into a name and people omit."""
_MAC: Final = re.compile(
    r"^(?:apple|mac(?:book)?(?:pro|air|mini|studio)?|mps)?(?:m\d(?:pro|max|ultra)?)?(?=\d*(?:gb)?$)"
)


def _key(name: str) -> str:
    key = _LEFT_OUT.sub("", re.sub(r"\s", "", name.lower()))
    mac = _MAC.match(key)
    return f"apple{key[mac.end() :]}" if mac and mac[0] else key


_SIZE: Final = re.compile(r"\d+(?:\.\d+)?[kmgt]i?b")

CARDS: dict[str, Card] = {card.name: card for card in (*map(_card, _ROWS), *_MACS)}
_BY_KEY: Final = {_key(name): card for card in CARDS.values() for name in (card.name, *card.aliases)}
_PROCESSORS: Final = {row["name"]: int(row["multiprocessors"]) for row in _ROWS if row["multiprocessors"]}


_CONSUMER: Final = [(8, 6), (8, 9), (12, 0), (12, 1)]
"""Compute capabilities of consumers' GPUs since Ampere."""
_THREADS: Final = {(7, 5): 1024, (8, 0): 2048, (8, 7): 1536, **dict.fromkeys(_CONSUMER, 1536)}
"""How many threads a multiprocessor can run at once; 2,048 elsewhere (CUDA programming guide, compute capabilities)."""
_SHARED: Final = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, **dict.fromkeys(_CONSUMER, 99)}
"""KiB of shared memory that a block can opt in to; 227 elsewhere (the same table)."""


@dataclass(frozen=True)
class DeviceProperties:
    """The result of `torch.cuda.get_device_properties`, with the fields that are known of a GPU."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    warp_size: int = 32
    max_threads_per_block: int = 1024
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 * 1024

    @property
    def shared_memory_per_block_optin(self) -> int:
        return _SHARED.get((self.major, self.minor), 227) * 1024

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"memsize does not know the {name} of a {self.name}")


def multiprocessors(where: Card) -> Multiprocessors:
    """The multiprocessors of a card, the most that it may have, and the threads that each can run at once."""
    return Multiprocessors(processors(where)[1], threads_per_multiprocessor(where.capability))


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """How many threads each multiprocessor can run at once."""
    return _THREADS.get(capability, 2048)


def processors(where: Card) -> tuple[int, int]:
    """The least and the most multiprocessors of a card: where it isn't in the table, those of its generation, and where
    that isn't CUDA's, those of the card whose kernels stand in.
    """
    same = _BY_KEY.get(_key(where.name.removesuffix(LOCAL_SUFFIX)), where) if where.platform == "CUDA" else None
    count = _PROCESSORS.get(same.name if same else DEFAULT_GPU)
    if count is not None:
        return count, count
    generation = [n for name, n in _PROCESSORS.items() if CARDS[name].capability[0] == where.capability[0]]
    return min(generation, default=min(_PROCESSORS.values())), max(generation, default=max(_PROCESSORS.values()))


def card(name: str) -> Card:
    """The card that `name` means, without regard to case, spaces or the maker: ``a100``, ``RTX 4090``, ``M2 Max 64GB``.

    Raises `InputError` with the nearest names when there is none.
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    if _SIZE.fullmatch(key):
        size = parse_bytes(key)
        closest = sorted(CARDS, key=lambda other: abs(CARDS[other].bytes - size))[:4]
        raise InputError(
            f"{quoted(name)} is a size, not a GPU: did you mean {', '.join(closest)}? memsize fit has --budget"
        )
    names = [part for part in name.split(",") if part.strip()]
    if len(names) > 1 and all(_key(part) in _BY_KEY for part in names):
        raise InputError(
            f"{quoted(name)} names {len(names)} GPUs, and one is simulated here: memsize fit, fit-script and sweep "
            "compare several"
        )
    near = nearest(key, {key: gpu.name for key, gpu in _BY_KEY.items()}, most=4)
    raise UnknownInputError("GPU", name, CARDS, near=near, problem=f"no GPU {quoted(name)} in the table")
