"""The import of a package of CUDA kernels that is not installed, by a script: it gets the simulated one.

Libraries that look whether a package is there, to choose another path, still find that it is not. They find
bitsandbytes, since transformers, accelerate and PEFT refuse its configs without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from memsize.errors import first_line
from memsize.processes.patches import LatePatches, wrapping
from memsize.processes.user_code import is_library
from memsize.virtual.packages import (
    apex,
    bitsandbytes,
    bitsandbytes_optimizers,
    flash_attn,
    flash_attn_3,
    flash_attn_layers,
    inference_servers,
    liger,
    linear_attention,
    linear_losses,
    mamba2,
    mmcv,
    ray,
    state_space,
    transformer_engine,
    vllm_server,
    xformers,
)

_KERNELS: Final[Mapping[str, Mapping[str, Any]]] = {**state_space.KERNELS, **mmcv.KERNELS}
"""The names in each simulated module that a package without its compiled part imports."""
_MODULES: Final[Mapping[str, Mapping[str, Any]]] = {
    **flash_attn.MODULES,
    **flash_attn_3.MODULES,
    **flash_attn_layers.MODULES,
    **state_space.MODULES,
    **mamba2.MODULES,
    **_KERNELS,
    **linear_attention.MODULES,
    **transformer_engine.MODULES,
    **linear_losses.MODULES,
    **liger.MODULES,
    **apex.MODULES,
    **bitsandbytes.MODULES,
    **bitsandbytes_optimizers.MODULES,
    **xformers.MODULES,
    **inference_servers.MODULES,
    **vllm_server.MODULES,
}
"""The names in each simulated module."""
_NOTE: Final = "{} is not installed: its functions are simulated, by what their kernels allocate, save and return"
_HUB_KERNELS: Final[Mapping[str, str]] = {
    "kernels-community/flash-attn": "flash_attn",
    "kernels-community/flash-attn2": "flash_attn",
    "kernels-community/flash-attn3": "flash_attn_interface",
    "kernels-community/vllm-flash-attn3": "flash_attn_interface",
    "varunneal/flash-attention-3": "flash_attn_interface",
    "kernels-community/causal-conv1d": "causal_conv1d",
    "kernels-community/mamba-ssm": "mamba_ssm",
}
"""The simulated package with the functions of each repository that the package `kernels` loads from the Hub."""
_AMPERE: Final = (8, 0)
"""The least compute capability of FlashAttention."""
_FLASH: Final = "transformers.modeling_flash_attention_utils"
"""The module of transformers that imports flash_attn for a model that asks for it."""
_MODELS: Final = "transformers.modeling_utils"
"""The module of transformers that refuses flash_attn where it is not installed, before release 5."""
_LIGER: Final = "transformers.integrations.liger"
"""The module of transformers that applies Liger's kernels for a trainer that asks for them."""
_TRL: Final = (
    "trl.generation.vllm_generation",
    *(f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "online_dpo")),
)
"""The modules of TRL that generate by vLLM for a trainer that asks for it: before 0.26 the trainers' own."""
_SERVER: Final = "vllm"
"""The simulated package of which every module can be imported, and whose version the program may ask for."""
_MODELS_OF_SERVER: Final = "vllm.model_executor.models."
"""Its own models, which are not there: programs change the loading of those that they find."""
_HUB_OF_TRANSFORMERS: Final = "transformers.integrations.hub_kernels"
"""The module of transformers that loads kernels of the Hub."""
_HUB_NOTE: Final = "{} of the Hub is simulated, by what its kernels allocate, save and return"
_NO_KERNEL: Final = (
    "the kernel {} of the Hub could not be loaded ({}: {}): the figures are those of what the script does without it"
)

_INSTALLED: Final = "bitsandbytes"
"""The simulated package that libraries find installed; it is noted once its layers or optimizers are made."""
_WHOLE: Final = (_INSTALLED, "transformer_engine", "xformers")
"""The simulated packages that import their own modules."""
_INTEGRATION: Final = "transformers.integrations.bitsandbytes"
"""The module of transformers that imports bitsandbytes where it is there."""
_AUDIO: Final = "torchaudio._extension.utils"
"""The module that loads torchaudio's compiled part, without which its functions are Python."""
_ASKED_ONCE: Final = {
    "transformers.utils.import_utils": ("is_bitsandbytes_available",),
    "peft.import_utils": ("is_bnb_available", "is_bnb_4bit_available"),
}
"""The functions of libraries that cache whether bitsandbytes is there."""

