"""KV caches of transformers' models: the bytes of each layer, on the GPU and on the host, and unsupported caches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from memsize.errors import InputError
from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import wrapping
from memsize.processes.simulation import open_simulation
from memsize.records.gpu import Card
from memsize.spec.generation import Generation
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.ledger import Ledger
from memsize.tracing.run import Run, Setup
from memsize.virtual.device_assignment import devices
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.region import VirtualMachine

_CACHES: Final = ("past_key_values", "cache_params", "past_buckets_states", "mems", "state")
"""The names by which models of transformers take and return their caches."""
_FULL: Final = "full_attention"


class State(NamedTuple):
    """A state of fixed size: its shape in a sequence, bytes of an element, and whether a convolution reads it."""

    shape: tuple[int, ...]
    itemsize: int
    of_convolution: bool


class CachedLayer(NamedTuple):
    """The cache of a layer: its kind, its bytes, the states in it, and the bytes of each tensor that is on the host."""

    kind: str
    bytes: int
    states: tuple[State, ...] = ()
    hosted: tuple[int, ...] = ()


_NOTHING: Final = torch.empty(0, device="cpu")


def cache_of(kwargs: dict[str, Any], output: Any) -> Any:
    """Return the cache that a forward returned or, if it returned none, took as an argument; None if there is none."""
    for name in _CACHES:
        cache = getattr(output, name, None)
        cache = kwargs.get(name) if cache is None else cache
        if cache is not None:
            return cache
    return None


def cached_layers(run: Run, cache: Any) -> Iterator[CachedLayer]:
    """Yield the layers of the cache; mark their storages on the GPU as a KV cache."""
    met: set[int] = set()
    latent = getattr(getattr(run.setup.model, "config", None), "kv_lora_rank", None)
    for kind, layer in _layers(cache):
        if kind == "full attention" and latent and getattr(layer, "keys", _NOTHING).shape[-1] == latent:
            kind = "latent attention"
        storages = [index for index in _marked(run.ledger, layer) if index not in met]
        met.update(storages)
        on_host = filter(devices().is_on_host, _pieces(layer)) if isinstance(run.ledger, VirtualLedger) else ()
        hosted = tuple(piece.untyped_storage().nbytes() for piece in on_host)
        if size := sum(map(run.ledger.size, storages)) + sum(hosted):
            yield CachedLayer(kind, size, tuple(_states(layer)), hosted)


def _marked(ledger: Ledger, layer: Any) -> list[int]:
    storages = []
    for piece in _pieces(layer):
        index = ledger.index_of(piece)
        if index >= 0 and index not in storages:
            ledger.mark(piece, "KV cache")
            storages.append(index)
    return storages


def _pieces(layer: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_in(layer):
        yield from plain_tensors(tensor)


@dataclass(frozen=True, slots=True)
class OnGpuWithHost:
    """Sets up a run with an offloaded cache, with tensors on the GPU `card` and on the host told apart."""

    card: Card

    def __call__(self, setup: Setup) -> Setup:
        return replace(setup, machine=VirtualMachine(self.card))


@contextmanager
def offloading_watched(ledger: Ledger) -> Iterator[None]:
    """While open, mark the tensors of an offloaded cache on the GPU: few are left there at the end of a step."""
    from transformers import cache_utils

    owner: Any = cache_utils.Cache

    def offloaded(offload: Callable[..., None], cache: Any, layer_idx: int, *args: Any) -> None:
        _marked(ledger, cache.layers[layer_idx])
        offload(cache, layer_idx, *args)

    def prefetched(prefetch: Callable[..., None], cache: Any, *args: Any) -> None:
        prefetch(cache, *args)
        for layer in cache.layers:
            _marked(ledger, layer)

    patches = (wrapping(owner, "offload", offloaded), wrapping(owner, "prefetch", prefetched))
    with open_simulation() as simulation, simulation.patches.applied(patches):
        yield


def _states(layer: Any) -> Iterator[State]:
    """Yield the states of a layer of transformers' linear attention, or of one with both kinds of attention."""
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None)
        for tensor in states.values() if isinstance(states, dict) else ():
            if isinstance(tensor, torch.Tensor):
                yield State(tuple(tensor.shape[1:]), tensor.element_size(), name == "conv_states")


def _layers(cache: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers of a cache with their kinds: transformers' `Cache` lists them; of others each entry is one."""
    if cache is None:
        return
    crossed = getattr(cache, "cross_attention_cache", None)
    if crossed is not None:
        yield from _layers(cache.self_attention_cache)
        yield from (("cross-attention", layer) for _, layer in _layers(crossed))
        return
    layers = getattr(cache, "layers", cache)
    if not isinstance(layers, (list, tuple)):
        yield "state", layers
        return
    for layer in layers:
        yield _kind(layer), layer


def _kind(layer: Any) -> str:
    """Name the kind of a cached layer: full attention, a sliding window, a state of fixed size, or two of them."""
    if isinstance(layer, torch.Tensor):
        return "state"
    name = type(layer).__name__
    linear, window = "LinearAttention" in name, "SlidingWindow" in name
    attention = "Attention" in name.removeprefix("LinearAttention").removesuffix("Layer") or not linear
    kinds = (["state"] if linear else []) + ([("sliding window" if window else "full attention")] if attention else [])
    return " and ".join(kinds)


# -- caches that transformers lacks -----------------------------------------------------------------------------------


def refuse_missing_cache(model: nn.Module, generation: Generation) -> None:
    """Raise `InputError`, before the model runs, where transformers has no such cache for it, or lacks a package."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return
    if getattr(config, "is_encoder_decoder", False):
        if generation.is_quantized:
            raise InputError(
                "transformers quantizes no cache of an encoder-decoder: use --cache-implementation dynamic or static"
            )
        if generation.is_offloaded:
            raise InputError(
                "transformers offloads the cross-attention of an encoder-decoder without bringing it back to the GPU: "
                "use --cache-implementation dynamic or static"
            )
    from transformers import cache_utils

    layer_types = getattr(cache_utils, "get_layer_types_and_kwargs", None)
    kinds = set(layer_types(config.get_text_config(decoder=True))[0]) if layer_types else {_FULL}
    if generation.is_quantized and kinds != {_FULL}:
        others = ", ".join(sorted(kinds - {_FULL}))
        raise InputError(f"transformers quantizes caches of full attention alone, and this model has {others} layers")
    if generation.cache_implementation == "offloaded_static" and _FULL not in kinds:
        raise InputError(
            "transformers offloads no static layers with a window or a state: use --cache-implementation offloaded"
        )
    if (
        generation.is_quantized
        and generation.kv_cache_dtype != "fp8"
        and not (importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"))
    ):
        raise InputError(
            f"a KV cache in {generation.kv_cache_dtype or 'int4'} needs optimum-quanto: pip install optimum-quanto"
        )
