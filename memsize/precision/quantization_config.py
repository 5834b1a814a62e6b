"""The `quantization_config` of a checkpoint: how its weights are stored and run, and which modules it leaves alone.

Sources: transformers 5.23 (`utils/quantization_config.py`, `quantizers/`: names, defaults and `should_convert_module`;
`integrations/finegrained_fp8.py`, `integrations/mxfp4.py`: what stands for a weight), AutoGPTQ and GPTQModel
(`BaseQuantLinear`), AutoAWQ (`WQLinear_GEMM.__init__`), compressed-tensors 0.12 (`compressors/`: `weight_packed`,
`weight_scale`), TensorRT-Model-Optimizer (`NVFP4QTensor`). Kernels that unpack a weight into registers (Marlin,
ExLlama, Triton) make no copy of it; bitsandbytes' 4-bit layers do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import nn

from memsize.loading.hubs import checkpoint_config_of
from memsize.precision.layouts import LAYOUTS, Layout, Parts, Shape, part

_DAMAGED: Final = (TypeError, ValueError, LookupError, AttributeError, ZeroDivisionError, StopIteration)
"""What reading raises where an entry is missing, or of another type than its own."""


@dataclass(frozen=True)
class CheckpointQuantization:
    """How a checkpoint quantizes: its `method` in transformers' words, the `layout` of a weight, and the patterns of
    modules that it leaves alone, `skipped` (None: as the library has it, such as the head).
    """

    method: str
    layout: Layout
    skipped: tuple[str, ...] | None = None


def read_quantization_config(config: object) -> CheckpointQuantization | None:
    """Read a `quantization_config` entry, a mapping or an object with `to_dict`; None for a method that is not here."""
    data = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(data, Mapping):
        return None
    method = str(getattr(data.get("quant_method"), "value", data.get("quant_method")) or "").lower()
    if not method and (data.get("load_in_4bit") or data.get("load_in_8bit")):
        method = "bitsandbytes"
    reader = _READERS.get(method)
    try:
        layout = reader(data) if reader else None
    except _DAMAGED:
        return None
    if layout is None:
        return None
    names = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
    lists = [data[name] for name in names if isinstance(data.get(name), list | tuple)]
    skipped = tuple(str(name).removeprefix("re:") for names in lists for name in names) if lists else None
    return CheckpointQuantization(method, layout, skipped)


def quantization_of(model: nn.Module) -> CheckpointQuantization | None:
    """How the checkpoint whose config made `model`, which holds floating weights, stores them; None where it doesn't
    quantize, or where its method is not here.
    """
    return read_quantization_config(checkpoint_config_of(model))


def is_skipped(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of `patterns` names the module at `path`, as transformers' `should_convert_module` decides."""

    def matches(pattern: str) -> bool:
        try:
            found_at_start = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", path) is not None
        except re.error:
            found_at_start = False
        return found_at_start or path.endswith(pattern)

    return any(map(matches, patterns))


# -- methods ---------------------------------------------------------------------------------------------------------


def _bitsandbytes(data: Mapping[str, Any]) -> Layout:
    if data.get("load_in_8bit") or data.get("_load_in_8bit"):
        return LAYOUTS["int8"]
    kind = str(data.get("bnb_4bit_quant_type", "fp4"))
    return LAYOUTS[f"{kind}-double" if data.get("bnb_4bit_use_double_quant") else kind]


def _gptq(data: Mapping[str, Any]) -> Layout:
    bits, group = int(data["bits"]), int(data.get("group_size", 128))
    return _loaded("gptq", f"GPTQ, {bits} bits", "GPTQ QuantLinear", partial(_gptq_parts, bits, group))


