"""The weights of a server in the segments of an allocator: of a traced run, and as a server has loaded them."""

from __future__ import annotations

from memsize.device.allocation_events import OMITTED
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.replay import Levels, replay
from memsize.records.trace import StoredPart, Trace

WEIGHTS = ("parameter", "buffer")
_PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM and SGLang compute in one product (`QKVParallelLinear` and `MergedColumnParallelLinear` in vLLM's
`model_executor/layers/linear.py`).
"""


def weights_in(trace: Trace, allocator: AllocatorConfig) -> Levels:
    """Bytes of the blocks and segments of parameters and buffers in the trace."""
    stored = {number for number, storage in enumerate(trace.storages) if storage.role in WEIGHTS}
    return replay(((e.storage, e.delta) for e in trace.events if e.storage in stored and e.delta > 0), allocator).final


def loaded_weights(trace: Trace, allocator: AllocatorConfig, *, repacks: bool) -> Levels:
    """The same when a server has loaded the model: the parts of a quantized weight are tensors, and those of layers
    that are computed in one product are one. Where it `repacks` integers, it then makes another tensor of each of their
    parts, layer by layer, and gives back what is wholly free (`process_weights_after_loading` of gptq_marlin.py).
    """
    sizes: dict[tuple[object, str], int] = {}
    packed: set[tuple[object, str]] = set()
    for tensor in trace.tensors:
        parent, _, name = tensor.layer.rpartition(".")
        product = next((names for names in _PRODUCTS if name in names), None)
        key: object = (parent, product, tensor.name.rpartition(".")[2]) if product else tensor.name
        for part in tensor.parts or (StoredPart("", tensor.spec, tensor.bytes),):
            sizes[key, part.name] = sizes.get((key, part.name), 0) + part.bytes
            if repacks and any(other.spec.dtype == "int32" for other in tensor.parts):
                packed.add((key, part.name))
    events = [(number, size) for number, size in enumerate(sizes.values()) if size]
    for number, (named, size) in enumerate(sizes.items()):
        if size and named in packed:
            events += [(len(sizes) + number, size), (number, -size)]
    # An event that changes nothing, before which the cache is emptied.
    return replay([*events, OMITTED], allocator, emptied=[len(events)]).final