ASKING: Final = (_FLASH, _LIGER, *_TRL, "kernels", _HUB_OF_TRANSFORMERS, _INTEGRATION)
"""Modules whose names are replaced once they are imported."""


class SimulatedPackages(MetaPathFinder):
    """Finds what no other finder does; `note` takes a sentence on each package."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    @contextmanager
    def importable(self) -> Iterator[None]:
        """While open, scripts can import the packages."""
        sys.meta_path.append(self)
        _forget_answers()
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            _forget_answers()
            liger.restore()
            ray.close()
            for name in [name for name, module in sys.modules.items() if isinstance(module, _SimulatedModule)]:
                del sys.modules[name]

    def later(self) -> dict[str, LatePatches]:
        """Let transformers run the attention of flash_attn, and TRL generate by vLLM, where they are asked to."""

        def installed(module: Any) -> Iterator[tuple[Any, str, Any]]:
            matrix = {**getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})}  # none in older releases
            # The answer for version 3 stays: where no version is asked for, it would be taken as the newest.
            yield from asking_itself(module)
            for version in {2, 3} & matrix.keys():
                matrix[version] = {**matrix[version], "general_availability_check": lambda *_, **__: True}
            # Before release 4.56 the functions are imported where flash_attn is there.
            if not hasattr(module, "lazy_import_flash_attention") and getattr(module, "flash_attn_func", 0) is None:
                for package in ("flash_attn", "flash_attn.bert_padding", "flash_attn.layers.rotary"):
                    yield from ((module, name, value) for name, value in _MODULES[package].items())
                yield module, "_flash_supports_window_size", True
            for owner in (module, sys.modules.get(_MODELS)):
                if matrix and owner is not None:
                    yield owner, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", matrix

        def asking_itself(module: Any) -> Iterator[tuple[Any, str, Any]]:
            if not getattr(module, "is_flash_attn_2_available", lambda: True)():
                yield module, "is_flash_attn_2_available", lambda *_, **__: True

        def applying(module: Any) -> Iterator[tuple[Any, str, Any]]:
            yield module, "is_liger_kernel_available", lambda *_: True

        def serving(module: Any) -> Iterator[tuple[Any, str, Any]]:
            if not getattr(module, "is_vllm_available", lambda: True)():
                yield module, "is_vllm_available", lambda *_, **__: True
                yield module, "SamplingParams", inference_servers.SamplingParams
                yield module, "GuidedDecodingParams", vllm_server.placeholder("GuidedDecodingParams")
                yield module, "LLM", self._noted_server

        def of_hub(module: Any) -> Iterator[tuple[Any, str, Any]]:
            yield wrapping(module, "get_kernel", self._hub_kernel)
            yield wrapping(module, "has_kernel", self._has_hub_kernel)

        def of_transformers(module: Any) -> Iterator[tuple[Any, str, Any]]:
            if hasattr(module, "get_kernel_hub"):  # where `kernels` is installed
                yield wrapping(module, "get_kernel_hub", self._hub_kernel)

        def in_python(module: Any) -> Iterator[tuple[Any, str, Any]]:
            yield wrapping(module, "_load_lib", _loaded_if_it_fits)

        def integrated(module: Any) -> Iterator[tuple[Any, str, Any]]:
            if not hasattr(module, "bnb"):  # imported before the script ran
                yield module, "bnb", _module(_INSTALLED)

        return {
            _FLASH: installed,
            _MODELS: asking_itself,
            _LIGER: applying,
            **dict.fromkeys(_TRL, serving),
            **ray.later(self._note),
            "kernels": of_hub,
            _HUB_OF_TRANSFORMERS: of_transformers,
            _INTEGRATION: integrated,
            _AUDIO: in_python,
            "xformers.ops": xformers.operators,
        }

    def _hub_kernel(self, original: Callable[..., Any], repo_id: str, *args: Any, **options: Any) -> Any:
        """Load a kernel of the Hub: the simulated one, where it is known."""
        if self not in sys.meta_path:  # transformers keeps the function beyond the run
            return original(repo_id, *args, **options)
        if repo_id in _HUB_KERNELS:
            if not _runs_on_gpu(repo_id):
                raise RuntimeError(f"{repo_id} has no build for GPUs of a compute capability below 8.0")
            self._note(_HUB_NOTE.format(repo_id))
            return _module(_HUB_KERNELS[repo_id])
        try:
            return original(repo_id, *args, **options)
        except Exception as error:
            self._note(_NO_KERNEL.format(repo_id, type(error).__name__, first_line(error)))
            raise

    def _has_hub_kernel(self, original: Callable[..., Any], repo_id: str, *args: Any, **options: Any) -> Any:
        if self not in sys.meta_path or repo_id not in _HUB_KERNELS:
            return original(repo_id, *args, **options)
        return _runs_on_gpu(repo_id)

    def _noted_server(self, *args: Any, **options: Any) -> inference_servers.LLM:
        self._note(_NOTE.format("vllm"))
        return inference_servers.LLM(*args, **options)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if name in _MODULES and package == _INSTALLED:
            return ModuleSpec(name, _SimulatedLoader(partial(self._note, _NOTE.format(package))), is_package=True)
        is_there = name in _MODULES or (package == _SERVER and not name.startswith(_MODELS_OF_SERVER))
        if not is_there or not _is_imported_by_script(name in _KERNELS):
            return None
        self._note(_NOTE.format(name if name in _KERNELS else package))
        return ModuleSpec(name, _SimulatedLoader(), is_package=True)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        """Yield the version of the package that libraries find installed, where they ask for it by name."""
        if context.name == _INSTALLED or (context.name == _SERVER and _is_imported_by_script(False)):
            yield _SimulatedDistribution(context.name)


def _loaded_if_it_fits(load: Callable[[str], bool], name: str) -> bool:
    """Whether torchaudio has its compiled part; one that was built for another PyTorch is as good as none."""
    try:
        return load(name)
    except OSError:
        return False


def _forget_answers() -> None:
    for module, names in _ASKED_ONCE.items():
        for name in names if module in sys.modules else ():
            if forget := getattr(getattr(sys.modules[module], name, None), "cache_clear", None):
                forget()


class _SimulatedDistribution(Distribution):
    def __init__(self, package: str) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        return f"Version: {_MODULES[self._package]['__version__']}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def _runs_on_gpu(repo_id: str) -> bool:
    return "flash" not in repo_id or torch.cuda.get_device_capability() >= _AMPERE


class _SimulatedModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__name__.partition(".")[0] != _SERVER:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return vllm_server.placeholder(name)


def _module(package: str) -> ModuleType:
    """A simulated package as a module that is not imported, with its submodules as attributes."""
    module = _SimulatedModule(package)
    vars(module).update(_MODULES[package])
    for name in _MODULES:
        parent, _, own = name.rpartition(".")
        if parent == package:
            setattr(module, own, _module(name))
    if package == "flash_attn_interface":  # the kernel's package has its file under this name
        vars(module)[package] = module
    return module


class _SimulatedLoader(Loader):
    def __init__(self, first_use: Callable[[], None] = lambda: None) -> None:
        self._first_use = first_use

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _SimulatedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_MODULES.get(module.__name__, {}), _first_use=self._first_use)
        for name in _MODULES if module.__name__.partition(".")[0] in _WHOLE else ():
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)


def _is_imported_by_script(kernels: bool) -> bool:
    """Whether the line that imports is the script's own, or asks for what it has chosen.

    Compiled `kernels` are imported by a package that is there without them.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename in (__file__, *_IMPORTING) or "importlib" in frame.f_code.co_filename
    ):
        if frame.f_code.co_name == "find_spec" and frame.f_code.co_filename != __file__:
            return False  # a question whether the package is there
        frame = frame.f_back
    return kernels or frame.f_globals.get("__name__") in (_FLASH, _LIGER) or not is_library(frame.f_code.co_filename)


_IMPORTING: Final = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
