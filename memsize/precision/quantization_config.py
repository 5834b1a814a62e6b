"""The `quantization_config` of a checkpoint: how its weights are stored and run, and which modules it leaves alone.

| method | a weight [N, K], in groups of g inputs |
| --- | --- |
| `awq` | int32 [K, N·b/32], float16 scales [K/g, N], int32 zeros [K/g, N·b/32] |
| `gptq` | the same bytes, and int32 [K] for the groups of the inputs |
| `fp8` | float8 [N, K]; scales, one for each block of `weight_block_size`, or one |
| `fbgemm_fp8` | float8 [N, K], float32 scales [N] |
| `mxfp4` | of experts alone: uint8 [N, K/2], uint8 scales [N, K/32] |
| `modelopt` | NVFP4, or float8 [N, K] with a scale |
| `compressed-tensors` | packed integers, int8, float8, NVFP4 or MXFP4, with scales, as `config_groups` say |

Sources: transformers 5.23 (`utils/quantization_config.py`, `quantizers/`: names, defaults and `should_convert_module`;
`integrations/finegrained_fp8.py`, `integrations/mxfp4.py`: what stands for a weight), AutoGPTQ and GPTQModel
(`BaseQuantLinear`), AutoAWQ (`WQLinear_GEMM.__init__`), compressed-tensors 0.12 (`compressors/`: `weight_packed`,
`weight_scale`), TensorRT-Model-Optimizer (`NVFP4QTensor`). Kernels that unpack a weight into registers (Marlin,
ExLlama, Triton) make no copy of it; bitsandbytes' 4-bit layers do.

A server holds the same tensors (`create_weights` in vLLM's `model_executor/layers/quantization`), with the scales of
compressed-tensors' channels in float32. Its Marlin kernels lay them out anew in as much memory, but without the zeros
of symmetric weights and without the groups of inputs in their own order (`process_weights_after_loading` of
gptq_marlin.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import nn

from memsize.loading.hubs import checkpoint_config_of
from memsize.precision.layouts import LAYOUTS, Layout, Parts, Shape, part

CHECKPOINT: Final = "checkpoint:"
"""What the layout of a scenario begins with whose weights are those of a checkpoint; its config follows, as JSON."""
_UNPACKED: Final = "unpacked"
"""The entry of a config that a server reads: whether its kernels hold all tensors of the checkpoint."""
_IGNORED: Final = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
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
    reader = _READERS.get("modelopt" if method.startswith("modelopt") else method)
    try:
        layout = reader(data) if reader else None
    except _DAMAGED:
        return None
    if layout is None:
        return None
    lists = [data[name] for name in _IGNORED if isinstance(data.get(name), list | tuple)]
    return CheckpointQuantization(
        method, layout, tuple(str(name) for names in lists for name in names) if lists else None
    )


def quantization_of(model: nn.Module) -> CheckpointQuantization | None:
    """How the checkpoint whose config made `model`, which holds floating weights, stores them; None where it doesn't
    quantize, or where its method is not here.
    """
    return read_quantization_config(checkpoint_config_of(model))


def checkpoint_layout(config: Mapping[str, Any], *, unpacked: bool = False) -> str:
    """The layout of a scenario that stores a model as a server does, by this quantization config. Kernels that work on
    `unpacked` weights hold all tensors of the checkpoint; Marlin drops those that say nothing.
    """
    return CHECKPOINT + json.dumps({**config, _UNPACKED: unpacked}, sort_keys=True, default=str)


def is_skipped(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of `patterns` names the module at `path`, as transformers' `should_convert_module` decides."""

    def matches(pattern: str) -> bool:
        try:
            found_at_start = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", path) is not None
        except re.error:
            found_at_start = False
        return found_at_start or path.endswith(pattern)

    return any(matches(pattern.removeprefix("re:")) for pattern in patterns)


def is_ignored(path: str, entry: str, method: str) -> bool:
    """Whether an entry of a list of ignored modules is about the module at `path`, as vLLM reads it: a regular
    expression, a pattern with stars, a part of the name (AWQ), or a name, of the module or of one that it is in.
    """
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), path) is not None
    if "*" in entry:
        return re.fullmatch(re.escape(entry).replace(r"\*", ".*"), path) is not None
    return entry in path if method == "awq" else f".{entry}." in f".{path}."


# -- methods ---------------------------------------------------------------------------------------------------------


def _bitsandbytes(data: Mapping[str, Any]) -> Layout:
    if data.get("load_in_8bit") or data.get("_load_in_8bit"):
        return LAYOUTS["int8"]
    layout = LAYOUTS["nf4-double" if data.get("bnb_4bit_use_double_quant") else "nf4"]
    return replace(layout, name=layout.name.replace("nf4", str(data.get("bnb_4bit_quant_type", "fp4"))))


def _gptq(data: Mapping[str, Any]) -> Layout:
    bits, group, marlin = int(data.get("bits", 4)), int(data.get("group_size", 128)), data.get(_UNPACKED) is False
    dropped = {"qzeros": data.get("sym", True), "g_idx": not data.get("desc_act")} if marlin else {}
    weight = partial(_words, True, bits, group, frozenset(name for name, is_dropped in dropped.items() if is_dropped))
    return _loaded("gptq", f"GPTQ, {bits} bits", "GPTQ QuantLinear", weight)


