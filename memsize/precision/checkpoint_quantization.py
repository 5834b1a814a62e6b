"""Checkpoints whose weights are quantized, by the `quantization_config` of their config: which parameters of a model of
transformers are stored in other tensors, and in which.

| method | a weight [N, K], in groups of g inputs |
| --- | --- |
| `awq` | int32 [K, N·b/32], scales [K/g, N] in the model's dtype, int32 zeros [K/g, N·b/32] |
| `gptq` | the same, and int32 [K] for the groups of the inputs |
| `fp8` | float8 [N, K]; float32 scales, one for each block of `weight_block_size`, or one |
| `fbgemm_fp8` | float8 [N, K], float32 scales [N] |
| `mxfp4` | of experts alone: uint8 [N, K/2], uint8 scales [N, K/32] |
| `modelopt` NVFP4 | uint8 [N, K/2], float8 scales [N, K/16], two float32 |
| `modelopt` FP8 | float8 [N, K], two float32 |
| `compressed-tensors` | packed integers, float8 or NVFP4, with scales, as `config_groups` say |

Sources: the `create_weights` of vLLM's `model_executor/layers/quantization` (awq.py, gptq.py, fp8.py, fbgemm_fp8.py,
mxfp4.py, modelopt.py, compressed_tensors/schemes), which is what a server holds.

vLLM's Marlin kernels lay the tensors out anew in as much memory, but without the zeros of symmetric weights and without
the groups of inputs in their own order (`process_weights_after_loading` of gptq_marlin.py).

Known limits: embeddings
and the head stay as they are, unless `lm_head` is true. Other methods are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import nn

from memsize.errors import ScenarioError, quoted
from memsize.model.tensor_storage import dtype_name
from memsize.precision.layouts import Parts, Shape, part
from memsize.precision.quantized import Quantized

CHECKPOINT: Final = "checkpoint:"
"""What the layout of a scenario begins with whose weights are those of a checkpoint; its config follows, as JSON."""
Weight = Callable[[Shape, str], Parts]
_IGNORED: Final = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_UNPACKED: Final = "unpacked"
_FP4_GROUP, _MX_GROUP = 16, 32


def quantize_as(model: nn.Module, text: str) -> Quantized:
    """How `model` is stored by the quantization config that `text` has as JSON; nothing of the model changes.

    Raises `ScenarioError` for a method that is not covered.
    """
    config = json.loads(text)
    method = str(config.get("quant_method", "no method"))
    weight = _weight_of(method, config)
    ignored = [str(name) for entry in _IGNORED for name in (config.get(entry) or ())]
    replaced: dict[str, Parts] = {}
    for path, module, name, parameter in _weights(model, experts_only=method == "mxfp4"):
        if module is _head(model) and not config.get("lm_head"):
            continue
        if not any(_names(entry, path, method) for entry in ignored):
            parts = weight(tuple(parameter.shape), dtype_name(parameter.dtype))
            replaced[f"{path}.{name}" if path else name] = parts
    return Quantized(f"{CHECKPOINT}{method}", replaced, {}, f"{method} checkpoint")


def _weights(model: nn.Module, experts_only: bool) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """The weights of linear layers, and of experts that are stored together."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            is_linear = isinstance(module, nn.Linear) and name == "weight" and not experts_only
            if is_linear or (parameter.dim() == 3 and name in ("gate_up_proj", "down_proj")):
                yield path, module, name, parameter


def _head(model: nn.Module) -> nn.Module | None:
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return head


def _names(entry: str, path: str, method: str) -> bool:
    """Whether an entry of a list of ignored modules is about the module at `path`, as vLLM reads it: a regular
    expression, a pattern with stars, a part of the name (AWQ), or a name, of the module or of one that it is in.
    """
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), path) is not None
    if "*" in entry:
        return re.fullmatch(re.escape(entry).replace(r"\*", ".*"), path) is not None
    if method == "awq":
        return entry in path
    return f".{path}.".find(f".{entry}.") >= 0


