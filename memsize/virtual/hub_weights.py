"""Weights that a program would download: they are stood in for where this machine hasn't got them.

`from_pretrained` of transformers reads a sparse file in their place, whose tensors are those of the model that the
config describes, in the config's dtype. Nothing is downloaded, since weights take gigabytes and no byte of theirs
reaches the simulated GPU. Other downloads (`torch.hub`, torchvision, timm) are small, and the program may look at what
they hold: they are made, and stood in for where they fail.

Known limit: weights that a checkpoint holds quantized are downloaded, as the program asks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from memsize.processes.patches import LatePatches, Patch, calling, wrapping
from memsize.virtual.checkpoint_stand_in import StandInLoading
from memsize.virtual.ledger.gpu_ledger import VirtualLedger

NOTE: Final = "the weights of {} are not on this machine and were not downloaded: their shapes are those of its config"
_NOT_LOADED: Final = "the weights of {} could not be downloaded: the model keeps the initial ones"
_FILES: Final = ("model.safetensors", "pytorch_model.bin")
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
        if has_own or not isinstance(name, (str, os.PathLike)) or _has_weights(os.fspath(name), options):
            return original(cls, name, *args, **options)
        config = _config_of(cls, os.fspath(name), options)
        if getattr(config, "quantization_config", None):
            return original(cls, name, *args, **options)
        self._folders.append(TemporaryDirectory(prefix="memsize-", ignore_cleanup_errors=True))
        folder = Path(self._folders[-1].name)
        with self._ledger.absently(), torch.device("meta"):
            state = cls(config).state_dict(keep_vars=True)
        config.save_pretrained(folder)
        _write_sparse(folder / _FILES[0], state, getattr(config, "dtype", None) or torch.float32)
        self._ledger.evaluator.notes[NOTE.format(name)] = None
        return original(cls, folder, **{key: value for key, value in options.items() if key not in _PLACE})


def _classmethod(owner: Any, function: Callable[..., Any]) -> Patch:
    return owner, "from_pretrained", classmethod(calling(function, vars(owner)["from_pretrained"].__func__))


def _config_of(cls: Any, name: str, options: dict[str, Any]) -> Any:
    """The config that `from_pretrained` would take, with those of its keywords that change it."""
    config = options.get("config")
    if config is not None and not isinstance(config, (str, os.PathLike)):
        return config
    keywords = {key: value for key, value in options.items() if key not in _NOT_OF_CONFIG}
    return cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **keywords)[0]


def _has_weights(name: str, options: dict[str, Any]) -> bool:
    """Whether a folder, or the cache of the hub, has weights: all files that an index of them names."""
    subfolder, variant = options.get("subfolder") or "", options.get("variant")
    files = [f"{file.replace('.', f'.{variant}.', 1) if variant else file}" for file in _FILES]
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


def _write_sparse(path: Path, state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Write a file of safetensors that names each tensor of `state` once, and whose bytes take no room on the disk."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, seen = 0, set[int]()
    for key, tensor in sorted(state.items()):  # as safetensors writes them
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        stored = dtype if tensor.is_floating_point() else tensor.dtype
        start, end = end, end + tensor.numel() * stored.itemsize
        entries[key] = {
            "dtype": _dtype_name(stored),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files of safetensors."""
    from safetensors.torch import save

    contents = save({"": torch.empty(0, dtype=dtype, device="cpu")})
    return str(json.loads(contents[8:])[""]["dtype"])
