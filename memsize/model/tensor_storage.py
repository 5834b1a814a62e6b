"""The bytes that tensors and models really store, each byte counted once.

A tensor is taken apart until plain memory is left: a wrapper subclass into its inner tensors, a sparse tensor into
indices and values, a quantized one into data, scales and zero points, a packed object of a quantized module into the
tensors that it unpacks to. The bytes of a model are assigned in registration order (`memsize.records.byte_ownership`),
so that views, ties and expanded tensors add nothing twice.

Known limits: a packed object is counted as the tensors it unpacks to, not in the padded form that the CPU kernels keep;
tensors that only a closure or an object other than a module, list, tuple or dict holds are not found.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Hashable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memsize.records.byte_ownership import Extent, own_bytes, strided_extent
from memsize.records.trace import Kind, StoredPart, StoredTensor, TensorSpec
from memsize.torch_internals.pytree import paths_of
from memsize.torch_internals.sparse_tensors import PARTS

PLAIN_TYPES = (torch.Tensor, nn.Parameter)
"""The classes of tensors that wrap no others."""
_BITSANDBYTES = ("quant_state", "CB", "SCB")
_MODULE_STATE = frozenset(vars(nn.Module())) | {"_c"}
_HOLDER = re.compile(r"(?:^|\.)(?:_packed_params|_all_weight_values(\.\d+))$")
_SCRIPTED_PACKED = ("_packed_params", "_packed_weight", "_packed_weight_ih", "_packed_weight_hh", "param")
_SCALARS = frozenset({int, float, bool, str, type(None)})
_HOLDERS = (torch.Tensor, nn.Module, dict, list, tuple)
TORCHSCRIPT_CONSTANT = "TorchScript constant"
"""The wrapper of a tensor in the code of a scripted module."""
_PAIRED = {"float4_e2m1fn_x2": 2}
"""Elements per stored element of dtypes that PyTorch itself counts in pairs."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without the prefix, as records have it: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The dtype and shape of a tensor, as records have them."""
    if tensor.is_nested:
        return TensorSpec(dtype_name(tensor.dtype), tuple(_size(tensor, dim) for dim in range(tensor.dim())))
    return _spec(tensor.dtype, tensor.shape)


