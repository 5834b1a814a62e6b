"""Files of safetensors without the bytes of the tensors: holes that read as zeros and take no room on the disk.

A quantized checkpoint has several tensors in place of a weight, under the names that its method writes.

Source: transformers 5.23, `quantizers/` (`serialized_names`) and `integrations/`; bitsandbytes 0.50,
`functional.QuantState.as_dict`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from memsize.precision.layouts import BLOCK
from memsize.precision.quantization_config import CheckpointQuantization
from memsize.precision.quantized import apply_layout
from memsize.records.trace import StoredPart

_OF_STATE: Final = {
    "data": "",
    "CB": "",
    "quant_state.absmax": ".absmax",
    "quant_state.code": ".quant_map",
    "quant_state.state2.absmax": ".nested_absmax",
    "quant_state.state2.code": ".nested_quant_map",
}
"""The ends of the names that bitsandbytes gives the parts of a weight."""
_NESTED_BLOCK: Final = 256
_SHARD: Final = 5 * 10**9
"""Bytes after which another file begins, as on the Hub."""


class FileTensor(NamedTuple):
    """A tensor of a file, with its bytes where a program reads them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: bytes | None = None

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def file_tensors(
    model: nn.Module, dtype: torch.dtype, quantization: CheckpointQuantization | None = None
) -> dict[str, FileTensor]:
    """The tensors of a checkpoint of `model` in `dtype`, each once."""
    state = model.state_dict(keep_vars=True)
    replaced: Mapping[str, tuple[StoredPart, ...]] = {}
    if quantization is not None:
        replaced = apply_layout(model, quantization.layout, quantization.skipped).replaced
    tensors: dict[str, FileTensor] = {}
    seen = set[int]()
    for key, tensor in state.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if quantization is not None and key in replaced:
            tensors |= _quantized(quantization, key, tuple(tensor.shape), dtype, replaced[key])
        else:
            tensors[key] = FileTensor(dtype if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape))
    return tensors


def _quantized(
    quantization: CheckpointQuantization,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parts: tuple[StoredPart, ...],
) -> Iterator[tuple[str, FileTensor]]:
    method, layer = quantization.method, key.removesuffix("weight")
    if method == "mxfp4":  # of experts [experts, inputs, outputs], block by block along the inputs
        *experts, inputs, outputs = shape
        yield f"{key}_blocks", FileTensor(torch.uint8, (*experts, outputs, inputs // 32, 16))
        yield f"{key}_scales", FileTensor(torch.uint8, (*experts, outputs, inputs // 32))
        return
    for part in parts:
        if method == "bitsandbytes" and part.name != "SCB":
            name = key + _OF_STATE[part.name] if part.name in _OF_STATE else ""
        elif layer == key:  # the weights of all experts in one
            name = key + part.name.removeprefix("weight")
        else:
            name = layer + part.name
        if name:
            sizes: Any = part.spec.shape
            yield name, FileTensor(getattr(torch, part.spec.dtype), sizes)
    if method != "bitsandbytes":
        return
    if len(parts) == 2:
        yield f"{layer}weight_format", FileTensor(torch.uint8, ())
    else:
        kind = quantization.layout.name.removesuffix("-double")
        content = json.dumps(_quant_state(kind, shape, dtype, nested=len(parts) > 3)).encode()
        yield f"{key}.quant_state.bitsandbytes__{kind}", FileTensor(torch.uint8, (len(content),), content)


def _quant_state(kind: str, shape: tuple[int, ...], dtype: torch.dtype, *, nested: bool) -> dict[str, Any]:
    """The entries that bitsandbytes writes beside the tensors of a 4-bit weight."""
    state = {
        "quant_type": kind,
        "blocksize": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    if nested:
        state |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.0}
    return state


def write_shards(folder: Path, file: str, tensors: Mapping[str, FileTensor]) -> None:
    """Write `tensors` to `folder` as `file`, or as several with an index, since each is mapped as a whole: Linux
    refuses to map a file that is larger than the machine's memory.
    """
    ends = accumulate(tensor.bytes for tensor in tensors.values())
    shards: dict[int, dict[str, FileTensor]] = {}
    for (key, tensor), end in zip(tensors.items(), ends, strict=True):
        shards.setdefault((end - tensor.bytes) // _SHARD, {})[key] = tensor
    if len(shards) <= 1:
        write_weights(folder / file, tensors)
        return
    stem, suffix = file.split(".", 1)
    names = [f"{stem}-{number:05}-of-{len(shards):05}.{suffix}" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards.values(), strict=True):
        write_weights(folder / name, shard)
    weight_map = {key: name for name, shard in zip(names, shards.values(), strict=True) for key in shard}
    total = sum(tensor.bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{file}.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_weights(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    """Write `tensors` as a file of safetensors, in the order of names that safetensors has."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    contents: dict[int, bytes] = {}
    for key, tensor in sorted(tensors.items()):
        start, end = end, end + tensor.bytes
        entries[key] = {
            "dtype": _dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        if tensor.content is not None:
            contents[start] = tensor.content
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
        for start, content in contents.items():
            file.seek(8 + len(header) + start)
            file.write(content)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files of safetensors."""
    from safetensors.torch import save

    contents = save({"": torch.empty(0, dtype=dtype, device="cpu")})
    return str(json.loads(contents[8:])[""]["dtype"])
