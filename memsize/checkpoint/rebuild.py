"""What the functions that a checkpoint's pickle names would make of their arguments, as values.

Source: `torch._utils`, `torch._tensor` and the classes' own ``__reduce__``. A function that is not here makes an
`Object`, whose arguments are kept and searched for tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memsize.checkpoint.dtypes import torch_dtype
from memsize.checkpoint.values import Composite, Dict, Global, Object, StorageValue, TensorValue

Args = tuple[Any, ...]
MOST_DIMENSIONS = 64
_LARGEST = 2**63


def meaning(made_by: Any, args: Args) -> Any:
    """What calling `made_by` with `args` would return, as a value. Raises ValueError for arguments that cannot be."""
    if not isinstance(made_by, Global) or not isinstance(args, tuple):
        raise ValueError("not a call of a name")
    rule = _RULES.get(made_by.path)
    return rule(args) if rule else Object(made_by, args)


def dtype_of(value: Any) -> str:
    """The dtype that a ``torch.float16`` in a pickle is; raises ValueError when it is none."""
    module, _, name = value.path.rpartition(".") if isinstance(value, Global) else ("", "", "")
    dtype = torch_dtype(name) if module == "torch" else None
    if dtype is None:
        raise ValueError(f"not a dtype: {value}")
    return dtype


def sizes(value: Any) -> tuple[int, ...]:
    """A shape or a stride; raises ValueError when it cannot be one."""
    if not isinstance(value, tuple | list) or len(value) > MOST_DIMENSIONS:
        raise ValueError("not a shape")
    if not all(type(size) is int and 0 <= size < _LARGEST for size in value):
        raise ValueError("not a shape")
    return tuple(value)


def _strided(
    storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None, trainable: Any = None
) -> TensorValue:
    if not isinstance(storage, StorageValue) or type(offset) is not int or not 0 <= offset < _LARGEST:
        raise ValueError("not a tensor")
    shape, steps = sizes(size), sizes(stride)
    if len(shape) != len(steps):
        raise ValueError("a shape and a stride of different lengths")
    grad = trainable if isinstance(trainable, bool) else None
    return TensorValue(dtype or storage.dtype, shape, steps, offset, storage, grad)


def _tensor(args: Args) -> TensorValue:
    """``_rebuild_tensor(storage, offset, size, stride)`` and ``_v2``, which adds requires_grad and hooks."""
    storage, offset, size, stride = args[:4]
    return _strided(storage, offset, size, stride, None, args[4] if len(args) > 4 else None)


def _tensor_v3(args: Args) -> TensorValue:
    """``_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype)``, of an untyped storage."""
    storage, offset, size, stride, trainable, _, dtype = args[:7]
    return _strided(storage, offset, size, stride, dtype_of(dtype), trainable)


def _meta(args: Args) -> TensorValue:
    dtype, size, stride, trainable = args[:4]
    return TensorValue(dtype_of(dtype), sizes(size), sizes(stride), 0, None, bool(trainable))


def _parameter(args: Args) -> Any:
    """``_rebuild_parameter(data, requires_grad, hooks)``: the same tensor, which may be trained."""
    data = args[0]
    if isinstance(data, TensorValue):
        return TensorValue(data.dtype, data.shape, data.stride, data.offset, data.storage, args[1] is True)
    if isinstance(data, Composite):
        return Composite(data.kind, data.inner, args[1] is True)
    return data


def _parameter_with_state(args: Args) -> Any:
    """A parameter, and attributes that hang on it."""
    parameter, state = _parameter(args[:3]), args[3]
    return Composite("", [("", parameter), ("", state)]) if _holds_more(state) else parameter


def _quantized(args: Args) -> Any:
    """Data, and for a quantizer per channel its scales and zero points, which are tensors of their own."""
    data = _strided(*args[:4])
    inner = [value for value in args[4][1:] if isinstance(value, TensorValue)]
    if not inner:
        return data
    named = zip(("scales", "zero_points"), inner, strict=False)
    return Composite("quantized per channel", [("", data), *named])


def _sparse(args: Args) -> Composite:
    layout, data = args[:2]
    names = ("indices", "values") if layout == "torch.sparse_coo" else _COMPRESSED.get(layout, ())
    if not names or not isinstance(data, tuple):
        raise ValueError(f"not a sparse layout: {layout}")
    return Composite(str(layout).removeprefix("torch."), list(zip(names, data, strict=False)))


_COMPRESSED = {
    f"torch.sparse_{kind}": (f"{compressed}_indices", f"{plain}_indices", "values")
    for kind, compressed, plain in (
        ("csr", "crow", "col"),
        ("csc", "ccol", "row"),
        ("bsr", "crow", "col"),
        ("bsc", "ccol", "row"),
    )
}


def _nested(args: Args) -> Composite:
    return Composite("nested", list(zip(("values", "sizes", "strides", "offsets"), args, strict=False)))


def _from_type(args: Args) -> Any:
    """``_rebuild_from_type_v2(function, type, its arguments, state)``: a tensor subclass, or attributes on a tensor."""
    function, kind, inner_args, state = args[:4]
    if not str(function).startswith("torch._utils."):
        return Composite(_short(kind), [("", inner_args), ("", state)])
    inner = meaning(function, inner_args)
    if isinstance(inner, TensorValue) and not _holds_more(state):
        return inner
    trainable = getattr(inner, "trainable", None)
    return Composite(_short(kind), [("", inner), ("", state)], trainable)


def _holds_more(state: Any) -> bool:
    """Whether a tensor's state may hold tensors of its own."""
    if isinstance(state, Dict):
        return bool(state.pairs)
    return state is not None and state != ()


