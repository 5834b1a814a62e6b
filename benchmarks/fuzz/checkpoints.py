"""Checkpoints of every format that memsize reads, mutated; and pickles made of instructions at random."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.fuzz.trial import CANARY, Trial

FORMATS: Final = ("text", "markdown", "json", "csv", "html")
HOSTILE: Final = "\x1b]0;x\x07\u202e\x9b2J\x00<script>"


def trials(random: Random) -> Trial:
    """The next trial: a file, and a command that reads it."""
    name, content = random.choice((_mutated, _mutated, _mutated, _generated))(random)
    format = random.choice(FORMATS)
    outputs = frozenset({"answer"} if random.random() < 0.2 else ())
    arguments = ["checkpoint", name, "-f", format, *(["-o", "answer"] if outputs else [])]
    if random.random() < 0.8:
        return Trial("checkpoint", tuple(arguments), lambda folder: _write(folder / name, content), outputs)
    # Beside an index that names it, or in a folder of its own.
    weights = {_text(random): name, "a": name}
    index = json.dumps({"weight_map": weights, "metadata": {"total_size": random.getrandbits(65)}}).encode()
    index = index if random.random() < 0.5 else mutate(random, index)

    def prepare(folder: Path) -> None:
        _write(folder / name, content)
        _write(folder / "model.index.json", index)

    target = random.choice(("model.index.json", "."))
    return Trial("checkpoint", ("checkpoint", target, "-f", format), prepare)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _mutated(random: Random) -> tuple[str, bytes]:
    name, content = random.choice(seeds())
    if name.endswith(".pt") and random.random() < 0.7:
        return name, _repacked(random, content)
    if name.endswith(".safetensors") and random.random() < 0.7:
        length = struct.unpack("<Q", content[:8])[0]
        header = mutate(random, content[8 : 8 + length])
        return name, struct.pack("<Q", len(header)) + header + content[8 + length :]
    return name, mutate(random, content)


def _generated(random: Random) -> tuple[str, bytes]:
    return "made.pt", _zipped({"a/data.pkl": made_pickle(random), "a/data/0": bytes(400)}, random)


def mutate(random: Random, content: bytes) -> bytes:
    """`content` with a few bytes changed, left out, repeated, or replaced by what readers trip over."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 1, 2, 4))):
        start, length = random.randrange(len(data) + 1), random.choice((1, 1, 2, 4, 8, 64))
        match random.randrange(7) if random.random() < 0.7 else 0:
            case 0 if data:
                data[start % len(data)] ^= 1 << random.randrange(8)
            case 1:
                data[start : start + length] = b""
            case 2:
                data[start:start] = data[start : start + length] * random.choice((1, 2, 100))
            case 3:
                data[start : start + 8] = random.choice(_NUMBERS)
            case 4:
                data[start:start] = random.choice(_TOKENS)
            case 5:
                other = random.randrange(len(data) + 1)
                data[start : start + length] = data[other : other + length]
            case _:
                del data[start:]
    return bytes(data)


_NUMBERS: Final = tuple(
    struct.pack("<Q", value & 2**64 - 1) for value in (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, -1, -8)
)
_NAMES: Final = (
    b"os\nsystem\n", b"builtins\nexec\n", b"subprocess\nPopen\n", b"pathlib\nPath\n", b"torch\nload\n", b"m\nC\n",
    b"torch._utils\n_rebuild_tensor_v2\n", b"torch._utils\n_rebuild_parameter\n", b"collections\nOrderedDict\n",
    b"torch\nFloatStorage\n", b"numpy.core.multiarray\n_reconstruct\n", b"copyreg\n_reconstructor\n",
    b"torch._tensor\n_rebuild_from_type_v2\n", b"torch._utils\n_rebuild_sparse_tensor\n", b"memsize_evil\nRun\n",
)  # fmt: skip
_TOKENS: Final = (
    HOSTILE.encode(), b'"__metadata__":{"a":"\\u001b[2J"},', b"\xff\xfe", b"PK\x03\x04", b"[" * 5000, b"{}," * 5000,
    b"1e999", b"-1", b"9" * 5000, b"\\ud800", *(b"c" + name for name in _NAMES),
)  # fmt: skip


