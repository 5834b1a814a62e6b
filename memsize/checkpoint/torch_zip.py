"""PyTorch's zip format: ``data.pkl`` says what there is, and each storage is a record of its own.

A TorchScript archive is the same with code beside it, and with constants in a pickle of their own. Source:
`torch.serialization._save`, ``caffe2/serialize/inline_container.h``.
"""

from __future__ import annotations

import io

from memsize.checkpoint.accounting import Claims
from memsize.checkpoint.archive import STORED, Entry, entries, unpacked
from memsize.checkpoint.holdings import Holdings, holdings
from memsize.checkpoint.pickle import Machine
from memsize.checkpoint.record import Contents, Storage, Use
from memsize.checkpoint.shelf import Shelf, assembled
from memsize.checkpoint.source import Source

FORMAT = "PyTorch zip"
SCRIPTED = "TorchScript"
MOST_UNPACKED = 64 * 2**20
"""Bytes that a compressed pickle may unpack to; an uncompressed one is read where it stands."""

_OWN = ("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")
_PICKLES = {"data.pkl": "data/", "constants.pkl": "constants/"}
"""The pickles of an archive, and the folder of the storages that each one names."""


def read(source: Source) -> Contents:
    """What the file at `source` holds, from its pickles and the places of its records."""
    claims = Claims(source.size)
    records = entries(source, claims)
    folder = _folder(source, records)
    inner = {name.removeprefix(folder): entry for name, entry in records.items()}
    shelf = Shelf(source)
    for name, entry in inner.items():
        if name.startswith(tuple(_PICKLES.values())):
            shelf.put(name, Storage(name, 0, entry.offset, entry.size, entry.packed))
        claims.claim(entry.offset, 0 if name in _PICKLES else entry.packed, _use(name))
    found, mentioned = Holdings(), dict[str, None]()
    for name, prefix in _PICKLES.items():
        if name in inner:
            found = _walked(source, inner[name], name, prefix, shelf, found, mentioned, claims)
    format = SCRIPTED if "constants.pkl" in inner else FORMAT
    return assembled(source, format, claims, shelf, found, list(mentioned))


def _walked(
    source: Source,
    entry: Entry,
    name: str,
    prefix: str,
    shelf: Shelf,
    found: Holdings,
    mentioned: dict[str, None],
    claims: Claims,
) -> Holdings:
    """`found` with what one pickle holds."""
    in_file = entry.method == STORED
    if in_file:
        source.file.seek(entry.offset)
        machine = Machine(source.file, entry.offset + entry.packed, source.name)
    else:
        data = unpacked(source, entry, MOST_UNPACKED, f"the record {name!r}")
        machine = Machine(io.BytesIO(data), len(data), source.name)
    held = holdings(machine.load(), shelf.locator(prefix, in_file), source.name)
    shelf.fit_blobs(held, claims)
    claims.claim_around(entry.offset, entry.packed, "pickle", shelf.holes)
    mentioned.update(machine.mentioned)
    if name == "constants.pkl":
        held.values.clear()
    return Holdings(
        found.pieces + held.pieces, found.values + held.values, found.marks + held.marks, found.module or held.module
    )


def _folder(source: Source, records: dict[str, Entry]) -> str:
    """The folder that all records are in, by the pickle that they belong to."""
    found = [name.removesuffix("data.pkl") for name in records if name == "data.pkl" or name.endswith("/data.pkl")]
    if not found:
        raise source.damaged("it is a zip archive without a data.pkl, so not a file that torch.save wrote")
    return min(found, key=len)


def _use(name: str) -> Use:
    if name.startswith(tuple(_PICKLES.values())):
        return "tensors"
    return "headers" if name in _OWN else "other"