# -- one weight --------------------------------------------------------------------------------------------------------


def _weight_of(method: str, config: Mapping[str, Any]) -> Weight:
    if method in ("awq", "gptq"):
        is_gptq, whole = method == "gptq", bool(config.get(_UNPACKED))
        return _in_groups(
            config.get("bits", 4),
            config.get("group_size", 128),
            of_inputs=is_gptq and (whole or bool(config.get("desc_act"))),
            has_zeros=whole or not is_gptq or not config.get("sym", True),
        )
    if method in ("fp8", "fbgemm_fp8"):
        block = config.get("weight_block_size")
        return _float8("channel" if method == "fbgemm_fp8" else "block" if block else "tensor", block)
    if method == "mxfp4":
        return _mxfp4
    if method.startswith("modelopt"):
        algorithm = str({**config, **config.get("quantization", {})}.get("quant_algo", "FP8"))
        return _nvfp4 if "NVFP4" in algorithm else _float8("tensor", None)
    if method == "compressed-tensors":
        return _compressed(config)
    raise ScenarioError(f"the checkpoint's weights are quantized by {quoted(method)}, which is not covered")


def _compressed(config: Mapping[str, Any]) -> Weight:
    group: Mapping[str, Any] = next(iter((config.get("config_groups") or {}).values()), {})
    weights = group.get("weights") or {}
    bits, size = weights.get("num_bits", 8), weights.get("group_size") or -1
    if weights.get("type") == "float":
        return _nvfp4 if bits == 4 else _float8(weights.get("strategy", "tensor"), weights.get("block_structure"))
    if bits == 8 and weights.get("strategy") != "group":
        return _int8
    return _in_groups(bits, size, has_zeros=not weights.get("symmetric", True))


def _in_groups(bits: int, size: int, *, of_inputs: bool = False, has_zeros: bool = True) -> Weight:
    def weight(shape: Shape, dtype: str) -> Parts:
        *many, outputs, inputs = shape
        groups = -(-inputs // size) if size > 0 else 1
        packed = -(-outputs * bits // 32)
        parts = [part("qweight", "int32", (*many, inputs, packed)), part("scales", dtype, (*many, groups, outputs))]
        if has_zeros:
            parts.append(part("qzeros", "int32", (*many, groups, packed)))
        if of_inputs:
            parts.append(part("g_idx", "int32", (*many, inputs)))
        return tuple(parts)

    return weight


def _float8(strategy: str, block: Sequence[int] | None) -> Weight:
    def weight(shape: Shape, _dtype: str) -> Parts:
        *many, outputs, inputs = shape
        scales: Shape = {"channel": (outputs,), "tensor": (1,)}.get(strategy, (1,))
        if block:
            scales = (-(-outputs // block[0]), -(-inputs // block[1]))
        return part("weight", "float8_e4m3fn", shape), part("weight_scale", "float32", (*many, *scales))

    return weight


def _int8(shape: Shape, _dtype: str) -> Parts:
    return part("weight", "int8", shape), part("weight_scale", "float32", (*shape[:-1], 1))


def _nvfp4(shape: Shape, _dtype: str) -> Parts:
    *many, inputs = shape
    return (
        part("weight", "uint8", (*many, inputs // 2)),
        part("weight_scale", "float8_e4m3fn", (*many, inputs // _FP4_GROUP)),
        part("scales", "float32", (*shape[:-2], 2)),
    )


def _mxfp4(shape: Shape, _dtype: str) -> Parts:
    elements = math.prod(shape)
    return part("blocks", "uint8", (elements // 2,)), part("scales", "uint8", (elements // _MX_GROUP,))


def checkpoint_layout(config: Mapping[str, Any], *, unpacked: bool = False) -> str:
    """The layout of a scenario that stores a model as this quantization config does. Kernels that work on `unpacked`
    weights hold all tensors of the checkpoint; Marlin drops those that say nothing.
    """
    return CHECKPOINT + json.dumps({**config, _UNPACKED: unpacked}, sort_keys=True, default=str)
