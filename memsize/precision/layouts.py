"""The one table of storage layouts: which modules a library quantizes, and which tensors then stand for their weights.

Every layout is a library's default, and pure arithmetic on shapes. The tests quantize real layers with that library and
compare byte for byte. What a library leaves alone stays as the model has it.

| layout         | library                                        | a weight [N, K] becomes                    |
| -------------- | ---------------------------------------------- | ------------------------------------------ |
| `int8-dynamic` | `torch.ao.quantization.quantize_dynamic`       | N·K int8                                   |
| `int8-static`  | `torch.ao.quantization.convert`, x86 or fbgemm | N·K int8, N float64, N int64               |
| `int8-weight`  | torchao 0.18 `Int8WeightOnlyConfig`            | N·K int8, N float32, N int8                |
| `fp8-weight`   | torchao 0.18 `Float8WeightOnlyConfig`          | N·K float8_e4m3fn, N float32               |
| `int4-weight`  | torchao 0.18 `Int4WeightOnlyConfig`            | N·K/2 bytes, 2·N·K/128 floats of its dtype |
| `nf4`          | bitsandbytes `Linear4bit`, `nf4`               | N·K/2 bytes, N·K/64 + 16 float32           |

Proved with real layers on a CPU: all but `int4-weight`, whose quantizing kernel (mslk) needs a GPU. There torchao's own
`quantize_` and `Int4Tensor.from_hp` ran with that kernel replaced by one of the shapes that `Int4Tensor` documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from memsize.records.trace import StoredPart, TensorSpec

Shape = tuple[int, ...]
Parts = tuple[StoredPart, ...]

GROUP = 128
"""Elements that share a scale in `Int4WeightOnlyConfig`, along a row."""
BLOCK = 64
"""Elements that share an absmax in bitsandbytes' 4-bit formats, in memory order."""

_CELLS = ("LSTMCell", "GRUCell", "RNNCell")


Kernel = Literal["quantized", "copy kept", "copy freed", "no gradient"]
"""How a layer multiplies: with the quantized values themselves, with a copy that is kept for backward, with a copy that
backward makes again, or without a gradient.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one library stores quantized weights.

    `modules` are the classes of `torch.nn` that it converts, `subclasses` whether it also takes classes derived from
    them. `weight` gives the parts of one weight from its shape and floating dtype, `skips` why a weight of some shape
    is left alone (None: it is not). A `packed` layout takes the bias into the packed object too. `claims` is the dtype
    that the quantized weight shows to PyTorch: None for the dtype that it had. `kernel` says how its layers multiply
    (`memsize.precision.quantized.run_as`).
    """

    name: str
    library: str
    wrapper: str
    weight: Callable[[Shape, str], Parts]
    kernel: Kernel
    converts: str = "Linear"
    modules: tuple[str, ...] = ("Linear",)
    subclasses: bool = True
    packed: bool = False
    claims: str | None = None
    skips: Callable[[Shape], str | None] = lambda shape: None
    note: str = ""

    def bias(self, module: str, shape: Shape, dtype: str) -> Parts:
        """The parts that stand for a bias of a module of class `module`; nothing when the layout leaves biases alone.

        A cell keeps two: torch.ao packs the bias and leaves the one that its constructor made as an attribute.
        """
        if not self.packed:
            return ()
        bias = part("bias", dtype, shape)
        return (bias, part("unused bias", "float32", shape)) if module in _CELLS else (bias,)


def part(name: str, dtype: str, shape: Shape) -> StoredPart:
    """One plain tensor of `dtype` and `shape` with what it stores."""
    return StoredPart(name, TensorSpec(dtype, shape), math.prod(shape) * getattr(torch, dtype).itemsize)


def int8_per_tensor(shape: Shape, dtype: str) -> Parts:
    """torch.ao's dynamic int8: one scale and one zero point, which are fields of the tensor and not tensors.

    Source: `default_dynamic_qconfig` with `default_weight_observer`, per tensor symmetric.
    """
    return (part("data", "qint8", shape),)


