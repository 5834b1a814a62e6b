"""PyTorch's format before 1.6: five pickles, then each storage's data behind its number of elements.

Source: `torch.serialization._legacy_save`. ``torch.save(…, _use_new_zipfile_serialization=False)`` still writes it.
"""

from __future__ import annotations

from memsize.checkpoint.accounting import Claims
from memsize.checkpoint.dtypes import BITS
from memsize.checkpoint.holdings import holdings
from memsize.checkpoint.pickle import Machine
from memsize.checkpoint.record import Contents, Storage
from memsize.checkpoint.shelf import Shelf, assembled
from memsize.checkpoint.source import Source
from memsize.checkpoint.texts import printable
from memsize.checkpoint.values import Dict

FORMAT = "PyTorch legacy"
MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLES = (b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")
PROTOCOL = 1001
_COUNT = 8


def looks_like(source: Source) -> bool:
    """Whether the file begins with the magic number, pickled by any protocol."""
    start = source.read(0, min(source.size, 32), "the magic number")
    return any(magic in start for magic in _MAGIC_PICKLES) or str(MAGIC).encode() in start


def read(source: Source) -> Contents:
    """What the file at `source` holds, from its pickles and the counts before each storage."""
    claims, shelf = Claims(source.size), Shelf(source)
    source.file.seek(0)
    machine = Machine(source.file, source.size, source.name)
    magic, protocol, system, root, keys = (machine.load() for _ in range(5))
    if magic != MAGIC or protocol != PROTOCOL:
        raise source.damaged(f"its magic number or protocol ({str(protocol)[:20]}) is not PyTorch's")
    if not isinstance(keys, list):
        raise source.damaged("its list of storages is not one")
    pickled = source.file.tell()
    _shelve(source, keys, machine, shelf, claims, "little" if _is_little(system) else "big")
    found = holdings(root, shelf.locator(), source.name)
    shelf.fit_blobs(found, claims)
    claims.claim_around(0, pickled, "pickle", shelf.holes)
    return assembled(source, FORMAT, claims, shelf, found, list(machine.mentioned))


def _is_little(system: object) -> bool:
    entries = {key: value for key, value in system.pairs if isinstance(key, str)} if isinstance(system, Dict) else {}
    return entries.get("little_endian") is not False


def _shelve(source: Source, keys: list[object], machine: Machine, shelf: Shelf, claims: Claims, order: str) -> None:
    """Put the storages on the shelf, in the order of the file."""
    position = source.file.tell()
    known = machine.storages
    for key in keys:
        if not isinstance(key, str) or key not in known:
            raise source.damaged(f"it lists the storage {printable(str(key), 40)!r}, which no tensor names")
        what = f"the storage {printable(key, 40)!r}"
        count = int.from_bytes(source.read(position, _COUNT, what), "little" if order == "little" else "big")
        size = count * BITS[known[key].dtype] + 7 >> 3
        start = position + _COUNT
        if start + size > source.size:
            raise source.cut_off(what, start + size)
        claims.claim(position, _COUNT, "headers")
        claims.claim(start, size, "tensors")
        shelf.put(key, Storage(printable(key, 40), 0, start, size, size))
        position = start + size