def made_pickle(random: Random) -> bytes:
    """Instructions at random: most make a value, so that others have something to work on."""
    touch = f"touch {CANARY}2".encode()
    parts = [b"\x80\x02"]
    small = (bytes([code]) for code in b"N]})((\x88\x85\x86tldaesuRRb\x81\x92oQ\x94021\x90")
    whole = (b"K\x05", _STORAGE, _TENSOR, _unicode(touch), _unicode(b"storage"), *small)
    for _ in range(random.choice((3, 10, 30, 100, 1000))):
        match random.randrange(8):
            case 0:
                parts.append(random.choice(b"ci").to_bytes(1, "big") + random.choice(_NAMES))
            case 1:
                parts.append(random.choice(b"qh").to_bytes(1, "big") + bytes([random.randrange(8)]))
            case 2:
                code, length = random.choice(((b"G", 8), (b"\x8a\x08", 8), (b"J", 4), (b"r", 4), (b"M", 2)))
                parts.append(code + random.randbytes(length))
            case 3:
                parts.append(_unicode(_text(random).encode()))
            case _:
                parts.append(random.choice(whole))
    return b"".join(parts) + b"."


def _unicode(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


_STORAGE: Final = (
    b"(" + _unicode(b"storage") + b"ctorch\nFloatStorage\n" + _unicode(b"0") + _unicode(b"cpu") + b"K\x64tQ"
)
_TENSOR: Final = b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00K\x05\x85K\x01\x85\x89NtR"


def _text(random: Random) -> str:
    return random.choice(("weight", "model.layers.0", HOSTILE, "=1+1", "", "state_dict", "x" * 400, "größe"))


def _repacked(random: Random, content: bytes) -> bytes:
    """A zip archive with one of its records mutated, and everything around it in order."""
    records = _records(content)
    victim = random.choice([name for name in records if name.endswith(".pkl")] * 4 + list(records))
    records[victim] = mutate(random, records[victim])
    return _zipped(records, random)


def _records(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(records: dict[str, bytes], random: Random) -> bytes:
    return _archive(records, random.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def _archive(records: dict[str, bytes], how: int) -> bytes:
    """A zip archive of `records`, which does not note when it was made."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records.items():
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=how)
    return file.getvalue()


@cache
def seeds() -> tuple[tuple[str, bytes], ...]:
    """A small file of every format, sound, by its name."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": HOSTILE}
    return (
        ("zip.pt", _saved(lambda file: torch.save(state, file))),
        ("whole.pt", _saved(lambda file: torch.save(net, file))),
        ("legacy.bin", _saved(lambda file: torch.save(state, file, _use_new_zipfile_serialization=False))),
        ("packed.pt", _archive(_records(_saved(lambda file: torch.save(state, file))), zipfile.ZIP_DEFLATED)),
        ("a.safetensors", _safetensors()),
        ("a.gguf", _gguf()),
        ("plain.ckpt", pickle.dumps({"a": 1})),
    )


def _saved(save: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


def _safetensors() -> bytes:
    header = {
        "__metadata__": {"format": "pt", "note": HOSTILE},
        **{
            f"layers.{i}.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]}
            for i in range(4)
        },
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


def _gguf() -> bytes:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 3)
    head += string("general.name") + struct.pack("<I", 8) + string(HOSTILE)
    head += string("tokens") + struct.pack("<IIQ", 9, 8, 10) + string("token") * 10
    head += string("size") + struct.pack("<II", 4, 7)
    for number, name in enumerate(("a.weight", HOSTILE)):
        head += string(name) + struct.pack("<IQQIQ", 2, 32, 2, number * 2, number * 256)
    return head + bytes(-len(head) % 32) + bytes(512)
