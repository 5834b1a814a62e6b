"""The one table of storage layouts: which modules a library quantizes, and which tensors then stand for their weights.

Every layout is a library's default, and pure arithmetic on shapes. The tests quantize real layers with that library and
compare byte for byte. What a library leaves alone stays as the model has it.

| layout         | library                                        | a weight [N, K] becomes                    |
| -------------- | ---------------------------------------------- | ------------------------------------------ |
| `int8-dynamic` | `torch.ao.quantization.quantize_dynamic`       | N·K int8                                   |
| `int8-weight`  | torchao 0.18 `Int8WeightOnlyConfig`            | N·K int8, N float32, N int8                |
| `fp8-weight`   | torchao 0.18 `Float8WeightOnlyConfig`          | N·K float8_e4m3fn, N float32               |
| `int4-weight`  | torchao 0.18 `Int4WeightOnlyConfig`            | N·K/2 bytes, 2·N·K/128 floats of its dtype |
| `nf4`, `fp4`   | bitsandbytes `Linear4bit`                      | N·K/2 bytes, N·K/64 + 16 float32           |
| `nf4-double`   | the same with double quantization              | N·K/2 + N·K/64 bytes, N·K/16384 + 273 f32  |
| `int8`         | bitsandbytes `Linear8bitLt`                    | N·K int8, N float32                        |
| `mxfp4`        | OCP MX 1.0, as GPT-OSS stores its experts      | N·K/2 bytes, N·K/32 scales of a byte       |
| `nvfp4`        | ModelOpt and compressed-tensors                | N·K/2 bytes, N·K/16 float8, 1 float32      |

Proved with real layers on a CPU: all but `int4-weight`, whose quantizing kernel (mslk) needs a GPU, and the last two.
There torchao's own `quantize_` and `Int4Tensor.from_hp` ran with that kernel replaced by one of the shapes that
`Int4Tensor` documents. `mxfp4` and `nvfp4` are the tensors of checkpoints (`Mxfp4GptOssExperts` of transformers 5.23,
`NVFP4PackedCompressor` of compressed-tensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from memsize.records.trace import StoredPart, TensorSpec
from memsize.spec.training import parse_base

Shape = tuple[int, ...]
Parts = tuple[StoredPart, ...]

GROUP = 128
"""Elements that share a scale in `Int4WeightOnlyConfig`, along a row."""
BLOCK = 64
"""Elements that share an absmax in bitsandbytes' 4-bit formats, in memory order."""

_CELLS = ("LSTMCell", "GRUCell", "RNNCell")


Kernel = Literal["quantized", "copy kept", "copy freed", "copy in backward", "int8 product", "no gradient"]
"""How a layer multiplies: with the quantized values themselves, with a copy that is kept for backward, with a copy that
backward makes again, with one that backward alone makes, with int8 values of its input too, or without a gradient.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one library stores quantized weights.

    `modules` are the classes of `torch.nn` that it converts, `subclasses` whether it also takes classes derived from
    them. `weight` gives the parts of one weight from its shape and floating dtype, `skips` why a weight of some shape
    is left alone (None: it is not). `transposed`: it also converts the `Conv1D` of transformers, whose weight it
    transposes. A `packed` layout takes the bias into the packed object too. `claims` is the dtype
    that the quantized weight shows to PyTorch: None for the dtype that it had. `kernel` says how its layers multiply
    (`memsize.precision.quantized.run_as`). `heads`: it converts the output layer of a transformers model too, and
    `experts`: the 3-dimensional weights of its experts, whatever their class. `separate`: the parts are parameters and
    buffers of the layer, so that PyTorch lists each of them.
    """

    name: str
    library: str
    wrapper: str
    weight: Callable[[Shape, str], Parts]
    kernel: Kernel
    converts: str = "Linear"
    modules: tuple[str, ...] = ("Linear",)
    subclasses: bool = True
    transposed: bool = False
    packed: bool = False
    claims: str | None = None
    skips: Callable[[Shape], str | None] = lambda shape: None
    note: str = ""
    heads: bool = True
    experts: bool = False
    separate: bool = False

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


