"""What `torch.save(model.state_dict())` writes of quantized models, beside what memsize says that they store.

The bytes in the file are counted three times: by memsize's reader, by the records of the zip archive, and by the
storages that `torch.load` brings back.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memsize
from tests.models import stored_tensors

pytestmark = pytest.mark.filterwarnings("ignore")

MODULE_SCALES = 12
"""A float32 scale and an int64 zero point, which torch.ao's modules keep as Python numbers and save as tensors."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(32, 16, 2, bidirectional=True), nn.GRU(16, 8)
        self.head = nn.Linear(32, 8)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.norm, self.relu, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(self.into(x)))).mean((2, 3))
        return self.out_of(self.head(y))


class Codes(nn.Module):
    """Packed 4-bit codes with scales, zero points and an order of groups, as GPTQ saves them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(64 // 8, 128, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(2, 128 // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(2, 128, dtype=torch.float16))
        self.register_buffer("g_idx", torch.arange(64, dtype=torch.int32) // 32)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)


class Params4bit(nn.Parameter):
    """Packed nibbles as a parameter, as bitsandbytes holds them; its statistics are saved beside it."""


class Nibbles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        packed = torch.zeros(64 * 128 // 2, 1, dtype=torch.uint8)
        self.weight = Params4bit(packed, requires_grad=False)
        self.register_buffer("absmax", torch.ones(64 * 128 // 64))
        self.register_buffer("quant_map", torch.zeros(16))


def torchao(name: str, **options: Any) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = Net()
    quantization.quantize_(model, getattr(quantization, name)(**options))
    return model


def dynamic(model: nn.Module, dtype: torch.dtype = torch.qint8) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM, nn.GRU}, dtype=dtype)


def static() -> nn.Module:
    quantization = torch.ao.quantization
    engine = torch.backends.quantized.engine
    model = Convolutional().eval()
    model.qconfig = quantization.get_default_qconfig("x86" if engine == "none" else engine)
    model = quantization.fuse_modules(model, [["conv", "norm", "relu"]])
    quantization.prepare(model, inplace=True)
    model(torch.randn(2, 3, 8, 8))
    return quantization.convert(model)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "torchao int8": (lambda: torchao("Int8WeightOnlyConfig"), 0),
    "torchao int8, activations too": (lambda: torchao("Int8DynamicActivationInt8WeightConfig"), 0),
    "torchao fp8": (lambda: torchao("Float8WeightOnlyConfig"), 0),
    "torchao int4 in int8": (lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), 0),
    "torchao int8 activations, intx weights": (lambda: torchao("Int8DynamicActivationIntxWeightConfig"), 0),
    "torch.ao dynamic linear": (lambda: dynamic(Net()), 2),
    "torch.ao dynamic recurrent": (lambda: dynamic(Recurrent()), 1),
    "torch.ao static": (static, 2),
    "codes in int32": (Codes, 0),
    "nibbles": (Nibbles, 0),
}


def pieces(value: Any) -> Iterator[Tensor]:
    """Every plain tensor in a state dict, those inside wrappers, tuples and packed objects too."""
    if isinstance(value, dict):
        for item in value.values():
            yield from pieces(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from pieces(item)
    elif isinstance(value, torch.ScriptObject):
        yield from pieces(value.unpack() if hasattr(value, "unpack") else value.__getstate__())
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from pieces(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
        if value.is_quantized and value.qscheme() is torch.per_channel_affine:
            yield from (value.q_per_channel_scales(), value.q_per_channel_zero_points())


def bytes_in(value: Any) -> int:
    held = [piece.untyped_storage() for piece in pieces(value)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@pytest.mark.parametrize("name", CASES)
def test_a_file_holds_what_the_model_stores(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    build, scaled = CASES[name]
    model = build()
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    persistent = [t for t in stored_tensors(model) if t.kind != "attribute" and not t.name.endswith("shifts")]
    stored = sum(tensor.bytes for tensor in persistent)

    found = memsize.checkpoint(path)
    assert found.tensors["bytes"].sum() == stored + scaled * MODULE_SCALES
    with zipfile.ZipFile(path) as archive:
        assert sum(i.file_size for i in archive.infolist() if "/data/" in i.filename) == stored + scaled * MODULE_SCALES
    if "recurrent" not in name:  # its packed cells come back as objects that unpack into copies
        assert bytes_in(torch.load(path, weights_only=False)) == stored + scaled * MODULE_SCALES
    assert set(found.parts["part"]) == {"model"}


def test_half_precision_in_memory_is_float32_in_the_file(tmp_path: Path) -> None:
    """torch.ao keeps the weights of a float16 linear in two bytes, and unpacks them to four when it saves them."""
    model = dynamic(Net(), torch.float16)
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    stored = sum(tensor.bytes for tensor in stored_tensors(model))
    # 2·64·128 weights, 128 + 64 biases, 2·128 of the norm
    assert stored == 2 * 8192 * 2 + (192 + 256) * 4
    assert memsize.checkpoint(path).tensors["bytes"].sum() == stored + 2 * 8192 * 2 + 2 * MODULE_SCALES
