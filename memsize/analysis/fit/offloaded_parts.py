"""Both CPU offloads of diffusers' pipelines, in a meta copy: weights on the host have storages without bytes.

Sources: `enable_model_cpu_offload` and `enable_sequential_cpu_offload` of diffusers 0.42, and the hooks of accelerate
1.15 that they install (`CpuOffload`, `AlignDevicesHook`), which empty the allocator's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from memsize.analysis.remedies import NotApplicable
from memsize.loading.hubs.diffusion import Pipeline
from memsize.model.tensor_storage import plain_tensors
from memsize.processes.simulation import current_part
from memsize.tracing.ledger import Ledger
from memsize.tracing.run import Setup


class _Weights:
    """The tensors that `find` returns, which move between the host and the GPU. They begin on the host."""

    def __init__(self, find: Callable[[], Iterable[torch.Tensor | None]]) -> None:
        self._find = find
        self._on_host: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self.offload()

    def offload(self) -> bool:
        """Free them on the GPU; return whether any was there."""
        there = [storage for storage in self._storages() if storage.nbytes()]
        for storage in there:
            self._on_host[storage._cdata] = storage, storage.nbytes()
            storage.resize_(0)
        return bool(there)

    def load(self) -> None:
        """Copy them to the GPU. Those that were cast since they were offloaded are new tensors, which are there."""
        for storage in self._storages():
            if (on_host := self._on_host.pop(storage._cdata, None)) is not None:
                storage.resize_(on_host[1])

    def _storages(self) -> list[torch.UntypedStorage]:
        """Their storages, of tied tensors once."""
        tensors = (tensor for tensor in self._find() if tensor is not None)
        storages = (piece.untyped_storage() for tensor in tensors for piece in plain_tensors(tensor))
        return list({storage._cdata: storage for storage in storages}.values())


def offload_models(setup: Setup) -> Setup:
    """Bring each part to the GPU when it is called, where it stays until the next in the pipeline's order is called."""
    pipeline = _pipeline(setup)
    parts, before = dict(pipeline.named_children()), None
    for name in str(getattr(pipeline.kind, "model_cpu_offload_seq", None)).split("->"):
        if (part := parts.get(name)) is not None:
            weights = _Weights(partial(_tensors, part))
            _before_calls(part, partial(_load, weights, before))
            before = weights
    if before is None:
        raise NotApplicable("the pipeline has no order in which its parts are offloaded")
    return setup


def offload_layers(setup: Setup) -> Setup:
    """Bring the parameters of each module to the GPU for its own forward alone. Buffers stay there."""
    for part in _pipeline(setup).children():
        weights_of = {module: _Weights(module._parameters.values) for module in part.modules() if module._parameters}
        for module, weights in weights_of.items():
            module.register_forward_pre_hook(partial(_load_alone, weights))
            module.register_forward_hook(partial(_offload, [weights]))
        _before_calls(part, partial(_offload, list(weights_of.values())))  # what was cast is on the host, too
    return setup


def _pipeline(setup: Setup) -> Pipeline:
    if not isinstance(setup.model, Pipeline):
        raise NotApplicable("the model is not a pipeline of diffusers")
    if setup.precision.sizes:
        raise NotApplicable("the weights are quantized")
    return setup.model


def _tensors(part: nn.Module) -> list[torch.Tensor]:
    return [*part.parameters(), *part.buffers()]


def _load(weights: _Weights, before: _Weights | None, *_: object) -> None:
    if before is not None and before.offload():
        _empty_cache()
    weights.load()


def _load_alone(weights: _Weights, *_: object) -> None:
    weights.load()
    _empty_cache()


def _empty_cache() -> None:
    if ledger := current_part(Ledger):
        ledger.empty_cache()


def _offload(weights: Iterable[_Weights], *_: object) -> None:
    for one in weights:
        one.offload()


def _before_calls(part: nn.Module, hook: Callable[..., None]) -> None:
    """Call `hook` before the forward of `part`, and before the methods by which an autoencoder is called."""
    part.register_forward_pre_hook(hook)
    for name in ("encode", "decode"):
        if (method := getattr(part, name, None)) is not None:
            setattr(part, name, partial(_called, hook, method))


def _called(hook: Callable[[], None], method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    hook()
    return method(*arguments, **options)