def int8_per_channel(shape: Shape, dtype: str) -> Parts:
    """torch.ao's static int8: a float64 scale and an int64 zero point for each output channel (the first dimension).

    Source: `default_per_channel_weight_observer` in the x86 and fbgemm configurations; `torch.quantize_per_channel`.
    """
    channels = shape[:1]
    return (part("data", "qint8", shape), part("scales", "float64", channels), part("zero_points", "int64", channels))


def int8_rows(shape: Shape, dtype: str) -> Parts:
    """torchao's `Int8Tensor`, one float32 scale and one int8 zero point a row, whatever the dtype of the weight."""
    rows = (*shape[:-1], 1)
    return part("qdata", "int8", shape), part("scale", "float32", rows), part("zero_point", "int8", rows)


def float8_rows(shape: Shape, dtype: str) -> Parts:
    """torchao's `Float8Tensor`, one float32 scale a row, whatever the dtype of the weight."""
    return part("qdata", "float8_e4m3fn", shape), part("scale", "float32", (*shape[:-1], 1))


def int4_groups(shape: Shape, dtype: str) -> Parts:
    """torchao's `Int4Tensor`: two values a byte, scale and zero point ``[K / 128, N]`` in the dtype of the weight."""
    (rows, columns), groups = shape, (shape[1] // GROUP, shape[0])
    return part("qdata", "int8", (rows, columns // 2)), part("scale", dtype, groups), part("zero_point", dtype, groups)


def nf4_blocks(shape: Shape, dtype: str) -> Parts:
    """bitsandbytes' `Params4bit` without double quantization: packed values, a float32 absmax per 64, and the codes.

    What `transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")` gives. Double quantization (the
    default of a bare `Linear4bit`, an option there) stores an absmax in one byte instead of four.
    """
    elements = math.prod(shape)
    return (
        part("data", "uint8", (-(-elements // 2), 1)),
        part("quant_state.absmax", "float32", (-(-elements // BLOCK),)),
        part("quant_state.code", "float32", (16,)),
    )


def _not_grouped(shape: Shape) -> str | None:
    return f"{shape[-1]} input features are not a multiple of the group of {GROUP}" if shape[-1] % GROUP else None


_TABLE = (
    Layout(
        "int8-dynamic", "torch.ao's dynamic quantization", "torch.ao packed", int8_per_tensor, "no gradient",
        converts="Linear, LSTM, GRU and their cells", modules=("Linear", "LSTM", "GRU", *_CELLS), subclasses=False,
        packed=True, claims="qint8", note="as unpacked: the CPU kernels' own padding and column sums are not counted",
    ),
    Layout("int8-weight", "torchao's Int8WeightOnlyConfig", "torchao Int8Tensor", int8_rows, "copy kept"),
    Layout(
        "int8-static", "torch.ao's static quantization", "torch.ao packed", int8_per_channel, "no gradient",
        converts="Linear, Conv1d, Conv2d and Conv3d", modules=("Linear", "Conv1d", "Conv2d", "Conv3d"),
        subclasses=False, packed=True, claims="qint8",
        note="norms are not fused, and outputs of converted layers are taken as quint8",
    ),
    Layout(
        "int4-weight", "torchao's Int4WeightOnlyConfig", "torchao Int4Tensor", int4_groups, "quantized",
        skips=_not_grouped,
    ),
    Layout("fp8-weight", "torchao's Float8WeightOnlyConfig", "torchao Float8Tensor", float8_rows, "copy kept"),
    Layout(
        "nf4", "bitsandbytes' 4-bit Linear", "bitsandbytes Params4bit", nf4_blocks, "copy freed",
        claims="uint8", note="without double quantization",
    ),
)  # fmt: skip

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _TABLE}
