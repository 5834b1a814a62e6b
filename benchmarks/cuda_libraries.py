"""How much code of CUDA libraries a GPU is given: read from the wheels on PyPI, without a GPU.

    python -m benchmarks.cuda_libraries [RELEASE ...]

Downloads each release of PyTorch with the NVIDIA wheels that it pins, one at a time, deletes them again, and writes
`memsize/device/cuda_code.csv`. Needs ``pip install lz4 zstandard`` and about 4 GB of disk.

A library holds its kernels in a section ``.nv_fatbin``: for each source file a container, in it one image (an ELF
file, mostly compressed) for each architecture. A card takes the image of its own architecture, or of the nearest lower
one of the same major version; PTX, which the driver compiles where there is neither, is not counted. Of an image,
its code, constants and global variables get onto the card, all of them sections that are marked as allocated. So are
those that describe a kernel's shared memory (``.nv.shared``), of which that is not known: they are counted apart. Those
of intermediate code (``merc``) are not counted.
"""

from __future__ import annotations

import csv
import mmap
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memsize.units import MiB

TABLE = Path(__file__).parents[1] / "memsize" / "device" / "cuda_code.csv"
RELEASES = (
    *("2.0.1", "2.1.2", "2.2.2", "2.3.1", "2.4.1", "2.5.1", "2.6.0", "2.7.1"),
    *("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.0"),
)
CAPABILITIES = (60, 61, 70, 75, 80, 86, 89, 90, 100, 103, 120)
LIBRARIES = {
    "torch": r"libtorch_cuda(_cu|_cpp)?\.so",
    "linalg": r"lib(torch_cuda_linalg\.so|cusolver\.so)",
    "cublas": r"libcublas(Lt)?\.so",
    "cudnn": r"libcudnn(?!_adv|_ops\.)\w*\.so",
    "cudnn_norm": r"libcudnn_ops\.so",
    "cudnn_rnn": r"libcudnn_adv\w*\.so",
    "cusparse": r"libcusparse\.so",
}
"""Files that are loaded together. NCCL is left out: what it takes was measured with its code; cuFFT has 5 MiB. Before
cuDNN 9 what became libcudnn_ops is loaded with every handle, which it makes."""

_PINNED = re.compile(r"(nvidia-(?:cublas|cudnn|cusolver|cusparse)(?:-cu\d+)?) ?\(?[<=]=([\d.]+)")
_TOOLKIT = re.compile(r"cuda-toolkit\[(.*)\] ?\(?==([\d.]+)")
_PLATFORMS = (
    "manylinux1",
    "manylinux2010",
    "manylinux2014",
    *(f"manylinux_2_{minor}" for minor in (17, 18, 24, 27, 28)),
)
_FATBIN, _LZ4, _ZSTD = 0xBA55ED50, 0x2000, 0x8000
_ELF_IMAGE, _ALLOCATED = 2, 2


class Section(NamedTuple):
    """A section of an ELF file."""

    name: str
    flags: int
    start: int
    size: int


class Image(NamedTuple):
    """The kernels of one source file for one architecture, as they are stored: `size` bytes when decompressed."""

    architecture: int
    start: int
    stored: int
    flags: int
    size: int


@dataclass(frozen=True)
class Code:
    """What a card loads: bytes, those of them that describe shared memory, and from how many images."""

    bytes: int = 0
    shared: int = 0
    images: int = 0

    def __add__(self, other: Code) -> Code:
        return Code(self.bytes + other.bytes, self.shared + other.shared, self.images + other.images)