@lru_cache(4096)
def _spec(dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    """Most tensors of a model share a few shapes."""
    return TensorSpec(dtype_name(dtype), tuple(shape))


def _size(nested: torch.Tensor, dim: int) -> int | None:
    """None where the parts differ: a symbol in the jagged layout, and an error in the strided one."""
    try:
        size = nested.size(dim)
    except RuntimeError:
        return None
    return size if isinstance(size, int) else None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor as its storage's record has it: of a nested one the number of elements."""
    return (int(tensor.numel()),) if tensor.is_nested else tuple(tensor.shape)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes that `tensor` keeps in memory: its whole storages, each counted once, whatever its dtype says."""
    return sum({extent.storage: extent.total for extent in map(extent_of, plain_tensors(tensor))}.values())


def storage_key(tensor: torch.Tensor) -> Hashable:
    """The identity of `tensor`'s memory: equal for tensors that share it, while one of them is alive.

    The storage's `_cdata` for a plain tensor, on `meta` too; a tuple of those for a tensor made of several.
    """
    keys = tuple(extent.storage for extent in map(extent_of, plain_tensors(tensor)))
    return keys[0] if len(keys) == 1 else keys


def wrapper_name(tensor: torch.Tensor) -> str | None:
    """``"torchao Int8Tensor"`` for a tensor that keeps its values in other tensors, None for any other."""
    if type(tensor) in PLAIN_TYPES:
        return None
    if not (is_wrapper(tensor) or any(vars(tensor).get(name) is not None for name in _BITSANDBYTES)):
        return None
    return f"{type(tensor).__module__.split('.')[0]} {type(tensor).__name__}"


# Taking a tensor apart


def pieces(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold `tensor`'s memory, by name; a plain tensor is its own single piece.

    Nothing for a lazy parameter that is not initialised. A nested tensor counts as its buffer.
    """
    if is_simple(tensor):
        yield name, tensor
        return
    if has_no_shape(tensor):
        return
    for inner, value in _inner(tensor):
        full = f"{name}.{inner}" if name and inner else name or inner
        if value is tensor:
            yield full, tensor
        else:
            yield from pieces(value, full)
    yield from _bitsandbytes(tensor, name)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`pieces` without their names."""
    return [tensor] if is_simple(tensor) else [piece for _, piece in pieces(tensor)]


def is_simple(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is its own single piece, as nearly all are; decided cheaply."""
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested


def has_no_shape(tensor: torch.Tensor | None) -> bool:
    """Whether `tensor` is a lazy parameter or buffer that is not initialised; decided cheaply where it is ordinary."""
    return type(tensor) not in PLAIN_TYPES and tensor is not None and is_lazy(tensor)


def _inner(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if is_wrapper(tensor):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        values = ((name, getattr(tensor, name)) for name in names)
        yield from ((name, value) for name, value in values if isinstance(value, torch.Tensor))  # not DTensor's mesh
    elif tensor.layout in PARTS:
        yield from ((name.removeprefix("_"), getattr(tensor, name)()) for name in PARTS[tensor.layout])
    elif tensor.is_quantized and tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield "", tensor
        yield "scales", tensor.q_per_channel_scales()
        yield "zero_points", tensor.q_per_channel_zero_points()
    else:
        yield "", tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the class of `tensor` keeps its values in other tensors."""
    return type(tensor) not in PLAIN_TYPES and hasattr(tensor, "__tensor_flatten__")


def _bitsandbytes(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that bitsandbytes attaches: `SCB`, `CB` unless it is the data, parts of its `quant_state`."""
    if type(tensor) in PLAIN_TYPES:
        return
    for key in _BITSANDBYTES:
        for full, value in _state_tensors(vars(tensor).get(key), f"{name}.{key}" if name else key):
            if key != "CB" or extent_of(value) != extent_of(tensor):
                yield full, value


def _state_tensors(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    elif state is not None:
        for key in ("absmax", "code", "offset", "state2"):
            yield from _state_tensors(getattr(state, key, None), f"{name}.{key}")


# Extents of memory


def extent_of(tensor: torch.Tensor) -> Extent:
    """The bytes that a plain tensor spans of its storage. Bytes in the gaps between its elements count as needed."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # opaque memory, such as MKL-DNN's: PyTorch shows no storage
        return _whole(("opaque", id(tensor)), tensor.numel() * tensor.element_size())
    total, item = storage.nbytes(), tensor.element_size()
    fills = total == tensor.numel() * item > 0 and tensor.is_contiguous()
    if tensor.is_nested or tensor.is_quantized or fills:
        return _whole(storage._cdata, total)
    span, _ = strided_extent(tensor.shape, tensor.stride(), 8 * item)
    start = int(tensor.storage_offset()) * item if span else 0
    end = min(start + int(span), total)
    return Extent(storage._cdata, start, end, total, end - start)


def _whole(storage: Hashable, total: int) -> Extent:
    return Extent(storage, 0, total, total, total)


# The tensors that a model stores


def stored_tensors(model: nn.Module) -> tuple[StoredTensor, ...]:
    """Every tensor that `model` holds, module by module in registration order, with its own and its shared bytes.

    Registered tensors come before attributes, so that an attribute which only names a parameter again is the tied one;
    the very same tensor object under an attribute is left out (an RNN's `_flat_weights`). A tensor whose memory was
    counted before has 0 bytes and a `tied_to`. Of several views of one block, each gets its own extent, and the first
    of them also the bytes that none covers.
    """
    modules = paths_of(model)
    order = {path: index for index, path in enumerate(modules.values())}
    tensors: list[_NamedTensor] = []
    seen: set[int] = set()
    for module, path in modules.items():
        tensors += _own(module, f"{path}." if path else "", path)
        seen.update(map(id, (module, *module._parameters.values(), *module._buffers.values())))
    for module, path in modules.items():
        tensors += _unregistered(module, f"{path}." if path else "", path, seen)
    rows = map(_row, tensors, _shares(tensors))
    return tuple(sorted(rows, key=lambda row: order[row.layer]))


class _Shares(NamedTuple):
    """The bytes that each piece of a named tensor owns, and the name of the first tensor that shares memory with it."""

    pieces: list[tuple[str, torch.Tensor]]
    owned: list[int]
    shared_with: str | None


def _shares(tensors: Sequence[_NamedTensor]) -> list[_Shares]:
    """Assign every byte to the first tensor that spans it, and bytes that none spans to the first of their storage."""
    pieces = [tensor.pieces for tensor in tensors]
    owners = [index for index, parts in enumerate(pieces) for _ in parts]
    ownership = own_bytes([extent_of(piece) for parts in pieces for _, piece in parts])
    shares: list[_Shares] = [_Shares(parts, [], None) for parts in pieces]
    for index, piece in zip(owners, ownership, strict=True):
        share = shares[index]
        share.owned.append(piece.owned + piece.uncovered)
        owner = index if piece.shared_with is None else owners[piece.shared_with]
        if share.shared_with is None and owner != index:
            shares[index] = share._replace(shared_with=tensors[owner].name)
    return shares


# Finding the tensors of a model


class _NamedTensor(NamedTuple):
    """A tensor with its name in the model. `packed` names the packed object that it was unpacked from."""

    name: str
    kind: Kind
    layer: str
    tensor: torch.Tensor
    packed: str | None = None

    @property
    def pieces(self) -> list[tuple[str, torch.Tensor]]:
        return [("", self.tensor)] if is_simple(self.tensor) else list(pieces(self.tensor))


def _row(entry: _NamedTensor, shares: _Shares) -> StoredTensor:
    tensor = entry.tensor
    lazy, total = has_no_shape(tensor), sum(shares.owned)
    elements = 0 if lazy else tensor.numel() * _PAIRED.get(dtype_name(tensor.dtype), 1)
    # bitsandbytes packs two elements a byte, and keeps the original shape beside them.
    original = None if type(tensor) in PLAIN_TYPES else getattr(vars(tensor).get("quant_state"), "shape", None)
    if original is not None and not lazy:
        elements = math.prod(original)
    parts: tuple[StoredPart, ...] = ()
    if len(shares.pieces) > 1 or is_wrapper(tensor):
        named = zip(shares.pieces, shares.owned, strict=True)
        parts = tuple(StoredPart(name or "data", spec_of(piece), owned) for (name, piece), owned in named)
    return StoredTensor(
        entry.name,
        entry.kind,
        entry.layer,
        TensorSpec(dtype_name(tensor.dtype), ()) if lazy else spec_of(tensor),
        elements=elements,
        bytes=total,
        reported_bytes=0 if lazy else tensor.numel() * tensor.element_size(),
        trainable=entry.kind == "parameter" and tensor.requires_grad,
        tied_to=shares.shared_with if total == 0 else None,
        wrapper=entry.packed or wrapper_name(tensor),
        parts=parts,
    )


def _own(module: nn.Module, prefix: str, layer: str) -> Iterator[_NamedTensor]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield _NamedTensor(prefix + name, "parameter", layer, parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield _NamedTensor(prefix + name, "buffer", layer, buffer)
    for name, packed in _packed_objects(module):
        yield from _packed(packed, name, layer, prefix)
    for name, constant, is_weight in _constants(module):
        yield _NamedTensor(prefix + name, "packed" if is_weight else "attribute", layer, constant, TORCHSCRIPT_CONSTANT)


def _unregistered(module: nn.Module, prefix: str, layer: str, seen: set[int]) -> Iterator[_NamedTensor]:
    """Tensors that `module` holds without registering them: as attributes, or inside lists, tuples, dicts, modules."""
    for name, value in list(vars(module).items()):
        if name not in _MODULE_STATE and _may_hold(value):
            yield from _tensors_in(value, prefix + name, layer, seen)


def _tensors_in(value: Any, name: str, layer: str, seen: set[int]) -> Iterator[_NamedTensor]:
    if not _may_hold(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield _NamedTensor(name, "attribute", layer, value)
    elif isinstance(value, nn.Module):
        yield from _loose_module(value, name, layer, seen)
    elif isinstance(value, dict):
        for key, item in list(dict.items(value)):
            yield from _tensors_in(item, f"{name}[{key!r}]", layer, seen)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{name}[{index}]", layer, seen)
    else:
        # What bitsandbytes' Linear8bitLt moves from its weight into its `state` in the first forward.
        moved = ((key, getattr(value, key, None)) for key in ("CB", "SCB"))
        tensors = ((key, item) for key, item in moved if isinstance(item, torch.Tensor))
        yield from (_NamedTensor(f"{name}.{key}", "attribute", layer, item) for key, item in tensors)


def _may_hold(value: Any) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return False
    if kind is tuple or kind is list:
        return not _SCALARS.issuperset(map(type, value))
    return issubclass(kind, _HOLDERS) or kind.__name__ == "MatmulLtState"


def _loose_module(module: nn.Module, name: str, layer: str, seen: set[int]) -> Iterator[_NamedTensor]:
    for path, inner in module.named_modules(prefix=name):
        if inner is not module and id(inner) in seen:
            continue
        seen.add(id(inner))
        for entry in _own(inner, f"{path}.", layer):
            if entry.kind == "packed":
                yield entry
            elif id(entry.tensor) not in seen:
                seen.add(id(entry.tensor))
                yield _NamedTensor(entry.name, "attribute", layer, entry.tensor)
        yield from _unregistered(inner, f"{path}.", layer, seen)


# Constants of TorchScript


def _constants(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Tensors in the code of a scripted module, and whether they were weights: those of a frozen module, and not the
    constants that a trace captures.

    Freezing leaves no parameters, and names its constants after them; a saved file forgets the names.
    """
    scripted: Any = module if isinstance(module, torch.jit.ScriptModule) else None
    # A module that a traced one never called has no forward.
    graph = scripted.graph if scripted is not None and scripted._c._has_method("forward") else None
    for node in [] if graph is None else graph.findAllNodes("prim::Constant", recurse=True):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            name, tensor = node.output().debugName(), node.t("value")
            is_weight = name.startswith("self.") or (tensor.dim() > 0 and not any(True for _ in module.parameters()))
            if is_weight or tensor.dim():  # the rest are numbers
                yield name.removeprefix("self."), tensor, is_weight


# Packed objects of torch.ao's quantized modules


def _packed_objects(module: nn.Module) -> Iterator[tuple[str, torch.ScriptObject]]:
    named = vars(module)
    if isinstance(module, torch.jit.ScriptModule):
        scripted: Any = module._c
        named = {name: scripted.getattr(name) for name in _SCRIPTED_PACKED if scripted.hasattr(name)}
    yield from ((name, value) for name, value in named.items() if type(value) is torch.ScriptObject)


def _packed(packed: torch.ScriptObject, attribute: str, layer: str, prefix: str) -> Iterator[_NamedTensor]:
    """The tensors of a packed object, shown under the module that the user sees, not under torch.ao's holder in it.

    ``fc._packed_params._packed_params`` gives ``fc.weight`` and ``fc.bias``.
    """
    stem = _HOLDER.sub(r"\1", prefix.removesuffix(".")).lstrip(".")
    steps = [stem, attribute if attribute.startswith("_packed_weight_") else ""]  # a cell has two: _ih and _hh
    with warnings.catch_warnings(action="ignore"):  # unpacking creates quantized tensors, which are deprecated
        unpacked = list(_unpacked(packed))
    for inner, tensor in unpacked:
        name = ".".join(step for step in (*steps, inner) if step)
        yield _NamedTensor(name, "packed", _HOLDER.sub("", layer), tensor, _packed_name(packed))


def _packed_name(packed: Any) -> str:
    return f"torch.ao {packed._type().name().removesuffix('Base')}"


def _unpacked(packed: Any, ending: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if "unpack" in packed._method_names():
        state = packed.unpack()
        weight, *rest = state if isinstance(state, tuple) else (state,)
        if "Linear" in _packed_name(packed) and not weight.is_quantized:
            # A float16 linear unpacks to float32, though it keeps 2 bytes an element.
            weight = torch.empty(weight.shape, dtype=torch.float16, device="meta")
        yield f"weight{ending}", weight
        yield from ((f"bias{ending}", bias) for bias in rest[:1] if bias is not None)
    else:
        yield from _cell_tensors(packed.__getstate__()[0], ending)


def _cell_tensors(state: Any, ending: str) -> Iterator[tuple[str, torch.Tensor]]:
    """An RNN layer's ``(kind, biases, scales, flags, [packed_ih, packed_hh])``; its biases are those of the two."""
    if isinstance(state, torch.Tensor):
        yield f"tensor{ending}", state
    elif isinstance(state, tuple) and state and isinstance(state[0], str) and isinstance(state[-1], (list, tuple)):
        for suffix, inner in zip(("_ih", "_hh"), state[-1], strict=False):
            yield from _unpacked(inner, ending + suffix)
    elif isinstance(state, (list, tuple)):
        for index, inner in enumerate(state):
            yield from _cell_tensors(inner, f"{ending}{index}")