def _wrapper(args: Args) -> Composite:
    """The outer shell of a wrapper subclass, which keeps no data; what it wraps comes as its state."""
    return Composite(_short(args[0]), [])


def _moved(args: Args) -> Any:
    """``_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)``: kept as what it came from."""
    return args[0]


def _short(kind: Any) -> str:
    """``torchao Int8Tensor`` for ``torchao.quantization…Int8Tensor``."""
    root, _, rest = str(kind).partition(".")
    return f"{root} {rest.rpartition('.')[2]}" if isinstance(kind, Global) and rest else "wrapper"


def _mapping(args: Args) -> Dict:
    """A dictionary class, called with nothing, with pairs, or with another dictionary."""
    given = next((arg for arg in args if isinstance(arg, Dict | list)), None)
    if isinstance(given, Dict):
        return Dict(given.pairs)
    return Dict([(pair[0], pair[1]) for pair in given or () if isinstance(pair, list | tuple) and len(pair) == 2])


def _items(args: Args) -> Any:
    """A list, tuple or set made from another."""
    given = args[0] if args else []
    return given if isinstance(given, list | tuple) else []


def _first(args: Args) -> Any:
    return args[0] if args else ""


def _reconstructed(args: Args) -> Any:
    """``copyreg._reconstructor(class, base, state)``: an object whose base class, a dict or a list, has a state."""
    kind, _, state = args[:3]
    made = meaning(_class(kind), ())
    if isinstance(made, Object) and state is not None:
        made.states.append(state)
    elif isinstance(made, Dict) and isinstance(state, Dict):
        return Dict(state.pairs)
    return made


def _made_anew(args: Args) -> Any:
    return meaning(_class(args[0]), args[1:])


def _class(kind: Any) -> Any:
    """What an object is to be made of: not by another way to make objects, which could go on without end."""
    if str(kind).startswith("copyreg."):
        raise ValueError(f"not a class: {kind}")
    return kind


_RULES: dict[str, Callable[[Args], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_numpy": _moved,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _moved,
    "torch._utils._rebuild_xla_tensor": _moved,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.nn.parameter.Parameter": _first,
    "torch.serialization._get_layout": _first,
    "torch.Size": _items,
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": _mapping,
    "builtins.dict": _mapping,
    "builtins.list": _items,
    "builtins.tuple": _items,
    "builtins.set": _items,
    "builtins.frozenset": _items,
    "builtins.bytearray": _first,
    "_codecs.encode": _first,
    "copyreg._reconstructor": _reconstructed,
    "copyreg.__newobj__": _made_anew,
    **{
        f"torch.jit._pickle.{name}": _first
        for name in "build_intlist build_tensorlist build_doublelist build_boollist restore_type_tag".split()
    },
}