def sections(file: Any) -> list[Section]:
    """The sections of an ELF file, which is bytes or mapped."""
    (start,) = struct.unpack_from("<Q", file, 0x28)
    size, count, names = struct.unpack_from("<HHH", file, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", file, start + number * size) for number in range(count)]
    read = []
    for name, _, flags, _, offset, length in headers:
        begin = headers[names][4] + name
        read.append(Section(bytes(file[begin : file.find(b"\0", begin)]).decode(), flags, offset, length))
    return read


def containers(file: Any) -> Iterator[list[Image]]:
    """The images of each source file of a library."""
    for section in sections(file):
        at, end = section.start, section.start + section.size
        while section.name == ".nv_fatbin" and at < end - 16:
            magic, _, header, size = struct.unpack_from("<IHHQ", file, at)
            if magic == _FATBIN:
                yield list(_images(file, at + header, at + header + size))
            at += header + size if magic == _FATBIN else 8  # the next one is aligned


def _images(file: Any, at: int, end: int) -> Iterator[Image]:
    while at < end:
        kind, _, header, stored, compressed = struct.unpack_from("<HHIQI", file, at)
        (architecture,) = struct.unpack_from("<I", file, at + 28)
        flags, _, size = struct.unpack_from("<QQQ", file, at + 40)
        if kind == _ELF_IMAGE:
            yield Image(architecture, at + header, compressed or stored, flags, size or stored)
        at += header + stored


def chosen(images: Iterable[Image], capability: int) -> list[Image]:
    """Those that a card may take: of the nearest architecture, in variants of which one is loaded."""
    suitable = [i for i in images if i.architecture // 10 == capability // 10 and i.architecture <= capability]
    nearest = max((image.architecture for image in suitable), default=None)
    return [image for image in suitable if image.architecture == nearest]


def code_of(image: bytes) -> Code:
    """What a decompressed image puts on the card."""
    allocated = [
        s for s in sections(image) if s.flags & _ALLOCATED and not s.name.startswith((".nv.merc", ".nv.capmerc"))
    ]
    shared = sum(section.size for section in allocated if section.name.startswith(".nv.shared"))
    return Code(sum(section.size for section in allocated), shared, 1)


def decompressed(file: Any, image: Image) -> bytes:
    """The ELF file of an image."""
    stored = file[image.start : image.start + image.stored]
    if image.flags & _LZ4:
        from lz4.block import decompress

        return decompress(stored, uncompressed_size=image.size)
    if image.flags & _ZSTD:
        from zstandard import ZstdDecompressor

        return ZstdDecompressor().decompress(stored, max_output_size=image.size)
    return bytes(stored)


def library(file: Any) -> dict[int, Code]:
    """What each kind of card loads of a library when all of it is loaded."""
    loaded = dict.fromkeys(CAPABILITIES, Code())
    for images in containers(file):
        of_image = cache(lambda image: code_of(decompressed(file, image)))
        for capability in CAPABILITIES:
            variants = map(of_image, chosen(images, capability))
            loaded[capability] += max(variants, key=lambda code: code.bytes, default=Code())
    return loaded


# -- wheels ------------------------------------------------------------------------------------------------------------


@cache
def wheel(requirement: str) -> tuple[tuple[str, ...], Mapping[str, dict[int, Code]]]:
    """What a wheel requires, and the code in its libraries."""
    with tempfile.TemporaryDirectory() as folder:
        platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*command, *platforms, "--python-version", "3.11", requirement], check=True)
        print(f"reading {requirement}", file=sys.stderr, flush=True)
        with zipfile.ZipFile(next(Path(folder).iterdir())) as files:
            metadata = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
            lines = files.read(metadata).decode().splitlines()
            return tuple(line[15:] for line in lines if line.startswith("Requires-Dist: ")), _read(files, Path(folder))


def _read(files: zipfile.ZipFile, folder: Path) -> dict[str, dict[int, Code]]:
    read: dict[str, dict[int, Code]] = {}
    for name in files.namelist():
        kind = next((kind for kind, names in LIBRARIES.items() if re.match(names, Path(name).name)), None)
        if kind:
            path = Path(files.extract(name, folder))
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                read[kind] = added(read.get(kind, {}), library(mapped))
            path.unlink()
    return read


def added(one: Mapping[int, Code], other: Mapping[int, Code]) -> dict[int, Code]:
    """Both, for each kind of card."""
    return {capability: one.get(capability, Code()) + code for capability, code in other.items()}


def rows(release: str) -> Iterator[list[str]]:
    """A line of the table for each library of a release."""
    required, own = wheel(f"torch==={release}")  # and no build for a CPU, whose version is longer
    pins = [match for line in required if (match := _PINNED.match(line))]
    for match in filter(None, map(_TOOLKIT.match, required)):
        parts, version = match.groups()
        lines = [line for line in wheel(f"cuda-toolkit=={version}")[0] if "extra == 'all'" in line]
        pins += [m for line in lines if (m := _PINNED.match(line)) and m[1].removeprefix("nvidia-") in parts]
    libraries = dict(own)
    for name, version in (match.groups() for match in pins):
        exact = version.removesuffix(".") + ".*" * version.endswith(".")
        for kind, code in wheel(f"{name}=={exact}")[1].items():
            libraries[kind] = added(libraries.get(kind, {}), code)
    for kind in filter(libraries.__contains__, LIBRARIES):
        yield [".".join(release.split(".")[:2]), cuda_of(required), kind, *map(_cell, libraries[kind].values())]


def cuda_of(required: Iterable[str]) -> str:
    """The CUDA that a release was built with: that of the runtime it requires."""
    runtime = re.compile(r"(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit\[.*\]) ?\(?==(\d+\.\d+)")
    return next(match[1] for line in required if (match := runtime.match(line)))


def _cell(code: Code) -> str:
    """MiB without and with what describes shared memory, and the number of images."""
    return f"{(code.bytes - code.shared) / MiB:.0f} {code.bytes / MiB:.0f} {code.images}" if code.images else ""


def main(releases: Sequence[str]) -> None:
    """Write the table, or replace the lines of some releases in it."""
    with TABLE.open(newline="") as file:
        lines = {tuple(line[:3]): line for line in csv.reader(file)} if releases else {}
    head = ["torch", "cuda", "library", *(f"{c // 10}.{c % 10}" for c in CAPABILITIES)]
    for release in releases or RELEASES:
        lines |= {tuple(line[:3]): line for line in rows(release)}
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(head)
        table.writerows(sorted((line for line in lines.values() if line != head), key=_place))


def _place(line: Sequence[str]) -> tuple[int, int]:
    return int(line[0].split(".")[1]), [*LIBRARIES].index(line[2])


if __name__ == "__main__":
    main(sys.argv[1:])