def _awq(data: Mapping[str, Any]) -> Layout:
    bits, group = data.get("bits", data.get("w_bit", 4)), data.get("group_size", data.get("q_group_size", 128))
    weight = partial(_words, False, int(bits), int(group), frozenset({"g_idx"}))
    return _loaded("awq", f"AWQ, {bits} bits", "AWQ WQLinear", weight)


def _words(of_inputs: bool, bits: int, group: int, dropped: frozenset[str], shape: Shape, dtype: str) -> Parts:
    """Words of 32 bits, each of several inputs or outputs."""
    *many, outputs, inputs = shape
    groups, packed = math.ceil(inputs / group) if group > 0 else 1, outputs * bits // 32
    parts = (
        part("qweight", "int32", (*many, inputs * bits // 32, outputs) if of_inputs else (*many, inputs, packed)),
        part("qzeros", "int32", (*many, groups, packed)),
        part("scales", "float16", (*many, groups, outputs)),
        part("g_idx", "int32", (*many, inputs)),
    )
    return tuple(one for one in parts if one.name not in dropped)


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
    layout = replace(LAYOUTS["mxfp4"], modules=(), converts="experts", kernel="quantized", separate=True)
    return None if data.get("dequantize") else layout


def _channel_parts(values: str, scale: str, shape: Shape, dtype: str) -> Parts:
    return part("weight", values, shape), part("weight_scale", scale or dtype, (*shape[:-1], 1))


def _compressed_tensors(data: Mapping[str, Any]) -> Layout | None:
    is_served = _UNPACKED in data
    scheme = next(iter(data["config_groups"].values()))
    weights: Mapping[str, Any] = scheme["weights"]
    name = str(scheme.get("format") or data.get("format") or "")
    bits, group, strategy = int(weights["num_bits"]), int(weights.get("group_size") or -1), weights.get("strategy")
    if bits == 4 and weights["type"] == "float":
        return replace(LAYOUTS["mxfp4" if "mxfp4" in name else "nvfp4"], kernel="quantized", separate=True)
    if strategy == "block":
        weight = partial(_fp8_parts, tuple(weights["block_structure"]), "float32")
    elif weights["type"] == "float" and strategy == "tensor":
        weight = partial(_fp8_parts, None, "float32")
    elif bits == 8 and "pack" not in name and strategy != "group":
        values = "float8_e4m3fn" if weights["type"] == "float" else "int8"
        weight = partial(_channel_parts, values, "float32" if is_served else "")
    elif "marlin" in name:
        return None
    else:
        weight = partial(_packed_parts, bits, group, not weights.get("symmetric", True), not is_served)
    return _loaded("compressed-tensors", f"compressed-tensors, {name}", "CompressedLinear", weight)


def _packed_parts(bits: int, group: int, zeros: bool, keeps_shape: bool, shape: Shape, dtype: str) -> Parts:
    *many, outputs, inputs = shape
    groups, per_word = math.ceil(inputs / group) if group > 0 else 1, 32 // bits
    return (
        part("weight_packed", "int32", (*many, outputs, math.ceil(inputs / per_word))),
        part("weight_scale", dtype, (*many, outputs, groups)),
        *([part("weight_shape", "int64", (2,))] if keeps_shape else []),
        *([part("weight_zero_point", "int32", (*many, math.ceil(outputs / per_word), groups))] if zeros else []),
    )


def _modelopt(data: Mapping[str, Any]) -> Layout | None:
    algorithm = str(data.get("quant_algo") or data.get("quantization", {}).get("quant_algo", "FP8")).upper()
    if "NVFP4" in algorithm:
        return replace(LAYOUTS["nvfp4"], kernel="quantized", separate=True)
    fp8 = _loaded("modelopt", "ModelOpt's FP8", "FP8 Linear", partial(_fp8_parts, None, "float32"))
    return fp8 if algorithm == "FP8" else None


def _torchao(data: Mapping[str, Any]) -> Layout | None:
    kind = data["quant_type"]
    name = str(kind.get("default", kind).get("_type") if isinstance(kind, Mapping) else kind).lower().replace("_", "")
    names = {"int8weightonly": "int8-weight", "float8weightonly": "fp8-weight", "int4weightonly": "int4-weight"}
    return next((LAYOUTS[layout] for prefix, layout in names.items() if name.startswith(prefix)), None)


def _loaded(
    name: str, library: str, wrapper: str, weight: Callable[[Shape, str], Parts], experts: bool = False
) -> Layout:
    return Layout(name, library, wrapper, weight, "quantized", experts=experts, heads=False, separate=True)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Layout | None]]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fine_grained_fp8,
    "mxfp4": _mxfp4,
    "nvfp4": lambda data: replace(LAYOUTS["nvfp4"], kernel="quantized"),
    "fbgemm_fp8": lambda data: _loaded(
        "fbgemm_fp8", "FBGEMM's FP8", "FbgemmFp8Linear", partial(_channel_parts, "float8_e4m3fn", "float32")
    ),
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "torchao": _torchao,
}
