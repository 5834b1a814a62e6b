"""Nothing in a pickle is run: attacks are refused by name, damage is an error, and work and memory stay bounded."""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import io
import os
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from memsize import CheckpointReport
from memsize.errors import CheckpointError
from tests.checkpoints import (
    Blob,
    Dict,
    Object,
    Source,
    Unpickler,
    entry,
    gguf_bytes,
    is_allowed,
    is_refused,
    pickle_values,
    read,
    text,
    write_legacy,
    write_safetensors,
    write_zip,
)

COMMAND = "touch was_run"


def load(data: bytes) -> Any:
    return Unpickler(Source(io.BytesIO(data), "file", len(data)), len(data)).load()


def plain(value: Any) -> Any:
    """A value as Python has it."""
    if isinstance(value, Dict):
        return {plain(key): plain(item) for key, item in value.pairs}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


# Attacks


class Call:
    """Pickles to a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _global(module: str, name: str) -> bytes:
    return b"\x80\x04" + text(module) + text(name) + b"\x93"


ATTACKS = {
    "REDUCE": (pickle.dumps(Call(os.system, COMMAND), 2), "posix.system|nt.system"),
    "STACK_GLOBAL": (_global("os", "system") + text(COMMAND) + b"\x85R.", "os.system"),
    "INST": (b"(S'" + COMMAND.encode() + b"'\nios\nsystem\n.", "os.system"),
    "OBJ": (b"(cos\nsystem\nS'" + COMMAND.encode() + b"'\no.", "os.system"),
    "NEWOBJ": (b"\x80\x02csubprocess\nPopen\n" + text(COMMAND) + b"\x85\x81.", "subprocess.Popen"),
    "eval": (pickle.dumps(Call(eval, "1"), 2), "builtins.eval"),
    "exec": (pickle.dumps(Call(exec, "1"), 4), "builtins.exec"),
    "getattr": (pickle.dumps(Call(getattr, 1, "real"), 4), "builtins.getattr"),
    "import": (pickle.dumps(Call(__import__, "os"), 4), "builtins.__import__"),
    "open": (pickle.dumps(Call(open, "was_run", "w"), 4), "io.open|builtins.open"),
    "python 2": (b"c__builtin__\neval\n(S'1'\ntR.", "builtins.eval"),
    "dotted": (_global("torch", "os.system") + text(COMMAND) + b"\x85R.", "torch.os.system"),
    "dunder": (_global("collections", "OrderedDict.__init__.__globals__") + b".", "__globals__"),
    "importlib": (b"cimportlib\nimport_module\n(S'os'\ntR.", "importlib.import_module"),
    "nested pickle": (b"ctorch.storage\n_load_from_bytes\n(S'x'\ntR.", "torch.storage._load_from_bytes"),
    "torch.load": (b"ctorch\nload\n(S'x'\ntR.", "torch.load"),
    "named only": (b"\x80\x02cos\nsystem\n0N.", "os.system"),
    "hidden call": (
        b"\x80\x02cfunctools\npartial\ncmodule\nname\n\x85R" + text(COMMAND) + b"\x85R.",
        "what another call returned",
    ),
    "in an object's state": (
        b"\x80\x02cmodule\nClass\n)\x81}" + text("a") + b"cos\nsystem\n" + text(COMMAND) + b"\x85Rsb.",
        "os.system",
    ),
    "in an optimizer": (
        b"\x80\x02}(" + text("state") + b"]cposix\nsystem\n" + text(COMMAND) + b"\x85Rau.",
        "posix.system",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("format", ["zip", "deflated", "legacy"])
def test_attacks_are_refused_by_name_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, format: str
) -> None:
    data, said = ATTACKS[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "attack.pt"
    if format == "legacy":
        write_legacy(path, data)
    else:
        write_zip(path, data, zipfile.ZIP_DEFLATED if format == "deflated" else zipfile.ZIP_STORED)
    with pytest.raises(CheckpointError, match=said) as refused:
        read(path)
    assert "refused" in str(refused.value)
    assert not (tmp_path / "was_run").exists()


def test_the_command_line_refuses_with_status_2(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "attack.pt", ATTACKS["REDUCE"][0])
    command = [sys.executable, "-m", "memsize", "checkpoint", path.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "system" in done.stderr and "refused" in done.stderr
    assert not (tmp_path / "was_run").exists()


def test_the_attacks_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(ATTACKS["REDUCE"][0])
    assert (tmp_path / "was_run").exists()


HONEST = [
    "argparse.Namespace",
    "collections.defaultdict",
    "collections.deque",
    "datetime.datetime",
    "functools.partial",
    "models.yolo.Model",
    "models.common.Conv",
    "test.Net",
    "code.Model",
    "utils.platform.Thing",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "omegaconf.dictconfig.DictConfig",
    "pathlib.PosixPath",
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    "torch.nn.modules.linear.Linear",
    "torch.optim.adam.Adam",
    "torch.distributed.tensor.DTensor",
    "transformers.training_args.TrainingArguments",
    "_io.BytesIO",
    "builtins.type",
    "__main__.Net",
]


@pytest.mark.parametrize("path", HONEST)
def test_ordinary_classes_are_opaque_and_not_refused(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert not is_refused(module, name)
    assert not is_allowed(path)


def test_what_weights_only_allows_is_allowed_and_never_refused() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    for path in _get_allowed_globals():
        module, _, name = path.rpartition(".")
        assert is_allowed(path), path
        assert not is_refused(module, name), path


def test_what_weights_only_blocks_is_refused() -> None:
    from torch._weights_only_unpickler import _blocklisted_modules

    assert all(is_refused(module, "anything") for module in _blocklisted_modules)


def test_the_lists_do_not_contradict_each_other() -> None:
    for path in pickle_values._NAMES:
        module, _, name = path.rpartition(".")
        assert is_refused(module, name)
        assert not is_allowed(path)


def test_opaque_objects_are_searched_for_tensors(tmp_path: Path) -> None:
    space = argparse.Namespace(lr=0.1, when=datetime.datetime(2024, 1, 1), ema=[torch.zeros(3)])
    value = {"args": space, "factory": collections.defaultdict(list, a=torch.zeros(2)), "call": functools.partial(int)}
    torch.save(value, tmp_path / "a.pt")
    contents = read(tmp_path / "a.pt")
    assert {t.name: t.bytes for t in contents.tensors} == {"args.ema.0": 12, "factory.a": 8}
    assert set(contents.classes) >= {"argparse.Namespace", "datetime.datetime", "functools.partial"}


# The machine against Python's own


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(0, 5))
def test_plain_values_are_as_python_reads_them(value: Any, protocol: int) -> None:
    assert plain(load(pickle.dumps(value, protocol))) == value


@given(st.binary(max_size=40), st.integers(3, 5))
def test_bytes(value: bytes, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


def test_long_texts_and_bytes_are_not_kept() -> None:
    data = pickle.dumps(["x" * 5000, b"y" * 5000], 4)
    first, second = load(data)
    assert isinstance(first, Blob) and first.text and first.length == 5000
    assert data[second.start : second.start + second.length] == b"y" * 5000


def test_sharing_and_cycles() -> None:
    inner: list[Any] = [1]
    twice = load(pickle.dumps([inner, inner]))
    assert twice[0] is twice[1]
    inner.append(inner)
    cycle = load(pickle.dumps(inner))
    assert cycle[1] is cycle


def test_every_instruction_is_known() -> None:
    assert {ord(op.code) for op in pickletools.opcodes} == Unpickler.dispatch.keys()


def test_objects_keep_their_class_and_their_state() -> None:
    value = load(pickle.dumps(argparse.Namespace(a=1), 4))
    assert isinstance(value, Object)
    assert str(value.callee) == "argparse.Namespace"
    assert plain(value.states) == [{"a": 1}]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x07N.",
        b"K.",
        b"(((",
        b"t.",
        b"u.",
        b"N(K\x01u.",
        b"R.",
        b"h\x05.",
        b"Nr\x00\x01\x00\x00.",
        b"Np-1\n.",
        b"Np" + b"9" * 30 + b"\n.",
        b"Np\x35\nNp3\ng4\n.",
        b"(K\x01d.",
        b"NNR.",
        b"N)R.",
        b"b.",
        b"NQ.",
        b"Pabc\n.",
        b"\x82\x01.",
        b"\x97.",
        b"\x98.",
        b"K\x01K\x02a.",
        b"\xff.",
        b"cos",
        b"I9" + b"9" * 500 + b"\n.",
        b"Ix\n.",
        b"Fx\n.",
        b"\x8b\xff\xff\xff\x7f" + bytes(9),
        b"T\xff\xff\xff\xff" + bytes(9),
        b"\x8d" + struct.pack("<Q", 2**63) + bytes(9),
        b"\x8e" + struct.pack("<Q", 2**40) + bytes(9),
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
        b"ctorch.serialization\n_get_layout\nq\x00ctorch._utils\n_rebuild_sparse_tensor\n(h\x00NtR.",
        b"\x80\x02ccopyreg\n__newobj__\nq\x01(" + b"h\x01" * 3000 + b"tq\x020h\x01h\x02R.",
    ],
)
def test_damaged_pickles_are_errors(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(data)


# Bounds


def _list_of_itself_twice(depth: int, inner: bytes = b"N") -> bytes:
    """Lists of two of the next, `depth` deep: 2 to that power places in a few bytes."""
    levels = b"".join(b"]q" + bytes([i + 1]) + b"(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(depth))
    return b"\x80\x02" + inner + b"q\x00" + levels + b"."


META = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n))\x89tR"


def test_references_do_not_multiply_without_end(tmp_path: Path) -> None:
    assert read(write_zip(tmp_path / "a.pt", _list_of_itself_twice(90))).tensors == ()
    with pytest.raises(CheckpointError, match="more than memsize reads"):
        read(write_zip(tmp_path / "b.pt", _list_of_itself_twice(90, META)))


def test_nesting_is_bounded(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "deep.pt", b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".")
    with pytest.raises(CheckpointError, match="nested"):
        read(path)


def test_a_list_that_holds_itself(tmp_path: Path) -> None:
    assert read(write_zip(tmp_path / "self.pt", b"\x80\x02]q\x00h\x00a.")).tensors == ()


def test_too_many_objects(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "many.pt", b"\x80\x02" + b"]0" * 4_000_001 + b"N.")
    with pytest.raises(CheckpointError, match="builds more objects"):
        read(path)


@pytest.mark.thorough
def test_a_call_cannot_copy_a_list_again_and_again(tmp_path: Path) -> None:
    pairs = b"]q\x02(" + b"N" * 100_000 + b"e0"
    data = b"\x80\x02ccollections\nOrderedDict\nq\x010" + pairs + b"h\x01h\x02\x85R0" * 5000 + b"N."
    with pytest.raises(CheckpointError, match="builds more objects"):
        read(write_zip(tmp_path / "copies.pt", data))


META_AGAIN = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\nq\x01(ctorch\nfloat32\n))\x89tq\x020"

BOMBS = {
    "memo": (b"N", b"\x94", 15_900_000),
    "objects": (b"cmodule\nClass\nq\x00", b"h\x00)R", 4_000_000),
    "dictionaries": (b"N", b"}", 4_000_000),
    "marks": (b"N", b"(", 15_900_000),
    "numbers": (b"N", b"M\xff\x7f", 7_000_000),
    "names": (b"N", b"cm\nC\n", 2_500_000),
    "tensors": (META_AGAIN + b"](", b"h\x01h\x02R", 499_000),
}
"""How each begins, and what it repeats how many times."""


def bomb(path: Path, name: str, compression: int = zipfile.ZIP_STORED) -> Path:
    start, repeated, count = BOMBS[name]
    return write_zip(
        path, b"\x80\x02" + start + repeated * count + (b"e." if name == "tensors" else b"N."), compression
    )


@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["deflated", "stored"])
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_unfold(tmp_path: Path, name: str, stored: bool) -> None:
    path = bomb(tmp_path / "bomb.pt", name, zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED)
    if not stored:
        assert path.stat().st_size < 70_000
    with pytest.raises(CheckpointError, match=r"builds more objects|holds more|unpacks to more"):
        read(path)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.parametrize("name", ["dictionaries", "numbers"])
def test_bombs_take_little_memory(tmp_path: Path, name: str) -> None:
    bomb(tmp_path / "bomb.pt", name)
    code = (
        "import resource; from memsize.cli import run\n"
        "assert run(['checkpoint', 'bomb.pt']) == 2\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    # Forked from a small process: the peak of a process begins with that of the one it was forked from.
    again = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"]
    done = subprocess.run(
        [*again, sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 300_000


@pytest.mark.slow
def test_a_hundred_thousand_tensors_are_no_bomb(tmp_path: Path) -> None:
    base = torch.zeros(100_000, 2)
    torch.save({f"layers.{n}.weight": nn.Parameter(row) for n, row in enumerate(base)}, tmp_path / "views.pt")
    contents = read(tmp_path / "views.pt")
    assert len(contents.tensors) == 100_000
    assert sum(tensor.bytes for tensor in contents.tensors) == 100_000 * 2 * 4


@pytest.mark.thorough
def test_larger_files_may_hold_more(tmp_path: Path) -> None:
    data = b"\x80\x02" + META_AGAIN + b"](" + b"h\x01h\x02R" * 150_000 + b"e."
    with pytest.raises(CheckpointError, match="125,000 tensors"):
        read(write_zip(tmp_path / "small.pt", data))
    path = write_legacy(tmp_path / "large.pt", data)
    os.truncate(path, 128 * 2**20)  # with nothing behind: twice as large as a small file, so twice 125,000 tensors
    assert len(read(path).tensors) == 150_000


@pytest.mark.thorough
def test_views_that_all_overlap_do_not_take_time_squared(tmp_path: Path) -> None:
    def view(start: int, size: int) -> bytes:
        numbers = struct.pack("<i", start) + b"J" + struct.pack("<i", size)
        return b"h\x01(h\x00J" + numbers + b"\x85K\x01\x85\x89NtR"

    count = 20_000
    storage = b"(" + text("storage") + b"ctorch\nByteStorage\n" + text("0") + text("cpu") + b"J"
    start = b"ctorch._utils\n_rebuild_tensor_v2\nq\x010" + storage + struct.pack("<i", count) + b"tQq\x000]("
    single = b"".join(view(n, 1) for n in range(count))
    again = read(write_zip(tmp_path / "twice.pt", b"\x80\x02" + start + single * 2 + b"e.", _0=bytes(count)))
    assert [tensor.shared_with for tensor in again.tensors[count:]] == [str(n) for n in range(count)]
    whole = single + view(0, count) * count
    with pytest.raises(CheckpointError, match="overlap each other"):
        read(write_zip(tmp_path / "whole.pt", b"\x80\x02" + start + whole + b"e.", _0=bytes(count)))


def test_a_storage_cannot_be_listed_again_and_again(tmp_path: Path) -> None:
    storage = b"(" + text("storage") + b"ctorch\nByteStorage\n" + text("0") + text("cpu") + b"K\x00tQ."
    path = write_legacy(tmp_path / "keys.pt", b"\x80\x02" + storage)
    data = path.read_bytes().removesuffix(b"\x80\x02].")
    path.write_bytes(data + b"\x80\x02(" + text("0") + b"l." + bytes(8))
    assert len(read(path).storages) == 1
    path.write_bytes(data + b"\x80\x02(" + text("0") * 2 + b"l." + bytes(16))
    with pytest.raises(CheckpointError, match="lists the storage '0'"):
        read(path)


@pytest.mark.parametrize(
    "use",
    [
        b"}h\x3cNs",
        b"\x8f(h\x3c\x90",
        b"ctorch._utils\n_rebuild_sparse_tensor\n(h\x3cNtR",
        b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(h\x3c))\x89tR",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(h\x3ch\x3ch\x3ch\x3ctR",
        b"ccopyreg\n__newobj__\n(h\x3ctR",
    ],
)
def test_a_tuple_of_tuples_is_neither_hashed_nor_shown(use: bytes) -> None:
    levels = b"".join(b"(" + (b"h" + bytes([n])) * 10 + b"tq" + bytes([n + 1]) for n in range(60))
    said = ""
    try:
        load(b"\x80\x04" + text("lol") + b"q\x00" + levels + b"0" + use + b".")
    except CheckpointError as error:
        said = str(error)
    assert len(said) < 200


def test_a_zip_bomb(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "bomb.pt", b"\x80\x02" + b"N0" * 40_000_000 + b"N.", zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    with pytest.raises(CheckpointError, match="unpacks to more than"):
        read(path)


def test_a_record_whose_own_header_has_another_name(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "name.pt", b"N.", zipfile.ZIP_DEFLATED)
    path.write_bytes(path.read_bytes().replace(b"archive/data.pkl", b"archive/dat\x97.pkl", 1))
    with pytest.raises(CheckpointError, match="cannot be decompressed") as refused:
        read(path)
    assert str(refused.value).isprintable()


def test_two_records_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"N.")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/data.pkl", b"cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="two records called"):
        read(path)


def test_records_that_overlap(tmp_path: Path) -> None:
    path = tmp_path / "overlap.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"N.")
        archive.writestr("a/data/0", bytes(100))
        archive.writestr("a/data/1", bytes(100))
        # The directory says that the second lies where the first does.
        archive.filelist[2].header_offset = archive.filelist[1].header_offset
    with pytest.raises(CheckpointError, match=r"overlap|not where"):
        read(path)


def test_a_storage_that_claims_another_size_than_its_record(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "sizes.pt", b"N.", _0=bytes(64))
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02")
    data[place + 24 : place + 28] = struct.pack("<I", 10**9)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="stored as it is"):
        read(path)


# Mutations of real files


def _real_files(folder: Path) -> dict[str, bytes]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 3)).sum().backward()
    optimizer.step()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "whole": model,
        "args": argparse.Namespace(a=1),
        "history": np.arange(200.0),
        "sparse": torch.eye(3).to_sparse(),
    }
    torch.save(value, folder / "zip.pt")
    torch.save(value, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "zip.pt") as old, zipfile.ZipFile(folder / "d.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    header = {"a": entry("F32", [3, 4], 0, 48), "b": entry("F16", [5], 48, 58), "__metadata__": {"x": "y"}}
    write_safetensors(folder / "s.safetensors", header, 58)
    tensors = [("a", (32, 2), 2, 0), ("b", (4,), 0, 64)]
    (folder / "g.gguf").write_bytes(gguf_bytes(tensors, {"name": "x", "tokens": ["a"] * 20}, data=96))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _mutated(data: bytes, choose: random.Random) -> bytes:
    """`data` cut off, with bits flipped, with bytes replaced, removed or repeated."""
    out = bytearray(data)
    kind = choose.randrange(5)
    place = choose.randrange(len(out))
    if kind == 0:
        return bytes(out[:place])
    if kind == 1:
        for _ in range(choose.randrange(1, 8)):
            out[choose.randrange(len(out))] ^= 1 << choose.randrange(8)
    elif kind == 2:
        out[place : place + choose.randrange(1, 16)] = choose.randbytes(choose.randrange(16))
    elif kind == 3:
        out[place] = choose.choice(b"\x00\xff(.Rbo\x80\x81\x93Q")
    else:
        out[place:place] = out[choose.randrange(len(out)) :][:300]
    return bytes(out)


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(0, 4))
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, choose: random.Random, which: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "real"
    if not folder.exists():
        folder.mkdir()
        _REAL.update(_real_files(folder))
    name = sorted(_REAL)[which]
    path = folder / f"mutated-{name}"
    path.write_bytes(_mutated(_REAL[name], choose))
    try:
        report = CheckpointReport(read(path))
    except CheckpointError as error:
        said = str(error)
    else:
        said = f"{report}".replace("\n", "")
        assert report.size == path.stat().st_size
        assert all(sum(file.uses) == file.size for file in report.contents.files)
        assert report.to_json()
    assert said.isprintable()


_REAL: dict[str, bytes] = {}


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_never_run(data: bytes) -> None:
    said = ""
    try:
        load(b"\x80\x04" + data)
    except CheckpointError as error:
        said = str(error)
    assert said.isprintable()