def _gptq_parts(bits: int, group: int, shape: Shape, dtype: str) -> Parts:
    outputs, inputs = shape
    groups = math.ceil(inputs / group) if group > 0 else 1
    return (
        part("qweight", "int32", (inputs * bits // 32, outputs)),
        part("qzeros", "int32", (groups, outputs * bits // 32)),
        part("scales", "float16", (groups, outputs)),
        part("g_idx", "int32", (inputs,)),
    )


def _awq(data: Mapping[str, Any]) -> Layout:
    bits, group = (
        int(data.get("bits", data.get("w_bit", 4))),
        int(data.get("group_size", data.get("q_group_size", 128))),
    )
    return _loaded("awq", f"AWQ, {bits} bits", "AWQ WQLinear", partial(_awq_parts, bits, group))


def _awq_parts(bits: int, group: int, shape: Shape, dtype: str) -> Parts:
    outputs, inputs = shape
    groups, packed = inputs // (group if group > 0 else inputs), outputs * bits // 32
    return (
        part("qweight", "int32", (inputs, packed)),
        part("qzeros", "int32", (groups, packed)),
        part("scales", "float16", (groups, outputs)),
    )


def _fine_grained_fp8(data: Mapping[str, Any]) -> Layout:
    block = data.get("weight_block_size") or None
    scale = "float8_e8m0fnu" if data.get("scale_fmt") == "ue8m0" else "float32"
    size = (int(block[0]), int(block[1])) if block else None
    layout = _loaded("fp8", "fine-grained FP8", "FP8Linear", partial(_fp8_parts, size, scale), experts=True)
    return replace(layout, kernel="copy in backward", claims="float8_e4m3fn")


def _fp8_parts(block: tuple[int, int] | None, scale: str, shape: Shape, dtype: str) -> Parts:
    *experts, outputs, inputs = shape
    blocks = (*experts, math.ceil(outputs / block[0]), math.ceil(inputs / block[1])) if block else (*experts,)
    return part("weight", "float8_e4m3fn", shape), part("weight_scale_inv", scale, blocks)


def _mxfp4(data: Mapping[str, Any]) -> Layout | None:
    """GPT-OSS: its experts alone are in MXFP4. With `dequantize` they are bfloat16 once they are loaded."""
    return (
        None
        if data.get("dequantize")
        else replace(LAYOUTS["mxfp4"], modules=(), converts="experts", kernel="quantized")
    )


def _fbgemm_fp8(data: Mapping[str, Any]) -> Layout:
    return _loaded("fbgemm_fp8", "FBGEMM's FP8", "FbgemmFp8Linear", partial(_channel_parts, "float8_e4m3fn", "float32"))


def _channel_parts(values: str, scale: str, shape: Shape, dtype: str) -> Parts:
    return part("weight", values, shape), part("weight_scale", scale or dtype, (*shape[:-1], 1))


def _compressed_tensors(data: Mapping[str, Any]) -> Layout | None:
    groups = data.get("config_groups") or {}
    scheme = next(iter(groups.values()))
    weights: Mapping[str, Any] = scheme["weights"]
    name = str(scheme.get("format") or data.get("format") or "")
    if "nvfp4" in name:
        return replace(LAYOUTS["nvfp4"], kernel="quantized")
    if "mxfp4" in name:
        return replace(LAYOUTS["mxfp4"], kernel="quantized")
    bits, group = int(weights["num_bits"]), weights.get("group_size")
    if "pack" in name:
        weight = partial(
            _packed_parts, bits, int(group) if group and int(group) > 0 else None, not weights["symmetric"]
        )
    elif weights.get("strategy") == "block":
        weight = partial(_fp8_parts, tuple(weights["block_structure"]), "float32")
    elif bits == 8:
        weight = partial(_channel_parts, "float8_e4m3fn" if weights["type"] == "float" else "int8", "")
    else:
        return None
    return _loaded("compressed-tensors", f"compressed-tensors, {name}", "CompressedLinear", weight)


def _packed_parts(bits: int, group: int | None, zeros: bool, shape: Shape, dtype: str) -> Parts:
    outputs, inputs = shape
    groups, per_word = math.ceil(inputs / group) if group else 1, 32 // bits
    parts = (
        part("weight_packed", "int32", (outputs, math.ceil(inputs / per_word))),
        part("weight_scale", dtype, (outputs, groups)),
        part("weight_shape", "int64", (2,)),
    )
    return (*parts, part("weight_zero_point", "int32", (math.ceil(outputs / per_word), groups))) if zeros else parts


def _modelopt(data: Mapping[str, Any]) -> Layout | None:
    algorithm = str(data.get("quant_algo") or data["quantization"]["quant_algo"]).upper()
    if algorithm.startswith("NVFP4"):
        return replace(LAYOUTS["nvfp4"], kernel="quantized")
    return (
        _loaded("modelopt", "ModelOpt's FP8", "FP8 Linear", partial(_fp8_parts, None, "float32"))
        if algorithm == "FP8"
        else None
    )


def _torchao(data: Mapping[str, Any]) -> Layout | None:
    kind = data["quant_type"]
    name = str(kind.get("default", kind).get("_type") if isinstance(kind, Mapping) else kind).lower().replace("_", "")
    names = {"int8weightonly": "int8-weight", "float8weightonly": "fp8-weight", "int4weightonly": "int4-weight"}
    return next((LAYOUTS[layout] for prefix, layout in names.items() if name.startswith(prefix)), None)


def _loaded(
    name: str, library: str, wrapper: str, weight: Callable[[Shape, str], Parts], experts: bool = False
) -> Layout:
    return Layout(name, library, wrapper, weight, "quantized", experts=experts, heads=False)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Layout | None]]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fine_grained_fp8,
    "mxfp4": _mxfp4,
    "nvfp4": lambda data: replace(LAYOUTS["nvfp4"], kernel="quantized"),
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "torchao": _torchao,
}
