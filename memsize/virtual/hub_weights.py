"""Weights that a program would download: they are stood in for where this machine hasn't got them.

`from_pretrained` of transformers and diffusers reads sparse files in their place, whose tensors are those of the model
that the config describes, in the config's dtype. Nothing is downloaded, since weights take gigabytes and no byte of
theirs reaches the simulated GPU. Other downloads (`torch.hub`, torchvision, timm) are small, and the program may look
at what they hold: they are made, and stood in for where they fail.

The files are of safetensors, without the bytes of the tensors: holes that read as zeros and take no room on the disk. A
quantized checkpoint has several tensors in place of a weight, under the names that its method writes. Known limit: one
of a method that `memsize.precision.quantization_config` does not have, and a quantized one of diffusers, is downloaded.

Source: transformers 5.23, `quantizers/` (`serialized_names`) and `integrations/`; bitsandbytes 0.50,
`functional.QuantState.as_dict`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn

from memsize.loading.weightless import Weightless
from memsize.precision.layouts import BLOCK
from memsize.precision.quantization_config import CheckpointQuantization, read_quantization_config
from memsize.precision.quantized import apply_layout
from memsize.processes.patches import LatePatches, Patch, calling, wrapping
from memsize.records.trace import StoredPart
from memsize.virtual.checkpoint_stand_in import CheckpointStandIn, StandInLoading
from memsize.virtual.ledger.gpu_ledger import VirtualLedger

NOTE: Final = "the weights of {} are not on this machine and were not downloaded: their shapes are those of its config"
_NOT_LOADED: Final = "the weights of {} could not be downloaded: the model keeps the initial ones"
_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_FILES_OF_DIFFUSERS: Final = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.pt", "*.index.*json")
"""Files that the program asks for and that are not downloaded."""
_OF_HUB: Final = ("cache_dir", "revision", "token", "local_files_only", "force_download", "proxies")
_PLACE: Final = ("subfolder", "variant", "use_safetensors", *_OF_HUB)
"""The keywords of `from_pretrained` that say where weights are."""
_NOT_OF_CONFIG: Final = ("config", "variant", "use_safetensors", "dtype", "torch_dtype", "quantization_config")


class HubWeights:
    """Stands in for weights that are not on this machine, until it is closed."""

    def __init__(self, ledger: VirtualLedger, loading: StandInLoading) -> None:
        self._ledger = ledger
        self._loading = loading
        self._folders: list[TemporaryDirectory[str]] = []

    def close(self) -> None:
        """Remove the files that stood for weights."""
        while self._folders:
            self._folders.pop().cleanup()

    def replacements(self) -> Iterator[Patch]:
        """Yield the patch of what downloads a file of weights."""
        yield wrapping(torch.hub, "download_url_to_file", self._download)

    def later(self) -> dict[str, LatePatches]:
        """Return the patches of the libraries that load weights of a hub, by module."""
        return {
            "transformers.modeling_utils": lambda module: (
                _classmethod(module.PreTrainedModel, self._from_pretrained),
            ),
            "diffusers.models.modeling_utils": lambda module: (_classmethod(module.ModelMixin, self._from_diffusers),),
            "diffusers.pipelines.pipeline_utils": lambda module: (
                wrapping(module, "snapshot_download", _without_weights),
            ),
            "mamba_ssm.utils.hf": lambda module: (wrapping(module, "load_state_dict_hf", self._load_mamba),),
            "timm.models._builder": lambda module: (wrapping(module, "load_pretrained", self._load_timm),),
        }

    def _download(self, original: Callable[..., Any], url: str, dst: Any, *args: Any, **options: Any) -> None:
        try:
            original(url, dst, *args, **options)
        except OSError:
            self._loading.announce(Path(dst))

    def _load_timm(self, original: Callable[..., Any], model: Any, *args: Any, **options: Any) -> None:
        try:
            original(model, *args, **options)
        except OSError:
            self._ledger.evaluator.notes[_NOT_LOADED.format(type(model).__name__)] = None

    def _from_pretrained(self, original: Callable[..., Any], cls: Any, name: Any, *args: Any, **options: Any) -> Any:
        has_own = args or options.get("state_dict") is not None or options.get("gguf_file")
        if has_own or not isinstance(name, (str, os.PathLike)) or _has_weights(os.fspath(name), options, _FILES):
            return original(cls, name, *args, **options)
        config = _config_of(cls, os.fspath(name), options)
        stored = getattr(config, "quantization_config", None)
        quantization = read_quantization_config(stored)
        if stored and quantization is None:
            return original(cls, name, *args, **options)
        with self._ledger.absently():
            tensors = file_tensors(_skeleton(cls, config), _dtype_of(config), quantization)
        folder = self._folder_of(name, tensors, _FILES[0])
        config.save_pretrained(folder)
        loaded = original(cls, folder, **{key: value for key, value in options.items() if key not in _PLACE})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = os.fspath(name)  # by which trainers look for the tokenizer
        return loaded

    def _from_diffusers(self, original: Callable[..., Any], cls: Any, name: Any, **options: Any) -> Any:
        is_named = isinstance(name, (str, os.PathLike))
        if not is_named or _has_weights(os.fspath(name), options, _FILES_OF_DIFFUSERS):
            return original(cls, name, **options)
        hub = {key: options[key] for key in ("subfolder", *_OF_HUB) if key in options}
        config = cls.load_config(name, **hub)
        if config.get("quantization_config"):
            return original(cls, name, **options)
        with self._ledger.absently(), torch.device("meta"):
            model = cls.from_config(config)
            dtype = options.get("dtype", options.get("torch_dtype"))
            tensors = file_tensors(model, dtype if isinstance(dtype, torch.dtype) else torch.float32)
        folder = self._folder_of(name, tensors, _FILES_OF_DIFFUSERS[0])
        model.save_config(folder)
        loaded = original(cls, folder, **{key: value for key, value in options.items() if key not in _PLACE})
        (loaded[0] if isinstance(loaded, tuple) else loaded).register_to_config(_name_or_path=os.fspath(name))
        return loaded

    def _load_mamba(
        self, original: Callable[..., Any], name: str, device: Any = None, dtype: torch.dtype | None = None
    ) -> Any:
        if _has_weights(name, {}, _FILES[1:]):
            return original(name, device, dtype)
        self._ledger.evaluator.notes[NOTE.format(name)] = None
        read_to = device if dtype in (torch.float32, None) else "cpu"
        return CheckpointStandIn(None if read_to is None else torch.device(read_to))

    def _folder_of(self, name: Any, tensors: dict[str, FileTensor], file: str) -> Path:
        self._folders.append(TemporaryDirectory(prefix="memsize-", ignore_cleanup_errors=True))
        folder = Path(self._folders[-1].name)
        write_shards(folder, file, tensors)
        self._ledger.evaluator.notes[NOTE.format(name)] = None
        return folder


def _without_weights(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return original(*args, **options | {"ignore_patterns": [*(options.get("ignore_patterns") or ()), *_WEIGHTS]})


def _classmethod(owner: Any, function: Callable[..., Any]) -> Patch:
    return owner, "from_pretrained", classmethod(calling(function, vars(owner)["from_pretrained"].__func__))


def _skeleton(cls: Any, config: Any) -> nn.Module:
    """The model without the memory of its weights. A constructor may read a value of what is none: transformers 5 makes
    `linspace` on the CPU for that (`meta_device_safe_creation_ops`), 4 every buffer (`init_empty_weights`).
    """
    try:
        with torch.device("meta"):
            return cast(nn.Module, cls(config))
    except RuntimeError:
        with torch.device("cpu"), torch.random.fork_rng(devices=()), Weightless():
            return cast(nn.Module, cls(config))


def _config_of(cls: Any, name: str, options: dict[str, Any]) -> Any:
    """The config that `from_pretrained` would take, with those of its keywords that change it."""
    config = options.get("config")
    if config is not None and not isinstance(config, (str, os.PathLike)):
        return config
    keywords = {key: value for key, value in options.items() if key not in _NOT_OF_CONFIG}
    return cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **keywords)[0]


def _dtype_of(config: Any) -> torch.dtype:
    """The dtype that a config has for its weights; one that transformers 5 wrote reaches older releases as a name."""
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _has_weights(name: str, options: dict[str, Any], names: tuple[str, ...]) -> bool:
    """Whether a folder, or the cache of the hub, has weights: all files that an index of them names."""
    subfolder, variant = options.get("subfolder") or "", options.get("variant")
    files = [f"{file.replace('.', f'.{variant}.', 1) if variant else file}" for file in names]
    return any(
        _file(name, subfolder, file, options) is not None
        or _has_all(_file(name, subfolder, f"{file}.index.json", options), name, subfolder, options)
        for file in files
    )


def _has_all(index: str | None, name: str, subfolder: str, options: dict[str, Any]) -> bool:
    if index is None:
        return False
    files = set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values())
    return all(_file(name, subfolder, file, options) is not None for file in files)


def _file(name: str, subfolder: str, file: str, options: dict[str, Any]) -> str | None:
    """The path of a file in a model's folder, or in the cache of the hub; None where it is not there."""
    if os.path.isdir(name):
        local = Path(name, subfolder, file)
        return str(local) if local.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        settings = {key: options[key] for key in ("cache_dir", "revision") if options.get(key) is not None}
        path = try_to_load_from_cache(name, str(Path(subfolder, file)), **settings)
        return path if isinstance(path, str) else None
    return None


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
