"""Weights that a program would download: they are stood in for where this machine hasn't got them.

`from_pretrained` of transformers and diffusers reads sparse files in their place, whose tensors are those of the model
that the config describes, in the config's dtype. Nothing is downloaded, since weights take gigabytes and no byte of
theirs reaches the simulated GPU. Other downloads (`torch.hub`, torchvision, timm) are small, and the program may look
at what they hold: they are made, and stood in for where they fail.

A quantized checkpoint has the tensors of its method. Known limit: one of a method that
`memsize.precision.quantization_config` does not have, and a quantized one of diffusers, is downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from memsize.precision.quantization_config import read_quantization_config
from memsize.processes.patches import LatePatches, Patch, calling, wrapping
from memsize.virtual.checkpoint_stand_in import CheckpointStandIn, StandInLoading
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.weight_files import FileTensor, file_tensors, write_shards

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
        with self._ledger.absently(), torch.device("meta"):
            dtype = getattr(config, "dtype", None) or torch.float32
            tensors = file_tensors(cls(config), dtype, quantization)
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


def _config_of(cls: Any, name: str, options: dict[str, Any]) -> Any:
    """The config that `from_pretrained` would take, with those of its keywords that change it."""
    config = options.get("config")
    if config is not None and not isinstance(config, (str, os.PathLike)):
        return config
    keywords = {key: value for key, value in options.items() if key not in _NOT_OF_CONFIG}
    return cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **keywords)[0]


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