def nf4_double_blocks(shape: Shape, dtype: str) -> Parts:
    """The same with double quantization: an absmax is a byte, with a float32 per 256 of them, an offset and a table.

    Source: bitsandbytes 0.50, `functional.quantize_4bit(compress_statistics=True)` and `quantize_blockwise`.
    """
    data, _, code = nf4_blocks(shape, dtype)
    blocks = -(-math.prod(shape) // BLOCK)
    return (
        data,
        part("quant_state.absmax", "uint8", (blocks,)),
        code,
        part("quant_state.offset", "float32", ()),
        part("quant_state.state2.absmax", "float32", (-(-blocks // 256),)),
        part("quant_state.state2.code", "float32", (256,)),
    )


def llm_int8_rows(shape: Shape, dtype: str) -> Parts:
    """bitsandbytes' `Int8Params`: int8 values and one float32 absmax a row (`functional.int8_vectorwise_quant`)."""
    return part("CB", "int8", shape), part("SCB", "float32", shape[:-1])


def mxfp4_blocks(shape: Shape, dtype: str) -> Parts:
    """Two e2m1 values a byte, and one e8m0 scale per 32 elements of a row."""
    *rows, columns = shape
    return part("blocks", "uint8", (*rows, -(-columns // 2))), part("scales", "uint8", (*rows, -(-columns // 32)))


def nvfp4_blocks(shape: Shape, dtype: str) -> Parts:
    """Two e2m1 values a byte, one float8_e4m3fn scale per 16 elements of a row, and one float32 for the weight."""
    *rows, columns = shape
    return (
        part("weight_packed", "uint8", (*rows, -(-columns // 2))),
        part("weight_scale", "float8_e4m3fn", (*rows, -(-columns // 16))),
        part("weight_global_scale", "float32", (1,)),
    )


def _not_in_blocks(block: int, kind: str, shape: Shape) -> str | None:
    return f"{shape[-1]} input features are not a multiple of the {kind} of {block}" if shape[-1] % block else None


_NF4 = Layout(
    "nf4", "bitsandbytes' 4-bit Linear", "bitsandbytes Params4bit", nf4_blocks, "copy freed",
    claims="uint8", note="without double quantization", heads=False, transposed=True,
)  # fmt: skip
_TABLE = (
    Layout(
        "int8-dynamic", "torch.ao's dynamic quantization", "torch.ao packed", int8_per_tensor, "no gradient",
        converts="Linear, LSTM, GRU and their cells", modules=("Linear", "LSTM", "GRU", *_CELLS), subclasses=False,
        packed=True, claims="qint8", note="as unpacked: the CPU kernels' own padding and column sums are not counted",
    ),
    Layout("int8-weight", "torchao's Int8WeightOnlyConfig", "torchao Int8Tensor", int8_rows, "copy kept"),
    Layout(
        "int4-weight", "torchao's Int4WeightOnlyConfig", "torchao Int4Tensor", int4_groups, "quantized",
        skips=partial(_not_in_blocks, GROUP, "group"),
    ),
    Layout("fp8-weight", "torchao's Float8WeightOnlyConfig", "torchao Float8Tensor", float8_rows, "copy kept"),
    _NF4,
    replace(_NF4, name="nf4-double", weight=nf4_double_blocks, note=""),
    replace(_NF4, name="fp4"),
    Layout(
        "int8", "bitsandbytes' LLM.int8", "bitsandbytes Int8Params", llm_int8_rows, "int8 product",
        claims="int8", heads=False, transposed=True,
    ),
    Layout(
        "mxfp4", "MXFP4", "MXFP4", mxfp4_blocks, "copy freed", claims="uint8", heads=False, experts=True,
        skips=partial(_not_in_blocks, 32, "block"),
    ),
    Layout(
        "nvfp4", "NVFP4", "NVFP4", nvfp4_blocks, "copy freed", claims="uint8", heads=False, experts=True,
        skips=partial(_not_in_blocks, 16, "block"),
    ),
)  # fmt: skip

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _TABLE}


def base_layout(name: str) -> Layout:
    """The layout of a frozen base in the format `name`. Each quantizer of transformers leaves the head alone by default
    (5.23, `quantizers/base.py`: `get_keys_to_not_convert`), torchao's too.
    """
    return replace(LAYOUTS[parse_base(name)], heads=False)
