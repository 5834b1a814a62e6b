"""Checkpoint files of every format against their own libraries: sizes, dtypes, shapes, sharing, every byte."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import memsize
from memsize import CheckpointReport
from memsize.errors import CheckpointError
from memsize.render import render
from tests.checkpoints import (
    GGML,
    SAFETENSORS,
    STORAGES,
    Contents,
    Tensor,
    entry,
    gguf_bytes,
    write_safetensors,
    write_zip,
)

BOTH = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def read(path: Path) -> Contents:
    """What a report has read of a checkpoint."""
    return memsize.checkpoint(path).contents


def saved(value: object, path: Path, zipped: bool = True) -> Contents:
    """What is read of `value` as `torch.save` writes it; every byte of the file is accounted for."""
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    contents = read(path)
    assert_accounted(contents, path)
    return contents


def assert_accounted(contents: Contents, *paths: Path) -> None:
    """Every byte has one use, and every byte of a storage is a tensor's or nobody's."""
    assert contents.size == sum(os.path.getsize(path) for path in paths)
    for file in contents.files:
        assert sum(file.uses) == file.size
        assert file.bytes_for("unclaimed") == 0
    named = {tensor.storage for tensor in contents.tensors}
    stored = sum(storage.bytes for index, storage in enumerate(contents.storages) if index in named)
    assert sum(tensor.bytes + tensor.unneeded for tensor in contents.tensors) == stored


def by_name(contents: Contents) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in contents.tensors}


def flat(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that `torch.load` returns, by the keys down to them."""
    if isinstance(value, torch.Tensor):
        yield ".".join(keys), value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, (*keys, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flat(item, (*keys, str(index)))


def assert_as_loaded(contents: Contents, path: Path) -> None:
    """Names, dtypes, shapes, storages and sharing are those that `torch.load` finds."""
    loaded = dict(flat(torch.load(path, weights_only=True)))
    ours = by_name(contents)
    assert list(ours) == list(loaded)
    storages: dict[int, int] = {}
    for name, tensor in loaded.items():
        assert ours[name].spec.shape == tuple(tensor.shape)
        assert f"torch.{ours[name].spec.dtype}" == str(tensor.dtype)
        assert ours[name].elements == tensor.numel()
        index = ours[name].storage
        assert index is not None
        storage = tensor.untyped_storage()
        assert contents.storages[index].bytes == storage.nbytes()
        assert storages.setdefault(index, storage._cdata) == storage._cdata
    assert len(set(storages.values())) == len(storages)


# What torch.save writes


def trained() -> dict[str, Any]:
    """A training checkpoint: a model, its EMA copy, Adam's state, a scheduler's, plain values."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = model.state_dict()
    return {
        "epoch": 7,
        "model": state,
        "ema": {name: tensor.clone() for name, tensor in state.items()},
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
    }


@BOTH
def test_a_training_checkpoint(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "last.pt"
    contents = saved(trained(), path, zipped)
    assert_as_loaded(contents, path)
    # 6·4 + 4, four of 4 and a counter, 4·2 + 2
    model = sum(tensor.bytes for tensor in contents.tensors if tensor.keys[0] == "model")
    assert model == (24 + 4 + 4 * 4 + 8 + 2) * 4 + 8
    optimizer = [tensor for tensor in contents.tensors if tensor.keys[0] == "optimizer"]
    assert sum(tensor.bytes for tensor in optimizer) == 6 * 4 + 2 * (24 + 4 + 4 + 4 + 8 + 2) * 4
    values = dict(contents.values)
    assert values["epoch"] == "7"
    assert values["lr_scheduler"].startswith("scheduler state")
    assert contents.classes == ()


CLASSIC = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128".split()
UNTYPED = (
    "uint16 uint32 uint64 complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bits8 "
    "bits16 float4_e2m1fn_x2"
).split()
"""Those without a storage class of their own: the legacy format cannot load them back."""


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    ("name", "zipped"), [*((n, False) for n in CLASSIC), *((n, True) for n in (*CLASSIC, *UNTYPED))]
)
def test_every_dtype(tmp_path: Path, name: str, zipped: bool) -> None:
    tensor = torch.empty(5, 3, dtype=getattr(torch, name))
    path = tmp_path / "one.pt"
    contents = saved({"a": tensor}, path, zipped)
    assert_as_loaded(contents, path)
    assert contents.tensors[0].bytes == 15 * tensor.element_size()


def test_the_names_of_storages_are_torchs() -> None:
    theirs = torch.storage._dtype_to_storage_type_map()
    assert {name: str(dtype).removeprefix("torch.") for dtype, name in theirs.items()}.items() <= STORAGES.items()


@BOTH
def test_tied_tensors_are_stored_once(tmp_path: Path, zipped: bool) -> None:
    weight = torch.zeros(10, 4)
    path = tmp_path / "tied.pt"
    contents = saved(OrderedDict(embed=weight, head=weight, again=weight.view(40)), path, zipped)
    assert_as_loaded(contents, path)
    assert [(t.name, t.bytes, t.shared_with) for t in contents.tensors] == [
        ("embed", 160, None),
        ("head", 0, "embed"),
        ("again", 0, "embed"),
    ]


@BOTH
def test_a_view_keeps_its_whole_storage(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "view.pt"
    contents = saved({"rows": torch.zeros(1000, 100)[:2]}, path, zipped)
    tensor = contents.tensors[0]
    assert (tensor.bytes, tensor.unneeded) == (2 * 100 * 4, 998 * 100 * 4)
    assert contents.storages[0].unneeded == 998 * 100 * 4
    assert path.stat().st_size > 400_000


def test_views_that_meet_and_that_do_not(tmp_path: Path) -> None:
    base = torch.zeros(10, 100)
    views = {"a": base[:2], "b": base[1:4], "c": base[8:], "a again": base[:2]}
    tensors = by_name(saved(views, tmp_path / "views.pt"))
    # Rows 0-1, then 2-3 (row 1 is a's), then 8-9; rows 4-7 are nobody's.
    assert [tensor.bytes for tensor in tensors.values()] == [800, 800, 800, 0]
    assert tensors["a"].unneeded == 4 * 400
    assert tensors["b"].shared_with is None
    assert tensors["a again"].shared_with == "a"


def test_columns_need_their_elements_and_not_what_they_span(tmp_path: Path) -> None:
    base = torch.zeros(100, 10)
    tensors = by_name(saved({"x": base[:, 0], "y": base[:, 3], "z": base[:, 0]}, tmp_path / "columns.pt"))
    assert [tensor.bytes for tensor in tensors.values()] == [400, 400, 0]
    assert tensors["x"].unneeded == 4000 - 800
    assert tensors["z"].shared_with == "x"


def test_expanded_transposed_empty_and_scalar_tensors(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    value = {
        "expanded": torch.zeros(1).expand(1000),
        "transposed": torch.zeros(3, 5).t(),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(2.5),
        "meta": torch.zeros(1000, device="meta"),
    }
    contents = saved(value, path)
    sizes = {tensor.name: (tensor.elements, tensor.bytes) for tensor in contents.tensors}
    assert sizes == {
        "expanded": (1000, 4),
        "transposed": (15, 60),
        "empty": (0, 0),
        "scalar": (1, 4),
        "meta": (1000, 0),
    }
    assert by_name(contents)["meta"].storage is None


@pytest.mark.filterwarnings("ignore:Sparse")
@BOTH
def test_sparse_tensors_are_their_pieces(tmp_path: Path, zipped: bool) -> None:
    value = {"coo": torch.eye(5).to_sparse(), "csr": torch.eye(4).to_sparse_csr(), "bsr": torch.eye(4).to_sparse_bsr(2)}
    sizes = {tensor.name: tensor.bytes for tensor in saved(value, tmp_path / "sparse.pt", zipped).tensors}
    assert sizes == {
        "coo.indices": 2 * 5 * 8,
        "coo.values": 5 * 4,
        "csr.crow_indices": 5 * 8,
        "csr.col_indices": 4 * 8,
        "csr.values": 4 * 4,
        "bsr.crow_indices": 3 * 8,
        "bsr.col_indices": 2 * 8,
        "bsr.values": 2 * 4 * 4,
    }


@pytest.mark.filterwarnings("ignore")
@BOTH
def test_quantized_tensors(tmp_path: Path, zipped: bool) -> None:
    channels = torch.quantize_per_channel(
        torch.zeros(4, 6), torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
    )
    value = {"whole": torch.quantize_per_tensor(torch.zeros(4, 6), 0.5, 0, torch.quint8), "channels": channels}
    tensors = by_name(saved(value, tmp_path / "quantized.pt", zipped))
    assert {name: (tensor.spec.dtype, tensor.bytes) for name, tensor in tensors.items()} == {
        "whole": ("quint8", 24),
        "channels": ("qint8", 24),
        "channels.scales": ("float64", 32),
        "channels.zero_points": ("int64", 32),
    }


def test_parameters_keep_what_they_are(tmp_path: Path) -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    tagged = nn.Parameter(torch.zeros(3))
    tagged.note = {"mask": torch.zeros(5)}  # type: ignore[attr-defined]
    value = {"a": nn.Parameter(torch.zeros(2)), "b": frozen, "c": torch.zeros(2, requires_grad=True), "d": tagged}
    tensors = by_name(saved(value, tmp_path / "parameters.pt"))
    assert {name: tensor.trainable for name, tensor in tensors.items()} == {
        "a": True,
        "b": False,
        "c": True,
        "d": True,
        "d.note.mask": False,
    }


def test_a_tensor_and_a_storage_by_themselves(tmp_path: Path) -> None:
    assert saved(torch.zeros(3), tmp_path / "tensor.pt").tensors[0].name == "tensor"
    contents = saved({"raw": torch.zeros(5).untyped_storage()}, tmp_path / "storage.pt")
    assert (contents.tensors[0].bytes, contents.tensors[0].spec.dtype) == (20, "uint8")


@BOTH
def test_a_module_that_was_pickled_whole(tmp_path: Path, zipped: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    contents = saved(model, tmp_path / "whole.pt", zipped)
    assert [tensor.name for tensor in contents.tensors] == list(model.state_dict())
    assert contents.module == "torch.nn.modules.container.Sequential"
    assert "torch.nn.modules.linear.Linear" in contents.classes


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    path = tmp_path / "scripted.pt"
    torch.jit.script(model).save(path)  # type: ignore[attr-defined]
    contents = read(path)
    assert_accounted(contents, path)
    assert contents.format == "TorchScript"
    assert {t.name: t.bytes for t in contents.tensors} == {
        name: tensor.numel() * tensor.element_size() for name, tensor in model.state_dict().items()
    }
    assert contents.files[0].bytes_for("other") > 0  # its code
    assert contents.classes == ()


def test_numpy_arrays_in_the_pickle(tmp_path: Path) -> None:
    value = {"history": np.zeros((300, 2)), "tiny": np.zeros(3), "epoch": 1}
    contents = saved(value, tmp_path / "numpy.pt")
    assert not contents.tensors and contents.files[0].bytes_for("pickle") > 4800
    assert any(name.endswith("_reconstruct") for name in contents.classes)


def test_a_wrapper_subclass_is_what_it_holds(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    path = tmp_path / "int8.pt"
    contents = saved(model.state_dict(), path)
    from tests.models import tensor_bytes

    assert sum(tensor.bytes for tensor in contents.tensors) == tensor_bytes(next(model.parameters()))
    assert {tensor.spec.dtype for tensor in contents.tensors} >= {"int8"}
    assert all(tensor.wrapper and tensor.wrapper.startswith("torchao ") for tensor in contents.tensors)


def test_a_checkpoint_that_was_compressed(tmp_path: Path) -> None:
    value = {"w": torch.zeros(5000), "history": np.zeros(500)}
    torch.save(value, tmp_path / "plain.pt")
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    contents = read(path)
    assert_accounted(contents, path)
    assert by_name(contents)["w"].bytes == 20_000
    assert contents.compressed > 19_000
    assert contents.files[0].bytes_for("tensors") == sum(storage.file_bytes for storage in contents.storages)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text("abc.é", min_size=1, max_size=8),
        st.tuples(
            st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]),
            st.lists(st.integers(0, 5), max_size=3),
            st.sampled_from(["plain", "t", "half", "expand"]),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_whatever_torch_saves_is_read_as_torch_loads_it(tmp_path: Path, drawn: dict[str, Any], zipped: bool) -> None:
    value = {}
    for name, (dtype, shape, how) in drawn.items():
        tensor = torch.zeros(shape, dtype=dtype)
        if how == "t" and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1)
        elif how == "half" and tensor.dim():
            tensor = tensor[: shape[0] // 2]
        elif how == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *shape)
        value[name] = tensor
    path = tmp_path / "drawn.pt"
    assert_as_loaded(saved(value, path, zipped), path)


# safetensors


def test_safetensors_against_its_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 4),
        "b": torch.zeros(5, dtype=torch.float16),
        "c": torch.zeros((), dtype=torch.int64),
        "d": torch.zeros(7).to(torch.float8_e4m3fn),
        "e": torch.zeros(0, 2),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    contents = read(path)
    assert_accounted(contents, path)
    assert dict(contents.values) == {"format": "pt"}
    with safe_open(path, "pt") as theirs:
        assert sorted(tensor.name for tensor in contents.tensors) == sorted(theirs.keys())
        for tensor in contents.tensors:
            loaded = theirs.get_tensor(tensor.name)
            assert tensor.spec.shape == tuple(loaded.shape)
            assert f"torch.{tensor.spec.dtype}" == str(loaded.dtype)
            assert tensor.bytes == loaded.numel() * loaded.element_size()


def test_safetensors_dtypes_are_the_librarys() -> None:
    from safetensors.torch import _TYPES

    for code, dtype in _TYPES.items():
        assert SAFETENSORS[code] == (str(dtype).removeprefix("torch."), 8 * dtype.itemsize)


TOO_MANY = dict.fromkeys(map(str, range(125_001)), entry("F32", [0], 0, 0))


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "overlaps"),
        ({"a": entry("F32", [2], 0, 8)}, 4, "cut off"),
        ({"a": entry("F32", [2], -8, 0)}, 8, "cannot be"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "cannot be"),
        ({"a": entry("F32", [3], 0, 8)}, 8, "does not take"),
        ({"a": entry("F32", [2**62] * 60, 0, 8)}, 8, "does not take"),
        ({"a": entry("F31", [2], 0, 8)}, 8, "did you mean F32"),
        ({"a": {"dtype": "F32"}}, 0, "not that of a tensor"),
        ({"a": [1, 2]}, 0, "not that of a tensor"),
        ({"a": entry("F32", [1.5], 0, 8)}, 8, "cannot be"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "cannot be"),
        (b'{"a":1', 0, "not JSON"),
        (b"[1]", 0, "safetensors|not a JSON object"),
        (b'{"x":{},"x":{}}', 0, "twice"),
        (b'{"x":' + b"[" * 100_000, 0, "not JSON|not that"),
        (b"{" + b"," * 2_000_001, 0, "about 2,000,002 values, more than memsize reads"),
        (TOO_MANY, 0, r"125,001 tensors, .* this size \(125,000\)"),
    ],
)
def test_safetensors_that_contradict_themselves(tmp_path: Path, header: Any, data: int, said: str) -> None:
    path = write_safetensors(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=said):
        read(path)


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}" + bytes(20))
    with pytest.raises(CheckpointError, match="safetensors allows"):
        read(path)
    path.write_bytes(struct.pack("<Q", 1000) + b'{"a"')
    with pytest.raises(CheckpointError, match="cut off"):
        read(path)


def test_bytes_between_tensors_are_shown(tmp_path: Path) -> None:
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 100, 104)}
    contents = read(write_safetensors(tmp_path / "gap.safetensors", header, 110))
    assert contents.files[0].bytes_for("unclaimed") == 96 + 6
    assert sum(contents.files[0].uses) == contents.size


# GGUF


@pytest.mark.parametrize(("order", "version"), [("<", 2), ("<", 3), (">", 3)])
def test_gguf_by_hand(tmp_path: Path, order: str, version: int) -> None:
    # Q4_0: 18 bytes for 32; two rows of 64 are 4 blocks, 72 bytes, padded to 96. Q6_K: 210 for 256.
    tensors = [("blk.0.q", (64, 2), 2, 0), ("blk.0.k", (256,), 14, 96), ("norm", (5,), 0, 320)]
    values: dict[str, Any] = {"general.architecture": "llama", "n": 7, "tokens": [f"t{i}" for i in range(100)]}
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(tensors, values, data=352, order=order, version=version))
    contents = read(path)
    assert_accounted(contents, path)
    assert [(t.name, str(t.spec), t.bytes) for t in contents.tensors] == [
        ("blk.0.q", "Q4_0[2,64]", 72),
        ("blk.0.k", "Q6_K[256]", 210),
        ("norm", "float32[5]", 20),
    ]
    assert contents.files[0].bytes_for("tensors") == 72 + 210 + 20
    assert dict(contents.values) == {"general.architecture": "llama", "n": "7", "tokens": "100 strings"}


def test_gguf_alignment(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes([("a", (3,), 0, 0)], {"general.alignment": 128}, data=128, alignment=128))
    contents = read(path)
    assert_accounted(contents, path)
    assert contents.tensors[0].bytes == 12
    assert contents.storages[0].offset == 128


def test_gguf_aligns_to_32_bytes_where_it_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for length in range(1, 65):
        # 24 B of header; of the tensor its name with 8 B of length, 4 + 8 B of dimensions, 4 B of type, 8 B of offset
        end = 24 + 8 + length + 4 + 8 + 4 + 8
        path.write_bytes(gguf_bytes([("t" * length, (3,), 0, 0)], data=32))
        assert read(path).storages[0].offset == (end + 31) // 32 * 32, length


@pytest.mark.parametrize(
    ("tensors", "data", "said"),
    [
        ([("a", (4,), 0, 0), ("b", (4,), 0, 8)], 64, "overlaps"),
        ([("a", (4,), 0, 2**63)], 64, "cut off"),
        ([("a", (4,), 99, 0)], 64, "unknown type 99"),
        ([("a", (33,), 2, 0)], 64, "cannot cut"),
        ([("a", (2**60, 2**60), 0, 0)], 64, "cut off"),
        ([("a", (1,) * 9, 0, 0)], 64, "9 dimensions"),
    ],
)
def test_gguf_that_contradicts_itself(tmp_path: Path, tensors: Any, data: int, said: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf_bytes(tensors, data=data))
    with pytest.raises(CheckpointError, match=said):
        read(path)


@pytest.mark.parametrize(("tensors", "keys"), [(125_001, 0), (0, 65_537), (2**62, 0), (0, 2**62)])
def test_gguf_that_claims_more_than_it_can_have(tmp_path: Path, tensors: int, keys: int) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys))
    with pytest.raises(CheckpointError, match=r"more than memsize reads|would h"):
        read(path)


@pytest.mark.parametrize("version", [1, 4, 0])
def test_other_versions_of_gguf(tmp_path: Path, version: int) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf_bytes([], version=version))
    with pytest.raises(CheckpointError, match="versions 2 and 3"):
        read(path)


def test_gguf_against_its_library(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    for kind, (elements, size) in gguf.constants.GGML_QUANT_SIZES.items():
        assert (GGML[kind.value].elements, GGML[kind.value].bytes) == (elements, size), kind
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"t{i}" for i in range(50)])
    for name, kind in (("a", "Q8_0"), ("b", "Q4_0"), ("c", "Q5_1")):
        quantization = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(
            name, gguf.quants.quantize(np.ones((8, 64), np.float32), quantization), raw_dtype=quantization
        )
    writer.add_tensor("d", np.ones(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    contents = read(path)
    assert_accounted(contents, path)
    theirs = gguf.GGUFReader(path).tensors
    assert [(t.name, t.bytes, t.elements) for t in contents.tensors] == [
        (t.name, int(t.n_bytes), int(t.n_elements)) for t in theirs
    ]
    assert [contents.storages[i].offset for i in range(4)] == [int(t.data_offset) for t in theirs]


# Several files


def shards(folder: Path, count: int = 3) -> dict[str, str]:
    """Numbered safetensors files of two tensors each, and which file has which tensor."""
    weight_map = {}
    for number in range(1, count + 1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        tensors = {f"layers.{number}.{part}": torch.zeros(number, 4) for part in ("a", "b")}
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return path


TOTAL = 2 * (1 + 2 + 3) * 4 * 4


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    index = write_index(tmp_path, weight_map, TOTAL)
    for place in (tmp_path, index):
        contents = read(place)
        assert_accounted(contents, *tmp_path.glob("*.safetensors"))
        assert {t.name: t.bytes for t in contents.tensors} == {
            f"layers.{number}.{part}": number * 16 for number in (1, 2, 3) for part in ("a", "b")
        }
        assert contents.missing == contents.notes == ()
    assert [contents.files[contents.storages[t.storage or 0].file].name for t in contents.tensors] == [
        weight_map[t.name] for t in contents.tensors
    ]


def test_numbered_files_without_an_index(tmp_path: Path) -> None:
    shards(tmp_path)
    assert len(read(tmp_path).files) == 3
    assert "file 2 of 3" in read(tmp_path / "model-00002-of-00003.safetensors").notes[0]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2 of the 3 files"):
        read(tmp_path)


def test_an_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    del weight_map["layers.1.a"]
    index = write_index(tmp_path, weight_map | {"layers.9.a": "model-00003-of-00003.safetensors"}, 1)
    contents = read(index)
    assert contents.missing == ("layers.9.a",)
    assert any("leaves out 1 tensor" in note for note in contents.notes)
    assert any(f"they take {TOTAL:,}" in note for note in contents.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"weight_map": {"a": "../../etc/passwd"}}', "another folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "missing"),
        ('{"weight_map": {"a": "' + "x" * 5000 + '"}}', "1 of its 1 files are missing"),
        ('{"weight_map": 3}', "no weight_map"),
        ("[1]", "no weight_map"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "{}," * 1_000_001 + "1]", "about 2,000,003 values, more than memsize reads"),
    ],
)
def test_indexes_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=said):
        read(path)


def test_bin_shards(tmp_path: Path) -> None:
    weight_map = {}
    for number in (1, 2):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({f"w{number}": torch.zeros(number)}, tmp_path / name)
        weight_map[f"w{number}"] = name
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    contents = read(tmp_path)
    assert_accounted(contents, *tmp_path.glob("*.bin"))
    assert {t.name: t.bytes for t in contents.tensors} == {"w1": 4, "w2": 8}


def test_folders_without_one_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read(tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save({}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.pt, b\.pt"):
        read(tmp_path)
    (tmp_path / "b.pt").unlink()
    (tmp_path / "c.safetensors").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert read(tmp_path).path.endswith("a.pt")


def test_what_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "long.json").touch()
    os.truncate(tmp_path / "long.json", 2**26 + 1)
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read(tmp_path / "folder.json")
    with pytest.raises(CheckpointError, match=r"67,108,865 bytes, more than memsize reads \(67,108,864\)"):
        read(tmp_path / "long.json")
    with pytest.raises(CheckpointError, match="it is not a file"):
        read(tmp_path / "endless.json")


def test_a_tensor_takes_little_memory_to_read_and_to_draw(tmp_path: Path) -> None:
    """110,000 tensors took 500 MB as JSON: more than half of it the encoder's own small texts."""
    header = {
        f"layers.{i // 100}.experts.{i % 100}.weight": entry("BF16", [8, 4], 64 * i, 64 * i + 64) for i in range(4000)
    }
    path = write_safetensors(tmp_path / "many.safetensors", header, 64 * 4000)
    report = CheckpointReport(read(path))
    render(report, "json")
    tracemalloc.start()
    try:
        contents = read(path)
        kept, read_peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        render(CheckpointReport(contents), "json")
        _, drawn_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4000 * 800 and read_peak < 4000 * 1800 and drawn_peak < 4000 * 2100


def test_a_hundred_gigabytes_are_read_from_their_headers(tmp_path: Path) -> None:
    weight_map = {}
    for number in range(1, 21):
        name = f"model-{number:05d}-of-00020.safetensors"
        header = {
            f"layers.{number}.{part}": entry("BF16", [50_000, 5_000], part * 500_000_000, (part + 1) * 500_000_000)
            for part in range(10)
        }
        write_safetensors(tmp_path / name, header, 5_000_000_000)
        weight_map |= dict.fromkeys(header, name)
    write_index(tmp_path, weight_map, 100_000_000_000)
    contents = read(tmp_path)
    assert sum(tensor.bytes for tensor in contents.tensors) == 100_000_000_000
    assert contents.size > 100_000_000_000
    assert_accounted(contents, *tmp_path.glob("*.safetensors"))


# What is not a checkpoint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"hello world, this is a text", "not a checkpoint that memsize knows"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 44\n", "LFS pointer, not the file of 44"),
        (b"<!doctype html><html></html>", "web page"),
        (b"\x80\x02}q\x00.", "plain pickle"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        (b"PK\x03\x04" + bytes(100), "directory that stands at the end"),
        (b"\x1b[31mred" + bytes(20), r"\\x1b\[31mred"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        read(path)


def test_a_zip_archive_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(CheckpointError, match=r"without a data\.pkl"):
        read(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read(tmp_path / "gone.pt")
    with pytest.raises(CheckpointError, match="File name too long"):
        read(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="No such file"):
        read("~nosuchuser/a.pt")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.pt")
        with pytest.raises(CheckpointError, match="not a file"):
            read(tmp_path / "pipe.pt")


def test_a_tensor_that_reaches_beyond_its_storage(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        pickle = archive.read("good/data.pkl")
    with pytest.raises(CheckpointError, match="should hold 4 elements"):
        read(write_zip(tmp_path / "short.pt", pickle, _0=bytes(8)))
    with pytest.raises(CheckpointError, match="is missing"):
        read(write_zip(tmp_path / "none.pt", pickle))
    longer = pickle.replace(b"K\x04\x85", b"K\x09\x85")
    assert longer != pickle
    with pytest.raises(CheckpointError, match="reaches beyond its storage"):
        read(write_zip(tmp_path / "beyond.pt", longer, _0=bytes(16)))


def test_reading_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    torch.save(trained(), tmp_path / "a.pt")
    (tmp_path / "a.gguf").write_bytes(gguf_bytes([("a", (3,), 0, 0)], data=32))
    code = (
        "import sys; from memsize.cli import run\n"
        "for name in ('a.safetensors', 'a.pt', 'a.gguf'): assert run(['checkpoint', name]) == 0\n"
        "print([name for name in ('torch', 'numpy', 'pandas', 'jinja2', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
