"""Caches that transformers does not have for a model, told before it runs: its own words for them are of its code."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

from torch import nn

from memsize.errors import InputError
from memsize.spec.generation import Generation

_FULL: Final = "full_attention"


def refuse_missing_cache(model: nn.Module, generation: Generation) -> None:
    """Raise `InputError` where transformers has no such cache for a model, or none without another package."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return
    if getattr(config, "is_encoder_decoder", False):
        if generation.is_quantized:
            raise InputError("transformers quantizes no cache of an encoder-decoder: use --cache dynamic or static")
        if generation.is_offloaded:
            raise InputError(
                "transformers offloads the cross-attention of an encoder-decoder without bringing it back to the GPU: "
                "use --cache dynamic or static"
            )
    kinds = _kinds(config)
    if generation.is_quantized and kinds != {_FULL}:
        others = ", ".join(sorted(kinds - {_FULL}))
        raise InputError(f"transformers quantizes caches of full attention alone, and this model has {others} layers")
    if generation.cache == "offloaded_static" and _FULL not in kinds:
        raise InputError("transformers offloads no static layers with a window or a state: use --cache offloaded")
    if generation.is_quantized and generation.kv_dtype != "fp8" and not _is_installed("optimum.quanto"):
        raise InputError(
            f"a KV cache in {generation.kv_dtype or 'int4'} needs optimum-quanto: pip install optimum-quanto"
        )


def _kinds(config: Any) -> set[str]:
    """What transformers takes the layers of a model to be when it makes a cache for them."""
    from transformers import cache_utils

    told = getattr(cache_utils, "get_layer_types_and_kwargs", None)
    return set(told(config.get_text_config(decoder=True))[0]) if told else {_FULL}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
